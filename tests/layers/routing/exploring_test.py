"""Tests of queries that see, while training, all that the mask lets them see."""

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import models
from routing_tf.layers.routing import exploring
from routing_tf.models.build import make_backbone
from routing_tf.training.step import TrainingStep
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, LENGTH, DIM = 2, 2, 24, 6
ALL = LENGTH + 5
REAL = helpers.tail_mask(LENGTH, LENGTH, 15)
BIAS = helpers.normal(BATCH, LENGTH, seed=9)
WINDOW = {"attention_window": 3, "dropout_seed": 1}


def heads(cls=layers.RoutedHeads, number=ALL, **options):
    return cls(HEADS, 4, exploring_queries=number, **{**WINDOW, **options})


KINDS = {
    "token choice": {},
    "expert choice": {"routing": "expert_choice"},
    "expert threshold": {"routing": "expert_threshold"},
    "hashed": {"cls": layers.HashedHeads},
    "hashed, rounds": {"cls": layers.HashedHeads, "num_rounds": 2},
    "cluster-strided": {"cls": layers.ClusterStridedHeads},
    "random": {"cls": layers.RandomHeads},
    "positions of rank": {"max_relative_position": 3},
}
WITHOUT_MASK = [kind for kind in KINDS if kind != "expert threshold"]


def sequences(length=LENGTH, seed=0):
    return [helpers.normal(BATCH, HEADS, length, DIM, seed=seed + i) for i in range(3)]


def call(group, query, value, key=None, training=True, **options):
    options = {"use_causal_mask": True, **options}
    return golden_cases.to_numpy(group(query, key, value, training=training, **options))


def dense(query, value, key=None, causal=True, key_shift=0, real=None, bias=None):
    """The formula for queries that see all they may, themselves as the heads do."""
    query = helpers.normalize(query)
    key = query if key is None else helpers.normalize(key)
    sees = np.ones((LENGTH, LENGTH), "bool")
    if causal:
        sees = np.tri(LENGTH, k=0, dtype="bool")
    readable = np.ones((BATCH, LENGTH), "bool") if real is None else real
    bias = np.zeros((BATCH, LENGTH)) if bias is None else bias
    if key_shift:
        key, has_key = helpers.one_later(key, 2), helpers.one_later(readable, 1)
        readable = readable & has_key
    sees = sees & readable[:, None, None]
    output, _ = helpers.dense_attention(query, key, value, sees, bias[:, None, None])
    return output


