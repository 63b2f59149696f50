"""Tests of what holds for every kind of heads."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, LENGTH, DIM = 2, 2, 14, 6
RANKS = {"max_relative_position": 2, "embeddings_initializer": "zeros"}
CLUSTERS = {"attention_window": 4, **RANKS}
CENTROIDS = {"num_clusters": 3, "decay": 0.9, "commitment_weight": 0.5, **CLUSTERS}
EXPERTS = {"routing": "expert_choice", **CENTROIDS}
KINDS = {
    "full": lambda **o: layers.FullHeads(HEADS, **RANKS, **o),
    "local": lambda **o: layers.LocalHeads(HEADS, (4,), **RANKS, **o),
    "strided": lambda **o: layers.StridedHeads(HEADS, (3,), **RANKS, **o),
    "fixed": lambda **o: layers.FixedHeads(HEADS, 4, 2, **o),
    "best_blocks": lambda **o: layers.BlockTopKHeads(HEADS, 3, 2, **RANKS, **o),
    "fixed_apart": lambda **o: layers.FixedHeads(HEADS, 4, 1, "separate", **o),
    "linear": lambda **o: layers.FeatureMapHeads(HEADS, chunk_length=4, **o),
    "performer": lambda **o: layers.FeatureMapHeads(
        HEADS, "positive", num_features=9, chunk_length=4, **o
    ),
    "random_features": lambda **o: layers.FeatureMapHeads(
        HEADS, "fourier", num_features=9, **o
    ),
    "synthesizer": lambda **o: layers.SynthesizerHeads(
        HEADS, max_length=20, rank=6, **o
    ),
    "random_logits": lambda **o: layers.SynthesizerHeads(
        HEADS, "random", max_length=20, **o
    ),
    "sliding": lambda **o: layers.SlidingHeads(HEADS, 3, True, **o),
    "routed": lambda **o: layers.RoutedHeads(HEADS, **EXPERTS, **o),
    "routed_apart": lambda **o: layers.RoutedHeads(
        HEADS, share_query_key=False, **EXPERTS, **o
    ),
    "token_choice": lambda **o: layers.RoutedHeads(
        HEADS, routing="token_choice", **CENTROIDS, **o
    ),
    "token_choice_apart": lambda **o: layers.RoutedHeads(
        HEADS, routing="token_choice", share_query_key=False, **CENTROIDS, **o
    ),
    "threshold": lambda **o: layers.RoutedHeads(
        HEADS, routing="expert_threshold", **CENTROIDS, **o
    ),
    "threshold_apart": lambda **o: layers.RoutedHeads(
        HEADS, routing="expert_threshold", share_query_key=False, **CENTROIDS, **o
    ),
    "prefix": lambda **o: layers.RoutedHeads(
        HEADS, routing_scope="prefix", prefix_block_size=7, **EXPERTS, **o
    ),
    "cluster_strided": lambda **o: layers.ClusterStridedHeads(HEADS, **CENTROIDS, **o),
    "cluster_strided_apart": lambda **o: layers.ClusterStridedHeads(
        HEADS, share_query_key=False, prefix_block_size=7, **CENTROIDS, **o
    ),
    "random": lambda **o: layers.RandomHeads(HEADS, 4, seed=5, **CLUSTERS, **o),
    "random_apart": lambda **o: layers.RandomHeads(
        HEADS, 4, share_query_key=False, **CLUSTERS, **o
    ),
    "hashed": lambda **o: layers.HashedHeads(HEADS, 4, **CLUSTERS, **o),
    "hashed_apart": lambda **o: layers.HashedHeads(
        HEADS, 4, share_query_key=False, **CLUSTERS, **o
    ),
}
# The others differ little from one of these.
FEW = (
    "full",
    "local",
    "strided",
    "fixed_apart",
    "performer",
    "synthesizer",
    "best_blocks",
    "routed_apart",
    "token_choice_apart",
    "threshold_apart",
    "cluster_strided",
    "random",
    "hashed",
)
# They have no keys to shift.
SYNTHESIZED = ("synthesizer", "random_logits")


def some_thorough(kinds):
    return pytest.mark.parametrize(
        "kind",
        [
            pytest.param(kind, marks=() if kind in FEW else pytest.mark.thorough)
            for kind in kinds
        ],
    )


every_kind = some_thorough(KINDS)
kinds_with_keys = some_thorough(kind for kind in KINDS if kind not in SYNTHESIZED)
# They have no weights that could be dropped.
LINEAR = ("linear", "performer", "random_features")
# Each of them shifts keys or values in a way of its own.
SHIFTED = ("local", "routed_apart", "token_choice", "hashed_apart", "prefix")


def directions(kind):
    """With which values of `use_causal_mask` heads can be called."""
    is_causal = kind.startswith(("token_choice", "threshold"))
    return (True,) if is_causal else (False, True)


def built_group(kind, **options):
    group = KINDS[kind](**options)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    helpers.randomize(group)
    return group


def tokens(group, seed=0):
    query, key, value = (
        helpers.normal(BATCH, HEADS, LENGTH, DIM, seed=seed + i) for i in range(3)
    )
    return {"query": query, "key": key if group.needs_keys else None, "value": value}


def cut(arrays, length):
    return {k: None if x is None else x[:, :, :length] for k, x in arrays.items()}


@pytest.mark.parametrize(
    "kind, causal, key_shift",
    [
        *((kind, kind != "random", 0) for kind in FEW),
        ("routed_apart", True, 1),
        *(
            pytest.param(*way, marks=pytest.mark.thorough)
            for way in (
                *((kind, False, 0) for kind in KINDS if False in directions(kind)),
                *((kind, True, 0) for kind in KINDS if kind not in FEW),
                *((kind, True, 1) for kind in SHIFTED if kind != "routed_apart"),
            )
            if way != ("random", False, 0)
        ),
    ],
)
def test_padding_has_no_influence(kind, causal, key_shift):
    group, length = built_group(kind, key_shift=key_shift), 9
    weights = group.get_weights()
    arrays = tokens(group)
    real = helpers.tail_mask(LENGTH, length, 7)
    real[0, 2] = False
    bias = helpers.normal(BATCH, LENGTH, seed=5)
    results = []
    for used, noise in ((length, 0.0), (LENGTH, 0.0), (LENGTH, 50.0)):
        other = {
            name: None if x is None else x + noise * ~real[:, None, :, None]
            for name, x in arrays.items()
        }
        group.set_weights(weights)
        output, losses = golden_cases.run(
            group,
            **{name: x for name, x in cut(other, used).items() if x is not None},
            **({} if other["key"] is not None else {"key": None}),
            query_mask=real[:, :used],
            value_mask=real[:, :used],
            token_bias=bias[:, :used] + noise * ~real[:, :used],
            use_causal_mask=causal,
            training=True,
        )
        shown = output[:, :, :length].swapaxes(1, 2)[real[:, :length]]
        results.append([shown, *losses, *group.get_weights()])
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            golden_cases.assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("key_shift", [0, 1])
@pytest.mark.parametrize(
    "kind", ["token_choice", "token_choice_apart", "threshold_apart", "prefix"]
)
def test_a_query_without_a_place_gets_zero(kind, key_shift):
    """Its key is seen all the same, if only the mask of the queries hides it."""
    group = built_group(kind, key_shift=key_shift)
    query_mask = np.ones((BATCH, LENGTH), "bool")
    query_mask[:, [3, 9]] = False
    outputs = [
        golden_cases.run(group, **tokens(group), use_causal_mask=True, **masks)[0]
        for masks in ({}, {"query_mask": query_mask})
    ]
    expected = np.where(query_mask[:, None, :, None], outputs[0], 0.0)
    np.testing.assert_array_equal(outputs[1], expected)


@every_kind
def test_no_query_sees_a_later_value(kind):
    """Where the members stay the same: the map from values to outputs.

    Whether members stay the same is another question, for `causality_test.py`.
    """
    group = built_group(kind)
    arrays = tokens(group)
    value = np.broadcast_to(
        np.eye(LENGTH, dtype="float32"), (BATCH, HEADS, LENGTH, LENGTH)
    )
    # Columns beyond the value size are averaged without relative positions.
    arrays["value"] = np.concatenate([arrays["value"], value], axis=-1)
    for causal in directions(kind):
        output, _ = golden_cases.run(group, **arrays, use_causal_mask=causal)
        seen = output[..., DIM:]
        later = np.broadcast_to(np.triu(np.ones((LENGTH, LENGTH)), 1) > 0, seen.shape)
        assert np.any(seen[~later] > 0)
        assert np.any(seen[later] > 0) == (not causal)


@kinds_with_keys
def test_with_shifted_keys_the_first_query_sees_nothing(kind):
    """And no query the first value, which has no key before it, or a later one."""
    group = built_group(kind, key_shift=1)
    arrays = tokens(group)
    places = np.broadcast_to(
        np.eye(LENGTH, dtype="float32"), (BATCH, HEADS, LENGTH, LENGTH)
    )
    arrays["value"] = np.concatenate([arrays["value"], places], axis=-1)
    output, _ = golden_cases.run(group, **arrays, use_causal_mask=True)
    assert np.all(output[:, :, 0] == 0.0)
    seen = output[..., DIM:] > 0
    possible = np.tri(LENGTH, dtype="bool") & (np.arange(LENGTH) > 0)
    assert not np.any(seen & ~possible)
    # Its own value may follow a key like its query.
    assert np.any(seen & np.eye(LENGTH, dtype="bool"))


def test_heads_with_shifted_keys_read_what_followed_their_like():
    """Where each token comes a second time: an induction head."""
    token = np.tile(np.random.default_rng(0).permutation(7), 2)
    query = 20 * np.eye(7, dtype="float32")[token]
    place = np.eye(14, dtype="float32")
    arrays = [np.broadcast_to(x, (1, 1, *x.shape)) for x in (query, query, place)]
    for group in (
        layers.FullHeads(1, key_shift=1),
        layers.LocalHeads(1, (14,), key_shift=1),
        layers.RoutedHeads(1, 3, 14, key_shift=1),
        layers.RoutedHeads(1, 3, 14, share_query_key=False, key_shift=1),
        layers.HashedHeads(1, 4, 14, key_shift=1),
    ):
        group.build(*[x.shape for x in arrays])
        key = arrays[1] if group.needs_keys else None
        output, _ = golden_cases.run(
            group, arrays[0], key, arrays[2], use_causal_mask=True
        )
        golden_cases.assert_close(output[0, 0, 7:], place[1:8], 1e-2)


@kinds_with_keys
def test_key_shift_survives_a_config(kind):
    helpers.assert_keeps_settings(KINDS[kind](key_shift=1))


@kinds_with_keys
def test_shifted_keys_are_for_causal_self_attention(kind):
    group = built_group(kind, key_shift=1)
    for causal, cross in ((False, False), (False, True), (True, True)):
        received = f"use_causal_mask={causal}, is_cross_attention={cross}"
        with pytest.raises(ValueError, match=f"`key_shift=1` .*Received: {received}"):
            group(**tokens(group), use_causal_mask=causal, is_cross_attention=cross)


@pytest.mark.parametrize("kind", ["full", "routed", "hashed"])
def test_refuses_wrong_shifts(kind):
    for received in (2, -1, 0.5, 1.0, True, False, None, "1", [1]):
        with pytest.raises(ValueError) as error:
            KINDS[kind](key_shift=received)
        assert "`key_shift` must be 0" in str(error.value)
        assert f"Received: key_shift={received!r}" in str(error.value)


@pytest.mark.parametrize(
    "kind", ["routed", "token_choice", "cluster_strided", "random", "hashed"]
)
def test_queries_may_read_the_clusters_of_keys(kind):
    helpers.assert_keeps_settings(KINDS[f"{kind}_apart"](query_cluster="key"))


@pytest.mark.parametrize("kind", ["local", "routed_apart", "hashed"])
def test_no_gradient_flows_from_earlier_outputs_to_later_values(kind):
    group, position = built_group(kind), 6
    result = golden_cases.gradients(
        group,
        lambda output, losses: keras.ops.sum(output[:, :, :position] ** 2),
        {**tokens(group), "use_causal_mask": True},
        wrt=("value",),
    )
    assert np.any(result.inputs["value"][:, :, :position])
    assert not np.any(result.inputs["value"][:, :, position:])


@every_kind
def test_settings_and_weights_survive_saving(kind, tmp_path):
    group = KINDS[kind](dropout=0.0 if kind in LINEAR else 0.1, name=kind)
    helpers.assert_keeps_settings(group)
    attention = layers.MixedAttention(
        [group], key_dim=DIM, kernel_initializer="ones", name="attention"
    )
    helpers.assert_survives_saving(
        attention,
        tmp_path,
        helpers.normal(BATCH, LENGTH, DIM),
        use_causal_mask=directions(kind)[0],
    )


@pytest.mark.parametrize("kind", ["local", "strided", "routed", "hashed"])
@pytest.mark.parametrize("setting", ["fixed", "trainable"])
def test_weight_of_the_token_bias(kind, setting):
    group, plain = built_group(kind, token_bias_weight=setting), built_group(kind)
    weights = [w for w in group.weights if w.name == "token_bias_weight"]
    assert [w.trainable for w in weights] == [setting == "trainable"]
    assert len(plain.weights) == len(group.weights) - 1
    others = [w for w in group.weights if w is not weights[0]]
    for weight, other in zip(plain.weights, others, strict=True):
        weight.assign(other)
    weights[0].assign(2.5)
    bias = helpers.normal(BATCH, LENGTH, seed=5)

    def differentiate(layer, bias):
        return golden_cases.gradients(
            layer,
            lambda output, losses: keras.ops.sum(output**2),
            {**tokens(layer), "token_bias": bias},
            wrt=("token_bias",),
        )

    weighted, expected = differentiate(group, bias), differentiate(plain, 2.5 * bias)

    golden_cases.assert_close(weighted.outputs, expected.outputs, 1e-5)
    by_bias = expected.inputs["token_bias"]
    golden_cases.assert_close(weighted.inputs["token_bias"], 2.5 * by_bias, 1e-4)
    if setting == "trainable":
        gradient = weighted.variables[weights[0].path]
        golden_cases.assert_close(gradient, np.sum(bias * by_bias), 1e-3)


def test_weight_of_the_token_bias_starts_at_one():
    group = layers.FullHeads(1, token_bias_weight="trainable")
    group.build(*[(1, 1, 4, 2)] * 3)
    (weight,) = group.weights
    assert golden_cases.to_numpy(weight) == 1.0 and weight.shape == ()


def test_refuses_an_unknown_weight_of_the_token_bias():
    with pytest.raises(ValueError) as error:
        layers.FullHeads(1, token_bias_weight="learned")
    assert "`token_bias_weight`" in str(error.value)
    assert "Received: token_bias_weight='learned'" in str(error.value)


def test_a_group_without_a_pattern_says_so():
    group = layers.HeadGroup(1)
    group.build(*[(1, 1, 4, 2)] * 3)
    with pytest.raises(NotImplementedError):
        group(*[np.ones((1, 1, 4, 2), "float32")] * 3)


@pytest.mark.parametrize("kind", ["routed", "random", "hashed"])
def test_refuses_to_normalize_over_one_number(kind):
    with pytest.raises(ValueError, match="`key_dim`.*at least 2.*key_dim=1"):
        KINDS[kind]().build(*[(BATCH, HEADS, LENGTH, 1)] * 3)


def test_a_hidden_key_leaves_the_gradient_of_the_weight_finite():
    group = layers.FullHeads(1, token_bias_weight="trainable")
    group.build(*[(None, 1, None, 4)] * 3)
    query = helpers.normal(1, 1, 5, 4)
    bias = np.array([[0.0, 1.0, -np.inf, 2.0, 0.5]], "float32")
    result = golden_cases.gradients(
        group,
        lambda output, losses: keras.ops.sum(output**2),
        {"query": query, "key": query, "value": query, "token_bias": bias},
    )
    assert all(np.isfinite(gradient).all() for gradient in result.variables.values())


def test_a_bias_of_integers_is_no_other_bias():
    group = layers.FullHeads(1, token_bias_weight="fixed")
    group.build(*[(None, 1, None, 4)] * 3)
    group.bias_weight.assign(0.5)
    query, bias = helpers.normal(1, 1, 5, 4), np.arange(5)[None]
    outputs = [
        golden_cases.run(group, query, query, query, token_bias=bias.astype(kind))[0]
        for kind in ("int32", "float32")
    ]
    np.testing.assert_array_equal(*outputs)
