"""Causality to the last bit: no output depends on a later token.

A last bit that changes in one layer can change the cluster of a token in the next
one, so "almost equal" would be a leak. All comparisons are of one function at one
shape.
"""

import functools
import json

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf.models.release import heads as release_heads
from tests import golden_cases
from tests.layers import helpers
from tests.zoo import cases

HEADS, CLUSTERS, DIM, KEY_DIM = 2, 6, 8, 6
RELATIVE = {"max_relative_position": 6, "embeddings_initializer": "zeros"}

routed = functools.partial(
    layers.RoutedHeads, HEADS, routing="expert_choice", **RELATIVE
)
strided = functools.partial(layers.ClusterStridedHeads, HEADS, **RELATIVE)
CLUSTERED = {
    "token_choice": functools.partial(routed, routing="token_choice"),
    "threshold": functools.partial(routed, routing="expert_threshold"),
    "prefix": functools.partial(routed, routing_scope="prefix", prefix_block_size=29),
    "cluster_strided": functools.partial(strided, prefix_block_size=29),
    "hashed": functools.partial(layers.HashedHeads, HEADS, **RELATIVE),
    "hashed_in_rounds": functools.partial(
        layers.HashedHeads, HEADS, hash="rotation", num_rounds=2, **RELATIVE
    ),
    "random": functools.partial(layers.RandomHeads, HEADS, **RELATIVE),
}
OTHERS = {
    "two_clusters": functools.partial(
        routed, CLUSTERS, 4, routing="token_choice", clusters_per_query=2
    ),
    "local": functools.partial(
        layers.LocalHeads, HEADS, (7,), flange_blocks=2, **RELATIVE
    ),
    "dilated": functools.partial(
        layers.LocalHeads, HEADS, (4,), dilation=3, **RELATIVE
    ),
    "strided": functools.partial(layers.StridedHeads, HEADS, (6,), **RELATIVE),
    "fixed": functools.partial(layers.FixedHeads, HEADS, 8, 2),
    "fixed_separate": functools.partial(layers.FixedHeads, HEADS, 8, 3, "separate"),
    "sliding": functools.partial(layers.SlidingHeads, HEADS, 6, **RELATIVE),
    "sliding_strided": functools.partial(layers.SlidingHeads, HEADS, 6, True),
    "full": functools.partial(layers.FullHeads, HEADS, **RELATIVE),
    **cases.CAUSAL,
    **cases.UNSHIFTED,
}
# Where queries choose clusters apart from keys.
APART = ("token_choice", "hashed", "hashed_in_rounds", "threshold")
ON_JAX = keras.backend.backend() == "jax"


def maker(kind, window=3, clusters=CLUSTERS, **options):
    """Returns a function that makes heads of a kind; clusters have two settings."""
    if kind in OTHERS:
        return functools.partial(OTHERS[kind], **options)
    return lambda: CLUSTERED[kind](clusters, window, **options)


class Attention(keras.layers.Layer):
    """Self-attention under a causal mask, or attention to a memory, and a residual."""

    def __init__(self, make_group):
        super().__init__()
        self.attention = layers.MixedAttention(
            [make_group()], KEY_DIM, kernel_initializer="zeros"
        )

    def build(self, query_shape):
        self.attention.build(query_shape)

    def call(self, query, real, memory=None):
        return query + self.attention(
            query, memory, query_mask=real, use_causal_mask=memory is None
        )


def built_attention(make_group):
    attention = Attention(make_group)
    attention.build((None, None, DIM))
    helpers.randomize(attention)
    return attention


def stateless(layer, weights, *inputs):
    """Calls a layer with other weights."""
    variables = list(zip(layer.weights, weights, strict=True))
    with keras.StatelessScope(variables, collect_losses=True):
        return layer(*inputs)


def forward(layer, jit_compile=ON_JAX):
    """Returns the compiled layer; its weights may change between the calls."""
    call = helpers.compiled(functools.partial(stateless, layer), jit_compile)
    return lambda *inputs: call(layer.get_weights(), *inputs)


def gradient(layer, jit_compile):
    """Returns the compiled gradient by the inputs, given one by the outputs."""

    def objective(query, weights, real, cotangent):
        return ops.sum(stateless(layer, weights, query, real) * cotangent)

    call = helpers.compiled(golden_cases.gradient(objective), jit_compile)
    return lambda query, *rest: call(query, layer.get_weights(), *rest)