@pytest.mark.parametrize("key_shift", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_all_queries_that_explore_are_full_attention(kind, key_shift):
    query, _, value = sequences()
    group = heads(**KINDS[kind], key_shift=key_shift)
    options = {"query_mask": REAL, "value_mask": REAL, "token_bias": BIAS}
    actual = call(group, query, value, **options)
    expected = dense(query, value, key_shift=key_shift, real=REAL, bias=BIAS)
    shown = np.broadcast_to(REAL[:, None, :, None], expected.shape)
    golden_cases.assert_close(actual[shown], expected[shown], 1e-5)


@pytest.mark.parametrize("kind", WITHOUT_MASK)
def test_without_a_causal_mask_they_see_all_positions(kind):
    query, _, value = sequences()
    masks = {"query_mask": REAL, "value_mask": REAL, "use_causal_mask": False}
    actual = call(heads(**KINDS[kind]), query, value, **masks)
    expected = dense(query, value, causal=False, real=REAL)
    shown = np.broadcast_to(REAL[:, None, :, None], expected.shape)
    golden_cases.assert_close(actual[shown], expected[shown], 1e-5)


@pytest.mark.parametrize("cls", [layers.RoutedHeads, layers.HashedHeads])
def test_separate_keys(cls):
    query, key, value = sequences()
    group = heads(cls, share_query_key=False, key_shift=1)
    expected = dense(query, value, key, key_shift=1)
    golden_cases.assert_close(call(group, query, value, key), expected, 1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_what_sees_itself_only_alone_explores_so(causal):
    query, _, value = sequences()
    group = heads(layers.HashedHeads, attends_to_self=False)
    actual = call(group, query, value, use_causal_mask=causal)
    query = helpers.normalize(query)
    sees = np.tri(LENGTH, dtype="bool") if causal else np.ones((LENGTH,) * 2, "bool")
    sees = sees & ~np.eye(LENGTH, dtype="bool")
    if causal:
        sees[0, 0] = True
    expected, _ = helpers.dense_attention(query, query, value, sees)
    golden_cases.assert_close(actual, expected, 1e-5)


def test_so_many_queries_of_each_head_explore():
    query, _, value = sequences()
    group, other = heads(number=5), heads(number=0)
    call(group, query, value, training=False)
    call(other, query, value, training=False)
    other.kmeans.centroids.assign(group.kmeans.centroids)
    changed = call(group, query, value) != call(other, query, value)
    changed = changed.any(axis=-1)
    # The first token sees itself in any case, the next ones may.
    assert (changed.sum(axis=-1) <= 5).all() and (changed.sum(axis=-1) >= 2).all()


@pytest.mark.parametrize("number", [1, 7, LENGTH, ALL])
def test_positions_are_distinct_and_all_of_them_where_there_are_no_more(number):
    seed = exploring.make_seed(3)
    drawn = [
        golden_cases.to_numpy(exploring.draw_positions(number, HEADS, LENGTH, seed))
        for _ in range(2)
    ]
    assert drawn[0].shape == (HEADS, min(number, LENGTH))
    for row in drawn[0]:
        assert len(set(row)) == len(row) and min(row) >= 0 and max(row) < LENGTH
    if number == 7:
        assert (np.sort(drawn[0]) != np.sort(drawn[1])).any()
        assert (np.sort(drawn[0][0]) != np.sort(drawn[0][1])).any()


def test_steps_draw_apart_and_the_same_seed_draws_alike():
    query, _, value = sequences()
    groups = [heads(layers.HashedHeads, 4) for _ in range(2)]
    for group in groups:
        call(group, query, value, training=False)
    groups[1].projections.assign(groups[0].projections)
    first, second = ([call(g, query, value) for g in groups] for _ in range(2))
    np.testing.assert_array_equal(first[0], first[1])
    np.testing.assert_array_equal(second[0], second[1])
    assert (first[0] != second[0]).any()


@pytest.mark.parametrize(
    "options",
    [
        {"training": False},
        {"is_cross_attention": True, "use_causal_mask": False},
        {"routing_scope": "prefix"},
    ],
)
def test_elsewhere_nobody_explores(options):
    query, key, value = sequences()
    routing = {"routing": "expert_choice"}
    if "is_cross_attention" not in options:
        key = None
    groups = [heads(number=number, **routing) for number in (ALL, 0)]
    for group in groups:
        group.build(*[query.shape] * 3)
        helpers.randomize(group)
        group.trainable = False
    outputs = [call(g, query, value, key, **options) for g in groups]
    np.testing.assert_array_equal(*outputs)


def test_token_choice_explores_in_any_scope():
    query, _, value = sequences()
    actual = call(heads(), query, value, routing_scope="prefix")
    golden_cases.assert_close(actual, dense(query, value), 1e-5)


@pytest.mark.parametrize("kind", ["token choice", "hashed", "cluster-strided"])
@pytest.mark.parametrize("number", [6, ALL])
def test_no_later_token_reaches_an_earlier_output(kind, number):
    query, _, value = sequences()
    start, outputs = 10, []
    group = heads(**KINDS[kind], number=number, key_shift=1)
    group.build(*[query.shape] * 3)
    helpers.randomize(group)
    group.trainable = False
    seed = ops.copy(group.exploring_seed.state)
    for factor in (1, -3):
        query, value = query.copy(), value.copy()
        query[:, :, start:], value[:, :, start:] = (
            x[:, :, start:] * factor + (factor < 0) for x in (query, value)
        )
        group.exploring_seed.state.assign(seed)
        outputs.append(call(group, query, value))
    np.testing.assert_array_equal(*(x[:, :, :start] for x in outputs))
    assert (outputs[0] != outputs[1]).any()


@pytest.mark.parametrize("kind", ["token choice", "expert choice", "hashed"])
@pytest.mark.parametrize("causal", [True, False])
def test_padding_has_no_influence(kind, causal):
    outputs = []
    group = heads(**KINDS[kind], number=12)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    helpers.randomize(group)
    group.trainable = False
    seed = ops.copy(group.exploring_seed.state)
    for factor in (1, 50):
        query, _, value = sequences()
        for x in (query, value):
            x *= np.where(REAL, 1, factor)[:, None, :, None]
        group.exploring_seed.state.assign(seed)
        masks = {"query_mask": REAL, "value_mask": REAL}
        output = call(group, query, value, use_causal_mask=causal, **masks)
        outputs.append(output[np.broadcast_to(REAL[:, None], output.shape[:3])])
    np.testing.assert_array_equal(*outputs)


def test_padding_does_not_explore():
    query, _, value = sequences()
    groups = [heads(layers.HashedHeads, number) for number in (ALL, 0)]
    masks = {"query_mask": REAL, "value_mask": REAL}
    outputs = [call(group, query, value, **masks) for group in groups]
    assert not outputs[0][1, :, 15:].any()
    np.testing.assert_array_equal(outputs[0][1, :, 15:], outputs[1][1, :, 15:])


@pytest.mark.parametrize("number", [0, ALL])
def test_gradients_reach_matches_in_other_clusters(number):
    """One token lies in the other cluster than all the rest."""
    query, _, value = sequences()
    query[:] = np.abs(query) + np.arange(DIM)
    query[:, :, 3] *= -1
    group = layers.RoutedHeads(
        HEADS, 2, LENGTH, exploring_queries=number, dropout_seed=1
    )
    group.build(*[query.shape] * 3)
    direction = helpers.normalize(np.arange(DIM))
    group.kmeans.centroids.assign(
        np.broadcast_to(np.stack([direction, -direction]), (HEADS, 2, DIM))
    )
    group.trainable = False
    found = golden_cases.gradients(
        group,
        lambda outputs, losses: ops.sum(outputs[:, :, 4:] ** 2),
        {"query": query, "value": value, "use_causal_mask": True, "training": True},
        wrt=("value",),
    )
    reached = np.abs(found.inputs["value"][:, :, 3]).max()
    assert reached > 0 if number else reached == 0


def attention(remat, number=6, dtype=None):
    keras.utils.set_random_seed(0)
    layer = layers.RoutingAttention(
        2, 6, 3, 4, exploring_queries=number, dropout=0.3, remat=remat, dtype=dtype
    )
    layer.build((BATCH, LENGTH, DIM))
    helpers.randomize(layer)
    return layer


@pytest.mark.parametrize("remat", [True, "weights"])
def test_activations_that_are_computed_again(remat):
    results = []
    for each in (False, remat):
        layer = attention(each)
        x = helpers.normal(BATCH, LENGTH, DIM)
        arguments = {"query": x, "use_causal_mask": True, "training": True}
        for _ in range(2):
            found = golden_cases.gradients(
                layer,
                lambda outputs, losses: ops.sum(outputs**2) + sum(losses),
                arguments,
                wrt=("query",),
            )
        state = [golden_cases.to_numpy(v) for v in layer.non_trainable_variables]
        results.append((found.outputs, found.inputs["query"], *state))
    for expected, actual in zip(*results, strict=True):
        golden_cases.assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision(dtype):
    x = helpers.normal(BATCH, LENGTH, DIM)
    output = attention(False, ALL, dtype)(x, use_causal_mask=True, training=True)
    assert keras.backend.standardize_dtype(output.dtype) == dtype[6:]
    assert np.isfinite(golden_cases.to_numpy(ops.cast(output, "float32"))).all()


@pytest.mark.parametrize(
    "layer",
    [
        lambda: heads(number=3),
        lambda: heads(layers.HashedHeads, 3),
        lambda: heads(layers.ClusterStridedHeads, 3),
        lambda: layers.RoutingAttention(2, 6, 3, 4, exploring_queries=3),
    ],
)
def test_keeps_its_number(layer):
    layer = layer()
    assert layer.get_config()["exploring_queries"] == 3
    helpers.assert_keeps_settings(layer)


def test_routing_attention_hands_on_what_helps_to_find_matches():
    clustering = {"clusters_per_query": 2, "anchor_weight": 0.25}
    layer = layers.RoutingAttention(2, 6, 3, 4, clustering=clustering)
    (group,) = layer.head_groups
    assert group.clusters_per_query == 2
    assert group.kmeans.anchor_weight == 0.25
    helpers.assert_keeps_settings(layer)


@pytest.mark.parametrize("value", [-1, 1.5, None, True])
def test_refuses_other_numbers(value):
    message = "`exploring_queries` must be .* Received: exploring_queries="
    with pytest.raises(ValueError, match=message):
        heads(number=value)
    with pytest.raises(ValueError, match=message):
        layers.RoutingAttention(2, 6, 3, 4, num_local_heads=2, exploring_queries=value)


def test_without_them_nothing_is_drawn():
    assert not hasattr(heads(number=0), "exploring_seed")


@pytest.mark.parametrize("routing", [None, "hashed", "random", "reformer"])
def test_models_hand_their_number_on(routing):
    h = models.Hyperparameters(
        **{"num_layers": 1, "hidden_dim": 16, "num_cluster_strided_heads": 1},
        **{"num_local_heads": 1, "num_routed_heads": 2, "exploring_queries": 3},
        **{"vocabulary_size": 9, "max_sequence_length": 16, "routing": routing},
    )
    backbone = make_backbone(h)
    groups = backbone.blocks[0].attention.head_groups
    numbers = [getattr(group, "exploring_queries", None) for group in groups]
    assert numbers == [3, 3, None]
    with pytest.raises(ValueError, match="`exploring_queries` must be 0 with flaws"):
        models.Hyperparameters(exploring_queries=3, compatibility="exact")


def test_parts_and_replicas_of_a_step_explore_alike():
    """Dropout draws apart in each of them, see `TestObjective`."""
    layer = attention(False)
    x = keras.Input((LENGTH, DIM))
    model = keras.Model(x, layer(x, use_causal_mask=True))
    model.compile("sgd")
    step = TrainingStep(model, model.optimizer, num_parts=2)
    seeds = [item for item in step._seeds if exploring.is_exploring_seed(item[0])]
    ((variable, seed),) = seeds
    assert len(step._seeds) > len(seeds)

    def state(*place):
        return golden_cases.to_numpy(step._seed_state(variable, seed, *place)).tolist()

    assert state(4, 0, 0) == state(4, 1, 0) == state(4, 0, 1) != state(5, 0, 0)
    whole = TrainingStep(model, model.optimizer)
    other = golden_cases.to_numpy(whole._seed_state(variable, seed, 4, 0, 0)).tolist()
    assert state(4, 1, 1) == other
