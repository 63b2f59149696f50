"""Tests of logits within a soft cap, in every kind of heads that can have it."""

import functools

import numpy as np
import pytest
from keras import ops
from keras_hub.src.models.gemma.gemma_attention import CachedGemmaAttention

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.layers.softmax import rotary_position_test
from tests.zoo import cases

BATCH, HEADS, LENGTH, DIM, CAP = 2, 2, 24, 6, 1.5
REAL = helpers.mask_with_a_hole(LENGTH, LENGTH, 17)
BIAS = helpers.normal(BATCH, LENGTH, seed=4)
POSITIONAL = {
    "full": functools.partial(layers.FullHeads, HEADS),
    "local": functools.partial(layers.LocalHeads, HEADS, (4,)),
    "strided": functools.partial(layers.StridedHeads, HEADS, (3,)),
    "fixed": functools.partial(layers.FixedHeads, HEADS, 4, 2),
    "sliding": functools.partial(layers.SlidingHeads, HEADS, 3),
    "merged": functools.partial(layers.SlidingHeads, HEADS, 3, True),
    "global": functools.partial(layers.GlobalHeads, HEADS, (0, 9), 4),
    "axial": functools.partial(layers.AxialHeads, HEADS, width=4),
    "block_top_k": functools.partial(layers.BlockTopKHeads, HEADS, 3, 2),
    "random_blocks": functools.partial(layers.RandomBlockHeads, HEADS, 3, 2),
}
# Under a causal mask each query has one softmax, also if several reads are joined.
CLUSTERED = {
    "routed": functools.partial(layers.RoutedHeads, HEADS, 3, 6),
    "apart": functools.partial(layers.RoutedHeads, HEADS, 3, 6, share_query_key=False),
    "two_reads": functools.partial(
        layers.RoutedHeads,
        HEADS,
        3,
        6,
        share_query_key=False,
        clusters_per_query=2,
    ),
    "hashed": functools.partial(layers.HashedHeads, HEADS, 4, 6),
    "rounds": functools.partial(layers.HashedHeads, HEADS, 4, 6, num_rounds=2),
    "random": functools.partial(layers.RandomHeads, HEADS, 3, 6),
}
# Results of several clusters or members that differ for each query are averaged: here
# there is one, for all.
WHOLE = {
    kind: rotary_position_test.CLUSTERED[kind]
    for kind in ("expert_choice", "prefix", "cluster_strided")
}
KINDS = {**POSITIONAL, **CLUSTERED, **WHOLE}
REFUSING = {
    "ClusteredQueryHeads",
    "CompressedHeads",
    "FeatureMapHeads",
    "InducedHeads",
    "LongShortHeads",
    "LunaHeads",
    "NativeSparseHeads",
    "NystromHeads",
    "SynthesizerHeads",
}


def some(kinds, few):
    return [
        pytest.param(kind, marks=() if kind in few else pytest.mark.thorough)
        for kind in kinds
    ]


def built(make, **options):
    group = make(**options)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    helpers.randomize(group)
    return group


def sequences():
    return [helpers.normal(BATCH, HEADS, LENGTH, DIM, seed=i) for i in range(3)]


def dense(query, key, value, sees, bias=0.0, more=0.0):
    """Attention by logits within the cap, before which `more` is added."""
    query, key = (np.asarray(x, "float64") for x in (query, key))
    logits = query @ np.swapaxes(key, -1, -2) + more
    logits = CAP * np.tanh(logits / CAP)
    return helpers.dense_attention(logits, np.eye(key.shape[-2]), value, sees, bias)


@pytest.mark.parametrize(
    "kind", some(KINDS, ("full", "local", "merged", "routed", "two_reads", "hashed"))
)
def test_heads_weigh_their_keys_within_it(kind):
    query, key, value = sequences()
    usual, group = built(KINDS[kind]), built(KINDS[kind], logit_soft_cap=CAP)
    key = key if group.needs_keys else None
    eye = np.broadcast_to(
        np.eye(LENGTH, dtype="float32"), (BATCH, HEADS, LENGTH, LENGTH)
    )
    masks = {"query_mask": REAL, "value_mask": REAL, "token_bias": BIAS}
    weights, output = (
        golden_cases.run(each, query, key, x, use_causal_mask=True, **masks)[0]
        for each, x in (
            (usual, np.concatenate([value, eye], axis=-1)),
            (group, value),
        )
    )
    if kind not in POSITIONAL:
        query = helpers.normalize(query)
        key = query if key is None else helpers.normalize(key)
    sees = weights[..., DIM:] > 0
    expected, _ = dense(query, key, value, sees, BIAS[:, None, None])
    golden_cases.assert_close(output, expected, 2e-5)
    assert np.abs(output - weights[..., :DIM]).max() > 0.1


