"""Tests of grouped queries: heads of keys and values that serve several queries."""

import math
from functools import partial

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, DIM, LENGTH, MEMORY = 4, 2, 6, 5, 10, 15, 17
MORE = {
    "of_keys": partial(kinds.APART["token_choice_apart"], query_cluster="key"),
    "threshold_of_keys": partial(kinds.APART["threshold_apart"], query_cluster="key"),
    "turned": partial(kinds.APART["token_choice_apart"], rotary_positions=True),
}
CASES = ["full", "local", "sliding", "strided", "fixed_distinct", "indexed", *MORE]
CASES += ["cluster_strided_apart", "token_choice_apart", "token_choice_apart_shifted"]
CASES += ["prefix_apart_shifted", "multipole_apart"]
# Their caches hold keys and values for all heads.
WIDE = ("rounds_apart", "random_apart", "global", "best_blocks")
# There they hold scores of all queries, too, or the keys of an indexer.
HALF_WIDE = ("prefix_apart_shifted", "cluster_strided_apart", "indexed")
FEW = ("local", "token_choice_apart")


def make(kind, **options):
    """Heads of a kind, more than usual."""
    found = {**kinds.CAUSAL, **kinds.MEMORIES, **MORE}[kind]
    return found.func(HEADS, *found.args[1:], **{**found.keywords, **options})


def built(*groups, **options):
    """An attention with random weights and grouped queries."""
    options = {"num_key_value_heads": KEY_HEADS, "value_dim": VALUE_DIM, **options}
    return helpers.attention(*groups, key_dim=KEY_DIM, dim=DIM, **options)


