"""Causality to the last bit: no output depends on a later token, two layers deep.

A last bit that changes in one layer can change the cluster of a token in the next
one, so "almost equal" would be a leak. All comparisons are of one compiled function
at one shape.
"""

import functools
import json

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers

HEADS, CLUSTERS, DIM, KEY_DIM = 2, 6, 8, 6
RELATIVE = {"max_relative_position": 6, "embeddings_initializer": "zeros"}

routed = functools.partial(
    layers.RoutedHeads, HEADS, routing="expert_choice", **RELATIVE
)
strided = functools.partial(layers.ClusterStridedHeads, HEADS, **RELATIVE)
CLUSTERED = {
    "token_choice": functools.partial(routed, routing="token_choice"),
    "prefix": functools.partial(routed, routing_scope="prefix", prefix_block_size=29),
    "cluster_strided": functools.partial(strided, prefix_block_size=29),
    "hashed": functools.partial(layers.HashedHeads, HEADS, **RELATIVE),
    "random": functools.partial(layers.RandomHeads, HEADS, **RELATIVE),
}
OTHERS = {
    "local": functools.partial(
        layers.LocalHeads, HEADS, (7,), flange_blocks=2, **RELATIVE
    ),
    "strided": functools.partial(layers.StridedHeads, HEADS, (6,), **RELATIVE),
    "fixed": functools.partial(layers.FixedHeads, HEADS, 8, 2),
    "fixed_separate": functools.partial(layers.FixedHeads, HEADS, 8, 3, "separate"),
    "full": functools.partial(layers.FullHeads, HEADS, **RELATIVE),
}
# Where queries choose clusters apart from keys.
APART = ("token_choice", "hashed")
ON_JAX = keras.backend.backend() == "jax"


def maker(kind, window=3, clusters=CLUSTERS, **options):
    """Returns a function that makes heads of a kind; clusters have two settings."""
    if kind in OTHERS:
        return functools.partial(OTHERS[kind], **options)
    return lambda: CLUSTERED[kind](clusters, window, **options)


class Stack(keras.layers.Layer):
    """Two attention layers with a residual and a normalization between them."""

    def __init__(self, make_group):
        super().__init__()
        self.first, self.second = (
            layers.MixedAttention([make_group()], KEY_DIM, kernel_initializer="zeros")
            for _ in range(2)
        )
        self.norm = keras.layers.LayerNormalization()

    def build(self, query_shape):
        for layer in (self.first, self.norm, self.second):
            layer.build(query_shape)

    def call(self, query, real, memory=None):
        """Self-attention under a causal mask, or attention to a memory."""
        options = {"value": memory, "query_mask": real}
        options["use_causal_mask"] = memory is None
        hidden = self.norm(query + self.first(query, **options))
        return self.second(hidden, **options)


def built_stack(make_group):
    stack = Stack(make_group)
    stack.build((None, None, DIM))
    helpers.randomize(stack)
    return stack


def stateless(stack, weights, *inputs):
    """Calls a stack with other weights."""
    variables = list(zip(stack.weights, weights, strict=True))
    with keras.StatelessScope(variables, collect_losses=True):
        return stack(*inputs)


def forward(stack, jit_compile):
    """Returns the compiled stack; its weights may change between the calls."""
    call = helpers.compiled(functools.partial(stateless, stack), jit_compile)
    return lambda *inputs: call(stack.get_weights(), *inputs)


def gradient(stack, jit_compile):
    """Returns the compiled gradient by the inputs, given one by the outputs."""

    def objective(query, weights, real, cotangent):
        return ops.sum(stateless(stack, weights, query, real) * cotangent)

    def on_tensorflow(query, *rest):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(query)
            value = objective(query, *rest)
        return tape.gradient(value, query)

    function = on_tensorflow
    if ON_JAX:
        import jax

        function = jax.grad(objective)
    call = helpers.compiled(function, jit_compile)
    return lambda query, *rest: call(query, stack.get_weights(), *rest)


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


def all_in_one_cluster(stack):
    """Equal scores for all clusters and tokens: the first cluster is the best."""
    for weight in stack.weights:
        if weight.name in ("centroids", "projections"):
            weight.assign(np.zeros(weight.shape))