@pytest.mark.parametrize("kind", ["BlockPairHeads", "LinformerHeads", "SinkhornHeads"])
def test_near_zero_queries_that_see_the_same_read_the_same(kind):
    outputs = []
    for cap in (None, 1e-7):
        group = cases.SMALL[kind](logit_soft_cap=cap)
        group.build(*[(BATCH, HEADS, 8, DIM)] * 3)
        helpers.randomize(group)
        output, _ = golden_cases.run(group, *(x[:, :, :8] for x in sequences()))
        outputs.append(output[:, :, 1] - output[:, :, 0])
    without, within = (np.abs(x).max() for x in outputs)
    assert without > 0.1 and within < 1e-5


def test_relative_positions_are_within_it_and_causal_parts_agree():
    length = 128  # four parts of the queries
    layer = layers.ScaledDotProduct(max_relative_position=5, logit_soft_cap=CAP)
    query, key = (helpers.normal(BATCH, HEADS, length, DIM, seed=i) for i in range(2))
    value = np.concatenate(
        [query, np.broadcast_to(np.eye(length), (BATCH, HEADS, length, length))], -1
    ).astype("float32")
    layer.build(query.shape, key.shape, query.shape)
    helpers.randomize(layer)
    i, j = np.ogrid[:length, :length]
    table = golden_cases.to_numpy(layer.relative_position.key_embeddings)
    vectors = table[np.clip(j - i, -5, 5) + 5]
    more = np.einsum("...id,ijd->...ij", query, vectors)
    _, expected = dense(query, key, value, j <= i, more=more)
    output, _ = golden_cases.run(layer, query, key, value, use_causal_mask=True)
    golden_cases.assert_close(output[..., DIM:], expected, 2e-5)


def test_as_in_gemma():
    """Two heads of Gemma 2, which turn queries and keys by their positions."""
    gemma = CachedGemmaAttention(DIM, HEADS, HEADS, logit_soft_cap=0.3)
    x = helpers.normal(BATCH, LENGTH, 8)
    gemma.build(x.shape)
    attention = layers.MixedAttention(
        [layers.FullHeads(HEADS, rotary_positions=True)], DIM, logit_soft_cap=0.3
    )
    attention.build(x.shape)
    for name in ("query", "key", "value"):
        kernel = helpers.normal(HEADS, 8, DIM, seed=len(name))
        getattr(gemma, f"{name}_dense").kernel.assign(kernel)
        kernel = np.moveaxis(kernel, 0, 1).reshape(8, HEADS * DIM)
        getattr(attention, f"{name}_kernel").assign(kernel)
    kernel = helpers.normal(HEADS, DIM, 8)
    gemma.output_dense.kernel.assign(kernel)
    attention.output_kernel.assign(kernel.reshape(HEADS * DIM, 8))
    causal = np.broadcast_to(np.tri(LENGTH, dtype="bool"), (BATCH, LENGTH, LENGTH))
    expected = golden_cases.to_numpy(gemma(x, attention_mask=causal))
    found, _ = golden_cases.run(attention, x, use_causal_mask=True)
    golden_cases.assert_close(found, expected, 1e-5)


@pytest.mark.parametrize(
    "cls, options",
    [
        (layers.RoutedHeads, {"share_query_key": False}),
        (layers.HashedHeads, {"num_rounds": 2}),
    ],
)
def test_queries_that_explore(cls, options):
    query, key, value = sequences()
    group = built(
        functools.partial(cls, HEADS, 3, 4, exploring_queries=LENGTH),
        logit_soft_cap=CAP,
        **options,
    )
    key = key if group.needs_keys else None
    output, _ = golden_cases.run(
        group, query, key, value, use_causal_mask=True, training=True
    )
    query = helpers.normalize(query)
    key = query if key is None else helpers.normalize(key)
    expected, _ = dense(query, key, value, np.tri(LENGTH, dtype="bool"))
    golden_cases.assert_close(output, expected, 1e-5)


