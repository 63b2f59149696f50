"""Tests of queries that see, while training, all that the mask lets them see."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import models
from routing_tf import zoo
from routing_tf.layers.routing import exploring
from routing_tf.models.build import make_backbone
from routing_tf.training.engines.step import TrainingStep
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

BATCH, HEADS, LENGTH, DIM = 2, 2, 24, 6
ALL = LENGTH + 5
REAL = helpers.tail_mask(LENGTH, LENGTH, 15)
BIAS = helpers.normal(BATCH, LENGTH, seed=9)
WINDOW = {"attention_window": 3, "dropout_seed": 1}


def heads(cls=layers.RoutedHeads, number=ALL, **options):
    return cls(HEADS, 4, exploring_queries=number, **{**WINDOW, **options})


hashed = functools.partial(heads, layers.HashedHeads)
reformer = functools.partial(heads, zoo.ReformerHeads)
KINDS = {
    "token choice": heads,
    "expert choice": functools.partial(heads, routing="expert_choice"),
    "expert threshold": functools.partial(heads, zoo.ThresholdHeads),
    "apart": functools.partial(heads, share_query_key=False),
    "hashed": hashed,
    "hashed, rounds": functools.partial(reformer, num_rounds=2),
    "hashed, apart": functools.partial(hashed, share_query_key=False),
    "not itself": functools.partial(reformer, attends_to_self=False),
    "cluster-strided": functools.partial(heads, layers.ClusterStridedHeads),
    "random": functools.partial(heads, layers.RandomHeads),
    "multipole": functools.partial(
        *(heads, layers.MultipoleHeads), clusters_per_query=1, num_recent=2
    ),
    "positions of rank": functools.partial(heads, max_relative_position=3),
    "capped": functools.partial(heads, share_query_key=False, logit_soft_cap=1.5),
    "capped rounds": functools.partial(reformer, num_rounds=2, logit_soft_cap=1.5),
    "normalised": functools.partial(heads, qk_norm=True),
}
SHIFTED = (
    "token choice",
    "multipole",
    "expert threshold",
    "apart",
    "hashed, apart",
    "random",
)
WAYS = [(kind, True, int(kind in SHIFTED)) for kind in KINDS]
WAYS += [("token choice", True, 0)]
WAYS += [
    (kind, False, 0) for kind in ("expert choice", "not itself", "cluster-strided")
]


sequences = functools.partial(helpers.streams, LENGTH)


def run(group, *arrays, training=True, **options):
    options = {"use_causal_mask": True, **options}
    return golden_cases.run(group, *arrays, training=training, **options)[0]


def built(group):
    helpers.built(group).trainable = False
    return group


def keys_of(group, key):
    return key if group.needs_keys else None


FEW = [("token choice", True, 1), ("multipole", True, 1), ("hashed, apart", True, 1)]
FEW += [("cluster-strided", True, 0), ("expert choice", False, 0), ("capped", True, 0)]


@pytest.mark.parametrize("kind, causal, key_shift", kinds.some(WAYS, FEW))
def test_all_queries_that_explore_are_full_attention(kind, causal, key_shift):
    """The formula for queries that see all they may, themselves as the heads do."""
    query, key, value = sequences()
    group = KINDS[kind](key_shift=key_shift)
    options = {"query_mask": REAL, "value_mask": REAL, "token_bias": BIAS}
    arrays = query, keys_of(group, key), value
    actual = run(built(group), *arrays, **options, use_causal_mask=causal)

    query, key = helpers.compared(group, query, key if group.needs_keys else query)
    sees = np.tri(LENGTH, dtype="bool") | (not causal)
    if kind == "not itself":
        sees = sees & ~np.eye(LENGTH, dtype="bool")
        sees[0, 0] |= causal  # it alone
    sees, readable = np.broadcast_to(sees, (LENGTH, LENGTH)), REAL
    if key_shift:
        key = helpers.one_later(key, 2)
        readable = REAL & helpers.one_later(REAL, 1)
    sees = sees & readable[:, None, None]
    expected, _ = helpers.dense_attention(
        query, key, value, sees, BIAS[:, None, None], cap=group.logit_soft_cap
    )
    shown = np.broadcast_to(REAL[:, None, :, None], expected.shape)
    golden_cases.assert_close(actual[shown], expected[shown], 1e-5)
    if kind == "hashed" and causal:
        assert not actual[1, :, 15:].any()  # Padding does not explore.


def test_so_many_queries_of_each_head_explore_and_steps_draw_apart():
    query, _, value = sequences()
    groups = [built(hashed(number)) for number in (5, 5, 0)]
    first, same, plain = (run(group, query, None, value) for group in groups)
    np.testing.assert_array_equal(first, same)
    changed = (first != plain).any(axis=-1).sum(axis=-1)
    # The first token sees itself in any case, the next ones may.
    assert (changed <= 5).all() and (changed >= 2).all()
    assert (run(groups[0], query, None, value) != first).any()


@pytest.mark.parametrize("number", [7, ALL])
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


@pytest.mark.parametrize(
    "options",
    [
        {"training": False},
        pytest.param(
            {"is_cross_attention": True, "use_causal_mask": False},
            marks=pytest.mark.thorough,
        ),
        pytest.param({"routing_scope": "prefix"}, marks=pytest.mark.thorough),
    ],
)
def test_elsewhere_nobody_explores(options):
    query, key, value = sequences()
    key = key if "is_cross_attention" in options else None
    groups = [built(heads(number=n, routing="expert_choice")) for n in (ALL, 0)]
    outputs = [run(group, query, key, value, **options) for group in groups]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("kind", ["token choice", "hashed"])
def test_no_later_token_nor_padding_reaches_an_output(kind):
    start, outputs = 10, []
    group = built(KINDS[kind](number=6, key_shift=1))
    seed = ops.copy(group.exploring_seed.state)
    hidden = ~REAL[:, None, :, None]
    for factor, noise in ((1, 0), (1, 50), (-3, 0)):
        query, _, value = sequences()
        for x in (query, value):
            x += noise * hidden
            x[:, :, start:] *= factor
        group.exploring_seed.state.assign(seed)
        masks = {"query_mask": REAL, "value_mask": REAL}
        outputs.append(run(group, query, None, value, **masks))
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(*(x[:, :, :start] for x in outputs[::2]))
    assert (outputs[0] != outputs[2]).any()


@pytest.mark.parametrize("routing", [None, "reformer"])
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
    with pytest.raises(ValueError, match="`exploring_queries`.*exploring_queries=3"):
        models.Hyperparameters(exploring_queries=3, compatibility="exact")


def test_parts_and_replicas_of_a_step_explore_alike():
    """Dropout draws apart in each of them, see `TestObjective`."""
    layer = layers.RoutingAttention(2, 6, 3, 4, exploring_queries=6, dropout=0.3)
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
