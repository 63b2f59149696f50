"""Tests of the look inside a model."""

import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf.analysis import probe as probe_module
from routing_tf.layers.routing.online_kmeans import normalize
from tests import golden_cases
from tests.analysis import small_cases
from tests.models import small_models

array = small_models.array


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)


def assert_unchanged(lm):
    for block in lm.backbone.blocks:
        for group in block.attention.head_groups:
            assert not {"attend", "scores"} & set(vars(group))
            assert getattr(group, "routing_scope", "full") == "full"


def test_hidden_states_and_parts():
    lm = small_cases.language_model()
    inputs = small_cases.windows()
    probe = small_cases.probe(lm)
    states = probe.hidden_states(inputs)
    parts = probe.part_outputs(states)
    x = inputs["token_ids"]
    for layer in lm.backbone.embedding_layers:
        x = array(layer(x))
    assert len(states) == 3
    assert list(parts) == [
        f"block_{index} {name}"
        for index in range(2)
        for name in ("routed_heads", "local_heads", "output")
    ]
    for block, state in zip(probe.blocks, states, strict=False):
        assert_close(state, x)
        for name, output in small_cases.group_outputs(block, x).items():
            assert_close(parts[f"{block.name} {name}"], output)
        x, _ = golden_cases.run(block, x)
        assert_close(parts[f"{block.name} output"], x)
    assert_close(states[-1], x)
    assert_unchanged(lm)


def test_parts_of_other_states():
    lm = small_cases.language_model()
    probe = small_cases.probe(lm)
    states = probe.hidden_states(small_cases.windows())
    states[1] = states[1][:, ::-1]
    parts = probe.part_outputs(states)
    expected, _ = golden_cases.run(probe.blocks[1], states[1])
    assert_close(parts["block_1 output"], expected)


def test_scopes():
    lm = small_cases.language_model(num_layers=1)
    full, prefix = (
        small_cases.probe(lm, scope).hidden_states(small_cases.windows())[1]
        for scope in ("full", "prefix")
    )
    # For the last token the prefix is the whole.
    assert_close(full[:, -1], prefix[:, -1])
    assert np.abs(full - prefix).max() > 0.01
    assert_unchanged(lm)


def test_maps():
    lm = small_cases.language_model()
    for block, state, found in small_cases.looked_into(lm):
        assert found.block == block.name
        _, maps = small_cases.attention_maps(block, state)
        assert list(found.maps) == ["routed_heads", "local_heads"]
        assert_close(np.concatenate(list(found.maps.values()), axis=1), maps)
    assert_unchanged(lm)


def test_nothing_is_read_across_packed_documents():
    lm = small_cases.language_model(routing="token_choice")
    segment_ids = np.repeat([[3, 1]], (10, small_cases.LENGTH - 10), axis=1)
    inputs = {**small_cases.windows(), "segment_ids": segment_ids}
    for found in small_cases.probe(lm).attention(inputs):
        for maps in found.maps.values():
            assert not np.any(maps[:, :, 10:, :10])
            assert_close(maps.sum(axis=-1), 1.0)


def scores_of(block, state):
    """Scores of the queries of routed heads, which come first, `[B, H, L, K]`."""
    attention = block.attention
    group = attention.head_groups[0]
    queries = array(block.attention_input(state)) @ array(attention.query_kernel)
    queries = small_cases.split_heads(queries, attention.key_dim)[:, : group.num_heads]
    queries = array(normalize(ops.convert_to_tensor(queries)))
    return np.einsum("bhld,hkd->bhlk", queries, array(group.kmeans.centroids))


def test_clusters_of_token_choice():
    lm = small_cases.language_model(routing="token_choice", num_layers=1)
    for block, state, found in small_cases.looked_into(lm):
        clusters = found.clusters["routed_heads"]
        best = scores_of(block, state).argmax(axis=-1)
        np.testing.assert_array_equal(clusters.nearest, best)
        np.testing.assert_array_equal(clusters.members, best[..., None] == range(3))


def test_clusters_with_thresholds():
    lm = small_cases.language_model(routing="expert_threshold", num_layers=1)
    ((block, state, found),) = small_cases.looked_into(lm)
    scores = scores_of(block, state)
    (thresholds,) = array(block.attention.head_groups[0].thresholds.thresholds)
    margins = scores - thresholds[:, None]
    second = np.sort(margins, axis=-1)[..., -2:-1]
    expected = margins >= np.maximum(second, 0.0)
    members = found.clusters["threshold_heads"].members
    np.testing.assert_array_equal(members, expected)
    assert members.any() and not members.all()


@pytest.mark.parametrize(
    "scope", ["full", pytest.param("prefix", marks=pytest.mark.thorough)]
)
def test_clusters_of_expert_choice(scope):
    lm = small_cases.language_model(num_layers=1)
    for block, state, found in small_cases.looked_into(lm, scope):
        scores = scores_of(block, state)
        clusters = found.clusters["routed_heads"]
        np.testing.assert_array_equal(clusters.nearest, scores.argmax(axis=-1))
        least = np.sort(scores, axis=2)[:, :, -4:-3]  # the window is 4
        np.testing.assert_array_equal(clusters.members, scores >= least)


@pytest.mark.parametrize("routing", ["hashed", "random"])
def test_clusters_that_are_not_learned(routing):
    lm = small_cases.language_model(routing=routing, num_layers=1)
    for found in small_cases.probe(lm).attention(small_cases.windows()):
        (name,) = found.clusters
        clusters = found.clusters[name]
        assert (clusters.members.sum(axis=-1) == 1).all()
        # Keys that are seen sit in the cluster of the query.
        same = clusters.nearest[..., None] == clusters.nearest[..., None, :]
        seen = found.maps[name] > 0
        assert seen.any() and not (seen & ~same).any()


def test_images():
    model = small_cases.image_model(num_layers=1)
    inputs = small_cases.images()
    probe = small_cases.probe(model)
    states = probe.hidden_states(inputs)
    assert [state.shape for state in states] == [(1, 32, 16)] * 2
    # In the order of the model, which goes from block to block.
    places = model.places().reshape(-1)
    embedded = array(model.embedding(inputs["images"])).reshape(1, 32, 16)
    assert_close(states[0][:, places], embedded)
    parts = probe.part_outputs(states)
    assert_close(parts["block_0 output"], states[1])
    later = ~np.tri(32, dtype="bool")
    (found,) = probe.attention(inputs)
    assert found.clusters["routed_heads"].members.shape == (1, 2, 32, 3)
    for maps in found.maps.values():
        assert not maps[..., later].any()
    assert_close(maps.sum(axis=-1), 1.0)  # those of local heads


def test_recorded_ends_with_an_error():
    group = layers.LocalHeads(2, block_shape=(4,))
    with pytest.raises(KeyError), probe_module.recorded([group], "attend"):
        assert "attend" in vars(group)
        raise KeyError
    assert "attend" not in vars(group)