def sequence(batch, length, seed=0):
    """Returns random tokens; those of a second row come again, with equal scores."""
    tokens = helpers.normal(batch, length, DIM, seed=seed)
    tokens[1:] = tokens[1:, np.random.default_rng(seed).integers(5, size=length)]
    return tokens


def padding(batch, length):
    """One row has padding in the middle, the other one at the end."""
    return helpers.mask_with_a_hole(length, *[length, length - length // 5][:batch])


def assert_causal(call, query, real, last_positions, *memory):
    """Fails unless outputs up to a position keep all bits, whatever comes after it.

    What comes after it is once other tokens, and once padding.
    """
    before = call(query, real, *memory)
    assert np.all(np.isfinite(before))
    other = sequence(*query.shape[:2], seed=7)
    changes_later = False
    for last in last_positions:
        later = np.arange(query.shape[1]) > last
        for changed, mask in (
            (np.where(later[:, None], other, query), real),
            (query, real & ~later),
        ):
            after = call(changed, mask, *memory)
            np.testing.assert_array_equal(after[:, ~later], before[:, ~later])
            changes_later |= np.any(after[:, later] != before[:, later])
    # The first tokens may see nothing.
    assert changes_later and np.any(before[:, : last_positions[1] + 1] != 0.0)


def all_in_one_cluster(layer):
    """Equal scores for all clusters and tokens: the first cluster is the best."""
    for weight in layer.weights:
        if weight.name in ("centroids", "projections"):
            weight.assign(np.zeros(weight.shape))


def most_clusters_empty(layer):
    """Two clusters at opposite ends have the tokens, those at the origin none."""
    for weight in layer.weights:
        values = np.zeros(weight.shape)
        if weight.name == "centroids":
            values[:, 2] = helpers.normal(HEADS, KEY_DIM)
            values[:, 4] = -values[:, 2]
            weight.assign(values)
        elif weight.name == "projections":
            # Equal bits: the buckets whose bits differ are empty.
            weight.assign(values + helpers.normal(len(values), 1, KEY_DIM))


@pytest.mark.parametrize(
    "kind, shared",
    [
        *((kind, False) for kind in APART[:2]),
        *(pytest.param(x, False, marks=pytest.mark.thorough) for x in APART[2:]),
        *(pytest.param(kind, True, marks=pytest.mark.thorough) for kind in CLUSTERED),
    ],
)
def test_padding_among_the_queries_alone_gets_zero(kind, shared):
    heads = maker(kind, share_query_key=shared)()
    attention = layers.MixedAttention([heads], KEY_DIM, kernel_initializer="zeros")
    attention.build((None, None, DIM))
    helpers.randomize(attention)
    query, real = sequence(2, 41), padding(2, 41)

    def attend(query, real):
        masks = {"query_mask": real, "value_mask": ops.ones_like(real)}
        return attention(query, use_causal_mask=True, **masks)

    output = helpers.compiled(attend, ON_JAX or None)(query, real)
    assert np.all(output[~real] == 0.0) and np.any(output[real] != 0.0)


def thorough(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.thorough)


def ways_to_route():
    """Yields kinds with options, and whether TensorFlow has XLA, as JAX always has."""
    few = [
        ("token_choice", False, 1),
        ("threshold", False, 0),
        ("prefix", True, 0),
        ("cluster_strided", True, 1),
        ("hashed", False, 0),
        ("hashed_in_rounds", True, 0),
        ("random", True, 0),
    ]
    ways = [
        (kind, shared, key_shift)
        for kind in CLUSTERED
        for shared in ((True, False) if kind in APART else (True,))
        for key_shift in (0, 1)
    ]
    for way in ways:
        yield (*way, ON_JAX) if way in few else thorough(*way, ON_JAX)
    for way in () if ON_JAX else ways:
        kind, shared, key_shift = way
        if shared and key_shift:  # as with windows of 128 below
            continue
        mark = pytest.mark.thorough if shared and not key_shift else pytest.mark.slow
        default = way == ("token_choice", True, 0)
        yield pytest.param(*way, True, marks=() if default else mark)


@pytest.mark.parametrize("kind, shared, key_shift, jit_compile", list(ways_to_route()))
def test_later_tokens_change_no_bit_of_earlier_outputs(
    kind, shared, key_shift, jit_compile
):
    layer = built_attention(maker(kind, share_query_key=shared, key_shift=key_shift))
    call = forward(layer, jit_compile)
    for arrange in (helpers.randomize, all_in_one_cluster, most_clusters_empty):
        arrange(layer)
        assert_causal(call, sequence(2, 41), padding(2, 41), (key_shift, 13, 39))


@pytest.mark.parametrize(
    "kind, key_shift",
    [
        ("token_choice", 1),
        *(thorough(*way) for way in (("token_choice", 0), ("hashed", 0))),
    ],
)
def test_shapes_that_follow_the_data_are_causal(kind, key_shift):
    """Windows so wide that the first members of a cluster stand in a block."""
    layer = built_attention(maker(kind, window=10, key_shift=key_shift))
    call = forward(layer)
    for arrange in (helpers.randomize, all_in_one_cluster, most_clusters_empty):
        arrange(layer)
        last_positions = (key_shift, 13, 39, 81)
        assert_causal(call, sequence(2, 83), padding(2, 83), last_positions)


@pytest.mark.parametrize("clusters", [thorough(1), 60])
def test_one_and_many_random_clusters_are_causal(clusters):
    """They have no weights to arrange; of 60 some stay empty."""
    call = forward(built_attention(maker("random", clusters=clusters)))
    assert_causal(call, sequence(2, 41), padding(2, 41), (0, 13, 39))


@pytest.mark.parametrize(
    "kind, key_shift",
    [
        *((kind, kind == "strided") for kind in OTHERS),
        *(
            thorough(kind, kind != "strided")
            for kind in OTHERS
            if kind not in cases.UNSHIFTED
        ),
    ],
)
def test_heads_without_clusters_are_causal(kind, key_shift):
    key_shift = int(key_shift)
    call = forward(built_attention(maker(kind, key_shift=key_shift)))
    assert_causal(call, sequence(2, 41), padding(2, 41), (key_shift, 13, 39))


@pytest.mark.parametrize(
    "kind, window, length, key_shift, jit_compile",
    [
        ("token_choice", 100, 301, 1, ON_JAX),
        thorough("token_choice", 100, 301, 0, ON_JAX),
        thorough("prefix", 100, 301, 0, ON_JAX),
        thorough("cluster_strided", 100, 301, 1, ON_JAX),
        *(thorough(kind, 130, 513, 0, True) for kind in ("token_choice", "prefix")),
        *(
            pytest.param(kind, 128, 1024, 1, True, marks=pytest.mark.slow)
            for kind in CLUSTERED
        ),
    ],
)
def test_windows_and_lengths_of_any_size_are_causal(
    kind, window, length, key_shift, jit_compile
):
    make_group = maker(
        kind, window, clusters=2, share_query_key=window != 100, key_shift=key_shift
    )
    call = forward(built_attention(make_group), jit_compile)
    real = padding(1, length)
    assert_causal(call, sequence(1, length), real, (length // 3, length - 2))


def ways_to_learn():
    """Yields kinds, whether keys are shared and shifted, and whether it is compiled."""
    few = [
        ("token_choice", False, 1),
        ("token_choice", True, 0),
        ("threshold", True, 1),
        ("prefix", True, 0),
        ("hashed", False, 0),
        ("local", True, 1),
        ("full", True, 0),
    ]
    ways = [
        (kind, True, shift)
        for kind in (*CLUSTERED, *OTHERS)
        for shift in ((0,) if kind in cases.UNSHIFTED else (0, 1))
    ]
    ways += [(kind, False, shift) for kind in APART for shift in (0, 1)]
    for way in ways:
        once = ON_JAX or None
        yield (*way, once) if way in few else thorough(*way, once)
    for kind in () if ON_JAX else CLUSTERED:
        yield pytest.param(kind, True, 0, True, marks=pytest.mark.slow)


@pytest.mark.parametrize("kind, shared, key_shift, jit_compile", list(ways_to_learn()))
def test_no_gradient_flows_to_later_tokens(kind, shared, key_shift, jit_compile):
    length, options = 41, {"key_shift": key_shift}
    if not shared:
        options["share_query_key"] = False
    call = gradient(built_attention(maker(kind, window=17, **options)), jit_compile)
    query, real = sequence(2, length), padding(2, length)
    cotangent = sequence(2, length, seed=5)
    sees_itself = shared and not key_shift
    for last in (0, 27, 39) if sees_itself else (27, 39):
        later = np.arange(length) > last
        by_query = call(query, real, np.where(later[:, None], 0, cotangent))
        assert np.all(np.isfinite(by_query))
        assert np.all(by_query[:, later] == 0.0)
        assert np.all(np.any(by_query[:, ~later] != 0.0, axis=(1, 2)))


CROSS = {
    "routed": routed,
    "cluster_strided": strided,
    "hashed": CLUSTERED["hashed"],
    "random": CLUSTERED["random"],
}
TRAINED = {
    "routed": functools.partial(
        release_heads.TrainedRoutedHeads, HEADS, routing="expert_choice", **RELATIVE
    ),
    "cluster_strided": functools.partial(
        release_heads.TrainedClusterStridedHeads, HEADS, **RELATIVE
    ),
    "hashed": functools.partial(release_heads.TrainedHashedHeads, HEADS, **RELATIVE),
}


@pytest.mark.parametrize(
    "kind, jit_compile",
    [
        *((kind, ON_JAX) for kind in ("routed", "hashed")),
        *(thorough(kind, ON_JAX) for kind in ("cluster_strided", "random")),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in CROSS),
    ],
)
def test_later_queries_change_no_bit_in_attention_to_a_memory(kind, jit_compile):
    call = forward(built_attention(lambda: CROSS[kind](4, 5)), jit_compile)
    memory = sequence(2, 23, seed=3)
    assert_causal(call, sequence(2, 41), padding(2, 41), (0, 13, 39), memory)


@pytest.mark.parametrize(
    "kind", ["routed", thorough("cluster_strided"), thorough("hashed")]
)
def test_the_ways_of_the_release_are_not_causal(kind):
    """The same check finds what they leak."""
    call = forward(built_attention(lambda: TRAINED[kind](4, 5)), ON_JAX or None)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_causal(call, sequence(2, 41), padding(2, 41), (0, 13, 27, 39))


@pytest.mark.parametrize(
    "kind", ["routed", thorough("cluster_strided"), thorough("hashed")]
)
def test_queries_that_compete_for_a_memory_are_not_causal(kind):
    call = forward(built_attention(lambda: TRAINED[kind](4, 5)), ON_JAX or None)
    memory = sequence(2, 23, seed=3)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_causal(call, sequence(2, 41), padding(2, 41), (0, 13, 27, 39), memory)


LEAKS = json.loads((golden_cases.FOLDER / "causal_leak.json").read_text())
experts = functools.partial(release_heads.ExactRoutedHeads, routing="expert_choice")
MEASURED = {
    "local_only": lambda **o: release_heads.ExactLocalHeads(2, (16,), **o),
    "strided": lambda **o: release_heads.ExactStridedHeads(2, (16,), **o),
    "routing_shareqk_norel": lambda **o: experts(2, 4, 16, **o),
    "routing_shareqk_rel": lambda **o: experts(2, 4, 16, max_relative_position=8, **o),
    "routing_sepqk_norel": lambda **o: experts(2, 4, 16, share_query_key=False, **o),
    "hash_shareqk": lambda **o: release_heads.ExactHashedHeads(2, 4, 16, **o),
    "cluster_strided_plus_cluster": lambda **o: release_heads.ExactClusterStridedHeads(
        2, 4, 16, share_query_key=False, **o
    ),
    "routing_window_eq_length_one_cluster": lambda **o: experts(2, 1, 64, **o),
}
FEW_MEASURED = ("local_only", "routing_shareqk_norel", "hash_shareqk")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FEW_MEASURED else pytest.mark.thorough)
        for name in MEASURED
    ],
)
def test_leaks_as_often_as_the_release(name):
    """In how many of 20 trials one other token changes earlier outputs.

    Where heads have no clusters, in none. Weights and texts are others than those of
    the release, so the numbers are about the same.
    """
    measured = LEAKS[f"{name}_eval"]
    position, expected = (
        measured["changed_position"],
        measured["trials_with_any_change"],
    )
    group = MEASURED[name](embeddings_initializer="zeros")
    attention = layers.MixedAttention([group], 12, kernel_initializer="zeros")
    attention.build((None, None, 24))
    leaks = 0
    for trial in range(measured["trials"]):
        helpers.randomize(attention, seed=trial)
        query = helpers.normal(1, 64, 24, seed=100 + trial)
        changed = query.copy()
        changed[:, position] = helpers.normal(24, seed=200 + trial)
        before, after = (
            golden_cases.run(attention, x, use_causal_mask=True)[0][:, :position]
            for x in (query, changed)
        )
        leaks += np.any(before != after)
    assert abs(leaks - expected) <= 4 and (leaks == 0) == (expected == 0)