def most_clusters_empty(stack):
    """Two clusters at opposite ends have the tokens, those at the origin none."""
    for weight in stack.weights:
        values = np.zeros(weight.shape)
        if weight.name == "centroids":
            values[:, 2] = helpers.normal(HEADS, KEY_DIM)
            values[:, 4] = -values[:, 2]
            weight.assign(values)
        elif weight.name == "projections":
            # Equal bits: the buckets whose bits differ are empty.
            weight.assign(values + helpers.normal(HEADS, 1, KEY_DIM))


@pytest.mark.parametrize(
    "kind, shared",
    [*((kind, True) for kind in CLUSTERED), *((k, False) for k in APART)],
)
def test_padding_among_the_queries_alone_gets_zero(kind, shared):
    heads = maker(kind, share_query_key=shared)()
    attention = layers.MixedAttention([heads], KEY_DIM)
    attention.build((None, None, DIM))
    query, real = sequence(2, 41), padding(2, 41)

    def attend(query, real):
        masks = {"query_mask": real, "value_mask": ops.ones_like(real)}
        return attention(query, use_causal_mask=True, **masks)

    output = helpers.compiled(attend)(query, real)
    assert np.all(output[~real] == 0.0) and np.any(output[real] != 0.0)


def ways_to_route():
    """Yields kinds with options, compiled and not.

    On JAX the operations one by one take long to compile, on TensorFlow those of XLA.
    """
    slow = {"marks": pytest.mark.slow}
    for kind in CLUSTERED:
        for shared in (True, False) if kind in APART else (True,):
            for key_shift in (0, 1):
                is_plain = shared and not key_shift
                yield pytest.param(
                    kind, shared, key_shift, False, **(slow if ON_JAX else {})
                )
                yield pytest.param(
                    kind,
                    shared,
                    key_shift,
                    True,
                    **({} if ON_JAX or is_plain else slow),
                )


@pytest.mark.parametrize("kind, shared, key_shift, jit_compile", list(ways_to_route()))
def test_later_tokens_change_no_bit_of_earlier_outputs(
    kind, shared, key_shift, jit_compile
):
    stack = built_stack(maker(kind, share_query_key=shared, key_shift=key_shift))
    call = forward(stack, jit_compile)
    for arrange in (helpers.randomize, all_in_one_cluster, most_clusters_empty):
        arrange(stack)
        assert_causal(call, sequence(2, 41), padding(2, 41), (key_shift, 13, 39))


@pytest.mark.parametrize("clusters", [1, 60])
def test_one_and_many_random_clusters_are_causal(clusters):
    """They have no weights to arrange; of 60 some stay empty."""
    call = forward(built_stack(maker("random", clusters=clusters)), jit_compile=True)
    assert_causal(call, sequence(2, 41), padding(2, 41), (0, 13, 39))


@pytest.mark.parametrize("key_shift", [0, 1])
@pytest.mark.parametrize("kind", OTHERS)
def test_heads_without_clusters_are_causal(kind, key_shift):
    call = forward(built_stack(maker(kind, key_shift=key_shift)), jit_compile=True)
    assert_causal(call, sequence(2, 41), padding(2, 41), (key_shift, 13, 39))


