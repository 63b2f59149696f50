"""Rotary positions, in every kind of heads, against keras_hub and plain NumPy."""

import functools

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf.layers.softmax.rotary_position import rotate
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns

# What is called token by token takes long there.
ON_JAX = keras.backend.backend() == "jax"
BATCH, HEADS, LENGTH, DIM = 2, 2, 15, 6
ROTARY = {"rotary_positions": True, "rotary_wavelength": 50}
POSITIONAL = {
    "full": functools.partial(layers.FullHeads, HEADS),
    "local": functools.partial(layers.LocalHeads, HEADS, (4,)),
    "strided": functools.partial(layers.StridedHeads, HEADS, (3,)),
    "fixed": functools.partial(layers.FixedHeads, HEADS, 4, 2),
    "sliding": functools.partial(layers.SlidingHeads, HEADS, 3, True),
    "global": functools.partial(layers.GlobalHeads, HEADS, (0, 9), 4),
    "axial": functools.partial(layers.AxialHeads, HEADS, width=4),
    "block_top_k": functools.partial(layers.BlockTopKHeads, HEADS, 3, 2),
    "linear": functools.partial(layers.FeatureMapHeads, HEADS),
}
# With one cluster, and a window for all, every token sees all up to itself.
ONE = {"num_clusters": 1, "attention_window": 100}
CLUSTERED = {
    "token_choice": functools.partial(layers.RoutedHeads, HEADS, **ONE),
    "expert_choice": functools.partial(
        layers.RoutedHeads, HEADS, routing="expert_choice", **ONE
    ),
    "prefix": functools.partial(
        layers.RoutedHeads,
        HEADS,
        routing="expert_choice",
        routing_scope="prefix",
        **ONE,
    ),
    "cluster_strided": functools.partial(layers.ClusterStridedHeads, HEADS, **ONE),
    "random": functools.partial(layers.RandomHeads, HEADS, **ONE),
}
# Where a token's results are averaged over its clusters.
# The others differ in the choice of members alone.
FEW = ("token_choice", "prefix")


def some(kinds, few):
    return [
        pytest.param(kind, marks=() if kind in few else pytest.mark.thorough)
        for kind in kinds
    ]


def of_hub(x):
    """`x` `[batch, heads, length, dim]`, turned by keras_hub."""
    rotary = keras_hub.layers.RotaryEmbedding(max_wavelength=50, sequence_axis=2)
    return golden_cases.to_numpy(rotary(x))


def tokens():
    return [helpers.normal(BATCH, HEADS, LENGTH, DIM, seed=i) for i in range(3)]


def built(make, **options):
    group = make(**options)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    helpers.randomize(group)
    return group


def output_of(group, *arrays, **options):
    options = {"use_causal_mask": True, **options}
    return golden_cases.run(group, *arrays, **options)[0]


@pytest.mark.parametrize("wavelength", [10000, 50])
@pytest.mark.parametrize("start", [0, 7])
def test_turns_as_keras_hub_does(start, wavelength):
    x = helpers.normal(BATCH, HEADS, LENGTH, DIM)
    rotary = keras_hub.layers.RotaryEmbedding(wavelength, sequence_axis=2)
    expected = golden_cases.to_numpy(rotary(x, start_index=start))
    for first in (start, ops.convert_to_tensor(start, "int32")):
        found = golden_cases.to_numpy(rotate(x, first, wavelength))
        golden_cases.assert_close(found, expected, 1e-6)


def test_half_precision_is_turned_in_full():
    x = ops.cast(helpers.normal(1, 1, 2000, DIM), "bfloat16")
    found = rotate(x, 100_000, 10000)
    assert keras.backend.standardize_dtype(found.dtype) == "bfloat16"
    expected = rotate(ops.cast(x, "float32"), 100_000, 10000)
    expected = golden_cases.to_numpy(ops.cast(expected, "bfloat16"))
    np.testing.assert_array_equal(golden_cases.to_numpy(found), expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", some(POSITIONAL, ("full", "local", "block_top_k")))
def test_heads_compare_turned_vectors(kind, causal):
    query, key, value = tokens()
    plain, rotary = built(POSITIONAL[kind]), built(POSITIONAL[kind], **ROTARY)
    expected = output_of(
        plain, of_hub(query), of_hub(key), value, use_causal_mask=causal
    )
    found = output_of(rotary, query, key, value, use_causal_mask=causal)
    golden_cases.assert_close(found, expected, 1e-5)
    assert np.abs(found - output_of(plain, query, key, value)).max() > 0.1


@pytest.mark.parametrize("kind", some(POSITIONAL, ("fixed", "linear")))
def test_a_shifted_key_keeps_its_position(kind):
    query, key, value = tokens()
    plain, rotary = (
        built(POSITIONAL[kind], key_shift=1, **options) for options in ({}, ROTARY)
    )
    expected = output_of(plain, of_hub(query), of_hub(key), value)
    found = output_of(rotary, query, key, value)
    golden_cases.assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", some(CLUSTERED, FEW))
def test_members_are_compared_by_position_too(kind, shift, shares):
    query, key, value = tokens()
    if shares:
        key = None
    group = built(CLUSTERED[kind], key_shift=shift, share_query_key=shares, **ROTARY)
    query_vectors = of_hub(helpers.normalize(query).astype("float32"))
    key_vectors = query_vectors
    if not shares:
        key_vectors = of_hub(helpers.normalize(key).astype("float32"))
    i, j = np.ogrid[:LENGTH, :LENGTH]
    read = helpers.one_earlier(value, 2) if shift else value
    expected, _ = helpers.dense_attention(
        query_vectors, key_vectors, read, j <= i - shift
    )
    found = output_of(group, query, key, value)
    golden_cases.assert_close(found, expected, 1e-5)


def test_clusters_are_chosen_by_content_alone():
    """Losses and members are those of heads without positions."""
    query, _, value = tokens()
    make = functools.partial(layers.RoutedHeads, HEADS, 3, 4, commitment_weight=0.5)
    groups = [built(make, **options) for options in ({}, ROTARY)]
    losses = [
        golden_cases.run(g, query, None, value, use_causal_mask=True) for g in groups
    ]
    np.testing.assert_array_equal(losses[0][1], losses[1][1])
    normalized = helpers.normalize(query)
    centroids = golden_cases.to_numpy(groups[1].kmeans.centroids)
    clusters = np.einsum("bhld,hkd->bhlk", normalized, centroids).argmax(axis=-1)
    real = np.ones((BATCH, LENGTH), "bool")
    sees, _ = helpers.last_members(clusters, real, 4)
    vectors = of_hub(normalized.astype("float32"))
    expected, _ = helpers.dense_attention(vectors, vectors, value, sees)
    golden_cases.assert_close(losses[1][0], expected, 1e-5)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    "kind", some([*POSITIONAL, *CLUSTERED], () if ON_JAX else ("local", "token_choice"))
)
def test_token_by_token(kind, shift):
    if kind == "expert_choice":
        pytest.skip("later tokens decide who is a member")
    group = {**POSITIONAL, **CLUSTERED}[kind](key_shift=shift, **ROTARY)
    attention = layers.MixedAttention([group], DIM, kernel_initializer="zeros")
    x = helpers.normal(BATCH, LENGTH, 8)
    attention.build(x.shape)
    helpers.randomize(attention)
    expected = golden_cases.to_numpy(attention(x, use_causal_mask=True))
    cache = attention.make_cache(BATCH, LENGTH)
    first, cache = attention(x[:, :6], cache=cache, cache_index=0)
    rest, _ = attention(x[:, 6:], cache=cache, cache_index=6)
    found = np.concatenate([golden_cases.to_numpy(y) for y in (first, rest)], axis=1)
    golden_cases.assert_close(found, expected, 2e-5)