def attention_of_all(**options):
    groups = [
        layers.LocalHeads(1, (4,)),
        layers.SlidingHeads(1, 3, True),
        layers.RoutedHeads(
            1, 3, 6, share_query_key=False, clusters_per_query=2, key_shift=1
        ),
        layers.HashedHeads(1, 4, 6, num_rounds=2, max_relative_position=3),
        layers.ClusterStridedHeads(1, 3, 4),
    ]
    attention = layers.MixedAttention(
        groups, DIM, kernel_initializer="zeros", logit_soft_cap=CAP, **options
    )
    attention.build((BATCH, LENGTH, 8))
    helpers.randomize(attention)
    return attention


def test_token_by_token_with_packed_documents():
    attention, x = attention_of_all(), helpers.normal(BATCH, LENGTH, 8)
    ids = np.repeat([[1] * 9 + [2] * (LENGTH - 9)], BATCH, axis=0).astype("int32")

    def both(x, ids):
        cache = attention.make_cache(BATCH, LENGTH)
        first, cache = attention(x[:, :6], segment_ids=ids[:, :6], cache=cache)
        rest, _ = attention(
            x[:, 6:], segment_ids=ids[:, 6:], cache=cache, cache_index=6
        )
        expected = attention(x, use_causal_mask=True, segment_ids=ids)
        return expected, ops.concatenate([first, rest], axis=1)

    expected, steps = helpers.compiled(both, jit_compile=None)(x, ids)
    golden_cases.assert_close(steps, expected, 2e-5)


@pytest.mark.parametrize(
    "remat", [True, pytest.param("weights", marks=pytest.mark.thorough)]
)
def test_gradients_are_finite_and_those_with_remat(remat):
    x = helpers.normal(BATCH, LENGTH, 8)
    results = [
        golden_cases.gradients(
            attention_of_all(remat=each),
            lambda output, losses: ops.sum(ops.sin(output)),
            {"query": x * np.float32(scale), "use_causal_mask": True, "training": True},
            wrt=("query",),
        )
        for each, scale in ((False, 1.0), (remat, 1.0), (remat, 1e4))
    ]
    wanted, again, saturated = (
        [*result.inputs.values(), *result.variables.values()] for result in results
    )
    for gradient, actual in zip(wanted, again, strict=True):
        golden_cases.assert_close(actual, gradient, 1e-4)
    # of logits so large that the cap leaves them no gradient
    for gradient in saturated:
        assert np.all(np.isfinite(gradient))


def test_settings_and_saving(tmp_path):
    own = layers.LocalHeads(1, (4,), logit_soft_cap=7)
    attention = layers.MixedAttention(
        [own, layers.FullHeads(1)], DIM, logit_soft_cap=CAP
    )
    assert [g.logit_soft_cap for g in attention.head_groups] == [7, CAP]
    x = helpers.normal(BATCH, LENGTH, 8)
    helpers.assert_survives_saving(attention, tmp_path, x, use_causal_mask=True)
    attention = layers.RoutingAttention(
        2, DIM, 3, 4, num_local_heads=1, logit_soft_cap=CAP
    )
    again = layers.RoutingAttention.from_config(attention.get_config())
    assert again.logit_soft_cap == CAP
    assert [g.logit_soft_cap for g in again.head_groups] == [CAP] * 2


@pytest.mark.parametrize("kind", sorted(REFUSING))
def test_refused_without_one_softmax_of_products(kind):
    message = f"`logit_soft_cap` must be None for {kind}.*logit_soft_cap=3"
    with pytest.raises(ValueError, match=message):
        cases.SMALL[kind](logit_soft_cap=3)
    with pytest.raises(ValueError, match=message):
        layers.MixedAttention([cases.SMALL[kind]()], DIM, logit_soft_cap=3)


@pytest.mark.parametrize("cap", [0, -1.5, "a", True, float("nan"), float("inf")])
def test_refused(cap):
    message = "`logit_soft_cap` must be a positive number. Received: logit_soft_cap="
    with pytest.raises(ValueError, match=message):
        layers.ScaledDotProduct(logit_soft_cap=cap)
    with pytest.raises(ValueError, match=message):
        layers.FullHeads(2, logit_soft_cap=cap)
    with pytest.raises(ValueError, match=message):
        layers.MixedAttention([layers.FullHeads(2)], DIM, logit_soft_cap=cap)
    with pytest.raises(ValueError, match=message):
        layers.RoutingAttention(2, DIM, 3, 4, logit_soft_cap=cap)