def repeated(attention, group, **options):
    """The same attention without grouped queries: keys and values are repeated."""
    other = built(group, num_key_value_heads=None, **options)
    for weight, own in zip(other.weights, attention.weights, strict=True):
        values = golden_cases.to_numpy(own)
        if weight.shape != own.shape:
            if weight.name.endswith("_kernel"):
                values = np.reshape(values, (len(values), KEY_HEADS, -1))
                axis = 1
            else:
                pairs = zip(weight.shape, own.shape, strict=True)
                axis = [a == b for a, b in pairs].index(False)
            values = np.repeat(values, HEADS // KEY_HEADS, axis=axis)
        weight.assign(np.reshape(values, weight.shape))
    return other


def assert_same(layers_, arrays, **options):
    """Fails unless two layers return the same for what is no padding."""

    def outputs(x, real, *memory):
        own = {"query_mask": real, **options}
        if memory:
            own |= {"value": memory[0], "value_mask": memory[1]}
        return [layer(x, **own) for layer in layers_]

    own, expected = helpers.compiled(outputs, jit_compile=None)(*arrays)
    real = arrays[1]
    golden_cases.assert_close(own[real], expected[real], 1e-5)


def tokens():
    return helpers.normal(2, LENGTH, DIM), helpers.mask_with_a_hole(LENGTH, LENGTH, 15)


def num_floats(cache):
    """Returns how many floats there are in a cache."""
    leaves = keras.tree.flatten(cache)
    return sum(math.prod(x.shape) for x in leaves if "float" in str(x.dtype))


def cache_sizes(kind, **options):
    """The numbers of floats in caches for all heads, and for those of keys."""
    numbers = HEADS, KEY_HEADS
    layers_ = [built(make(kind), num_key_value_heads=number) for number in numbers]
    return [num_floats(layer.make_cache(2, LENGTH, **options)) for layer in layers_]


@pytest.mark.parametrize("kind", kinds.some([*CASES, *WIDE], FEW))
def test_equals_repeated_keys_and_values(kind):
    """Also token by token."""
    attention = built(make(kind))
    other = repeated(attention, make(kind))
    x, real = tokens()
    whole = {"use_causal_mask": True, "routing_scope": "prefix"}
    assert_same([attention, other], [x, real], **whole)
    helpers.assert_pieces_equal_the_whole(
        attention, x, 8, whole=whole, shown=real, query_mask=real
    )
    wide, narrow = cache_sizes(kind)
    if kind in WIDE:
        assert narrow == wide
    elif kind in HALF_WIDE:
        assert narrow < wide
    else:
        assert narrow * HEADS == wide * KEY_HEADS


@pytest.mark.parametrize(
    "options, more",
    [
        ({"segment_ids": np.repeat([[3, 5, 1]], LENGTH // 3, axis=1)}, {}),
        ({"training": True}, {"dropout_seed": 1, "ema": False, "exploring_queries": 8}),
    ],
    ids=["segments", "exploring"],
)
def test_packed_documents_and_exploring_queries(options, more):
    attention = built(make("token_choice_apart", **more))
    other = repeated(attention, make("token_choice_apart", **more))
    assert_same([attention, other], tokens(), use_causal_mask=True, **options)


@pytest.mark.parametrize(
    "kind, memory_dim",
    kinds.some([("full", DIM), ("local", 7), ("experts_apart", DIM)], [("local", 7)]),
)
def test_attends_to_a_memory(kind, memory_dim):
    attention = built(make(kind), memory_dim=memory_dim)
    other = repeated(attention, make(kind), memory_dim=memory_dim)
    memory = helpers.normal(2, MEMORY, memory_dim, seed=1)
    real = helpers.tail_mask(MEMORY, MEMORY, 12)
    assert_same([attention, other], (*tokens(), memory, real))
    if memory_dim == DIM:
        helpers.assert_steps_read_a_memory(attention, DIM)
        wide, narrow = cache_sizes(kind, value=memory)
        assert narrow * HEADS == wide * KEY_HEADS


@pytest.mark.parametrize("causal", [False, True])
def test_equals_grouped_query_attention_of_keras(causal):
    options = {"use_bias": True, "use_gate": True}
    attention = built(layers.FullHeads(HEADS), value_dim=None, **options)
    other = keras.layers.GroupQueryAttention(
        KEY_DIM, HEADS, KEY_HEADS, kernel_initializer="zeros", **options
    )
    x, real = tokens()
    other.build(x.shape, x.shape)
    helpers.share_random_weights(attention, other)
    options = {"use_causal_mask": causal, "return_attention_scores": True}
    outputs, _ = golden_cases.run(attention, x, query_mask=real, **options)
    expected, _ = golden_cases.run(
        other, x, x, query_mask=real, value_mask=real, **options
    )
    for actual, wanted in zip(outputs, expected, strict=True):
        if actual.ndim == 4:  # Weights, with an axis of heads in front of the length.
            actual, wanted = (np.moveaxis(each, 1, 2) for each in (actual, wanted))
        golden_cases.assert_close(actual[real], wanted[real], 1e-5)


def test_queries_of_a_key_head_choose_among_its_clusters_and_move_them():
    attention = built(make("token_choice_apart", decay=0.5))
    kmeans = attention.head_groups[0].kmeans
    assert kmeans.centroids.shape == (KEY_HEADS, 3, KEY_DIM)
    before = golden_cases.to_numpy(kmeans.counts).sum(axis=-1)
    x, real = tokens()
    options = {"use_causal_mask": True, "training": True}
    golden_cases.run(attention, x, query_mask=real, **options)
    number = real.sum()
    # First by queries, then by keys.
    expected = 0.5 * before + 0.5 * number * HEADS / KEY_HEADS
    expected = 0.5 * expected + 0.5 * number
    counts = golden_cases.to_numpy(kmeans.counts).sum(axis=-1)
    np.testing.assert_allclose(counts, expected, rtol=1e-5)


def test_all_queries_may_have_one_key():
    attention = built(layers.FullHeads(HEADS), num_key_value_heads=1)
    assert attention.key_kernel.shape == (DIM, KEY_DIM)
    assert attention.value_kernel.shape == (DIM, VALUE_DIM)
    helpers.assert_pieces_equal_the_whole(attention, helpers.normal(2, LENGTH, DIM), 8)


@pytest.mark.parametrize("kind", ["full_shifted", "token_choice_apart_shifted"])
def test_steps_in_a_loop_when_all_queries_have_one_key(kind):
    attention = built(make(kind), num_key_value_heads=1)
    x = helpers.normal(1, LENGTH, DIM)

    def looped(x):
        def step(index, outputs, cache):
            token = ops.slice(x, (0, index, 0), (1, 1, DIM))
            output, cache = attention(
                token, use_causal_mask=True, cache=cache, cache_index=index
            )
            outputs = ops.concatenate([outputs[:, 1:], output], axis=1)
            return index + 1, outputs, cache

        start = 0, ops.zeros_like(x), attention.make_cache(1, LENGTH)
        return ops.while_loop(lambda index, *_: index < LENGTH, step, start)[1]

    expected, _ = golden_cases.run(attention, x, use_causal_mask=True)
    outputs = helpers.compiled(looped, jit_compile=False)(x)
    golden_cases.assert_close(outputs, expected, 1e-5)


@pytest.mark.parametrize(
    "message, number, groups",
    [
        ("num_key_value_heads=0", 0, [layers.FullHeads(4)]),
        (r" 4, .*num_key_value_heads=3 .*\[4\]", 3, [layers.FullHeads(4)]),
        (
            r"num_key_value_heads=2 .*\[3, 1\]",
            2,
            [layers.FullHeads(3), layers.LocalHeads(1)],
        ),
        (r"\['routed'\]", 2, [layers.RoutedHeads(4, 2, 8, name="routed")]),
    ],
)
def test_refuses_numbers_that_do_not_fit(message, number, groups):
    with pytest.raises(ValueError, match=f"`num_key_value_heads`.*{message}"):
        layers.MixedAttention(groups, KEY_DIM, num_key_value_heads=number)


def test_as_many_as_heads_may_be_said_of_shared_queries_and_keys():
    options = {"num_heads": 2, "key_dim": 4, "num_clusters": 2, "attention_window": 4}
    attention = layers.RoutingAttention(**options, num_key_value_heads=2)
    attention.build((None, None, DIM))
    assert attention.key_kernel is None