@helpers.further_on_jax
def test_only_distances_count():
    """Padding in front moves all tokens by a block, and no output changes."""
    attention = layers.RoutingAttention(
        2, DIM, 3, 4, num_local_heads=1, rotary_positions=True
    )
    x = helpers.normal(BATCH, LENGTH, 8)
    attention.build(x.shape)
    helpers.randomize(attention)
    moved = np.pad(x, [(0, 0), (4, 0), (0, 0)])
    mask = np.broadcast_to(np.arange(LENGTH + 4) >= 4, (BATCH, LENGTH + 4))
    expected = golden_cases.to_numpy(attention(x, use_causal_mask=True))
    found = attention(moved, query_mask=mask, use_causal_mask=True)
    golden_cases.assert_close(golden_cases.to_numpy(found)[:, 4:], expected, 1e-5)
    config = attention.get_config()
    assert config["rotary_positions"]
    again = layers.RoutingAttention.from_config(config)
    assert all(group.rotary_positions for group in again.head_groups)


@pytest.mark.parametrize("kind", ["full", "token_choice"])
def test_refused(kind):
    make = {**POSITIONAL, **CLUSTERED}[kind]
    with pytest.raises(ValueError, match="`key_dim` must be even.*key_dim=5"):
        layers.MixedAttention([make(**ROTARY)], 5).build((None, 4, 8))
    attention = layers.MixedAttention([make(**ROTARY)], 4)
    x = helpers.normal(BATCH, 5, 8)
    with pytest.raises(ValueError, match="(?s)needs self-attention.*two sequences"):
        attention(x, helpers.normal(BATCH, 7, 8))
    attention = layers.MixedAttention([make(**ROTARY)], 4)
    attention.build(x.shape)
    with pytest.raises(ValueError, match="(?s)needs self-attention.*two sequences"):
        attention.make_cache(BATCH, 5, value=x)


def test_refused_where_keys_have_no_position():
    for make in (
        layers.ClusteredQueryHeads,
        layers.CompressedHeads,
        layers.InducedHeads,
        layers.LongShortHeads,
        layers.LunaHeads,
        layers.NativeSparseHeads,
        layers.SinkhornHeads,
        layers.SynthesizerHeads,
    ):
        with pytest.raises(ValueError, match="`rotary_positions` must be False"):
            make(HEADS, rotary_positions=True)


def test_on_two_axes_positions_are_those_of_the_sequence():
    heads = layers.LocalHeads(HEADS, (2, 2), **ROTARY)
    attention = layers.MixedAttention([heads], DIM, kernel_initializer="zeros")
    x = helpers.normal(1, 4, 4, 8)
    attention.build(x.shape)
    helpers.randomize(attention)
    found = golden_cases.to_numpy(attention(x, use_causal_mask=True))
    sequence = layers.MixedAttention(
        [layers.FullHeads(HEADS, **ROTARY)], DIM, kernel_initializer="zeros"
    )
    order = np.arange(16).reshape(2, 2, 2, 2).swapaxes(1, 2).reshape(4, 4)
    rows = np.argsort(order, axis=None)
    blocked = x.reshape(1, 16, 8)[:, rows]
    sequence.build(blocked.shape)
    for own, other in zip(sequence.weights, attention.weights, strict=True):
        own.assign(other)
    sees, _ = patterns.rectangles((2, 2), (2, 2), (1, 1), causal=True)
    assert sees.sum() == np.tri(16).sum()  # all earlier ones
    expected = golden_cases.to_numpy(sequence(blocked, use_causal_mask=True))
    golden_cases.assert_close(found.reshape(1, 16, 8)[:, rows], expected, 1e-5)