@pytest.mark.parametrize(
    "kind, window, length, key_shift, jit_compile",
    [
        ("token_choice", 100, 301, 0, ON_JAX),
        ("token_choice", 100, 301, 1, ON_JAX),
        ("prefix", 100, 301, 0, ON_JAX),
        ("cluster_strided", 100, 301, 1, ON_JAX),
        *((kind, 130, 513, 0, True) for kind in CLUSTERED),
        *(
            pytest.param(kind, *sizes, shift, True, marks=pytest.mark.slow)
            for kind in CLUSTERED
            for sizes in ((16, 64), (100, 301), (128, 1024))
            for shift in (0, 1)
        ),
    ],
)
def test_windows_and_lengths_of_any_size_are_causal(
    kind, window, length, key_shift, jit_compile
):
    make_group = maker(
        kind, window, clusters=2, share_query_key=window != 100, key_shift=key_shift
    )
    call = forward(built_stack(make_group), jit_compile)
    real = padding(1, length)
    assert_causal(call, sequence(1, length), real, (length // 3, length - 2))


def ways_to_learn():
    """Yields kinds, and whether keys are shared and shifted; few that differ little."""
    for kind in (*CLUSTERED, *OTHERS):
        yield kind, True, 0
    for kind in (*CLUSTERED, *OTHERS):
        few = kind in ("token_choice", "prefix", "local")
        yield pytest.param(kind, True, 1, marks=() if few else pytest.mark.slow)
    for kind in APART:
        for shift in (0, 1):
            few = kind == "token_choice"
            yield pytest.param(
                kind, False, shift, marks=() if few else pytest.mark.slow
            )


@pytest.mark.parametrize(
    "jit_compile",
    [
        ON_JAX or None,
        pytest.param(not ON_JAX, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind, shared, key_shift", list(ways_to_learn()))
def test_no_gradient_flows_to_later_tokens(kind, shared, key_shift, jit_compile):
    length, options = 41, {"key_shift": key_shift}
    if not shared:
        options["share_query_key"] = False
    call = gradient(built_stack(maker(kind, window=17, **options)), jit_compile)
    query, real = sequence(2, length), padding(2, length)
    cotangent = sequence(2, length, seed=5)
    sees_itself = shared and not key_shift
    for last in (0, 13, 27, 39) if sees_itself else (13, 27, 39):
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


@pytest.mark.parametrize(
    "jit_compile", [True, pytest.param(False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", CROSS)
def test_later_queries_change_no_bit_in_attention_to_a_memory(kind, jit_compile):
    call = forward(built_stack(lambda: CROSS[kind](4, 5)), jit_compile)
    memory = sequence(2, 23, seed=3)
    assert_causal(call, sequence(2, 41), padding(2, 41), (0, 13, 39), memory)


@pytest.mark.parametrize(
    "kind, flaws",
    [
        ("routed", {}),
        ("cluster_strided", {"members_of_whole_sequence": True}),
        ("random", {"members_of_whole_sequence": True}),
        ("hashed", {"buckets_filled_up": True}),
    ],
)
def test_the_ways_of_the_release_are_not_causal(kind, flaws):
    """The same check finds what they leak."""
    stack = built_stack(lambda: CROSS[kind](4, 5, compatibility=flaws))
    call = forward(stack, jit_compile=ON_JAX)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_causal(call, sequence(2, 41), padding(2, 41), (0, 13, 27, 39))


@pytest.mark.parametrize("kind", CROSS)
def test_queries_that_compete_for_a_memory_are_not_causal(kind):
    # The first queries of a bucket win, unless others may fill it up.
    flaws = {"queries_compete": True, "buckets_filled_up": kind == "hashed"}
    stack = built_stack(lambda: CROSS[kind](4, 5, compatibility=flaws))
    call = forward(stack, jit_compile=ON_JAX)
    memory = sequence(2, 23, seed=3)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_causal(call, sequence(2, 41), padding(2, 41), (0, 13, 27, 39), memory)


LEAKS = json.loads((golden_cases.FOLDER / "causal_leak.json").read_text())
experts = functools.partial(layers.RoutedHeads, routing="expert_choice")
MEASURED = {
    "local_only": lambda **o: layers.LocalHeads(2, (16,), **o),
    "strided": lambda **o: layers.StridedHeads(2, (16,), **o),
    "routing_shareqk_norel": lambda **o: experts(2, 4, 16, **o),
    "routing_shareqk_rel": lambda **o: experts(2, 4, 16, max_relative_position=8, **o),
    "routing_sepqk_norel": lambda **o: experts(2, 4, 16, share_query_key=False, **o),
    "hash_shareqk": lambda **o: layers.HashedHeads(2, 4, 16, **o),
    "cluster_strided_plus_cluster": lambda **o: layers.ClusterStridedHeads(
        2, 4, 16, share_query_key=False, **o
    ),
    "routing_window_eq_length_one_cluster": lambda **o: experts(2, 1, 64, **o),
}


@pytest.mark.parametrize("name", MEASURED)
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
    group = MEASURED[name](
        embeddings_initializer="zeros", compatibility=layers.Compatibility.release()
    )
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
