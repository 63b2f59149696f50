"""Tests of normalised queries and keys with learned scales, in every kind of heads."""

import functools

import numpy as np
import pytest
from keras import ops
from keras_hub.src.models.gemma3.gemma3_attention import CachedGemma3Attention

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.layers import logit_soft_cap_test as soft_cap

BATCH, HEADS, LENGTH, DIM = 2, 2, 24, 6
UNIT_KEYS = functools.partial(
    layers.HashedHeads, HEADS, 4, 6, normalization="unit_keys"
)
KINDS = {**soft_cap.KINDS, "unit_keys": UNIT_KEYS}
# These choose blocks by what is compared.
BY_WHAT_IS_COMPARED = ("block_top_k",)


def mean_square_norm(x):
    x = np.asarray(x, "float64")
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def scaled(group, query, key):
    scales = golden_cases.to_numpy([group.query_scale, group.key_scale])
    return query * scales[0], key * scales[1]


@pytest.mark.parametrize(
    "kind",
    soft_cap.some(
        [kind for kind in KINDS if kind not in BY_WHAT_IS_COMPARED],
        ("full", "local", "routed", "two_reads", "hashed", "unit_keys", "prefix"),
    ),
)
def test_heads_compare_normalised_vectors(kind):
    """Who sees whom is what heads without it say: clusters are the same."""
    query, key, value = soft_cap.sequences()
    usual, group = soft_cap.built(KINDS[kind]), KINDS[kind](qk_norm=True)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    for weight, same in zip(
        [w for w in group.weights if w.name not in ("query_scale", "key_scale")],
        usual.weights,
        strict=True,
    ):
        weight.assign(same)
    group.query_scale.assign(helpers.normal(DIM, seed=7))
    group.key_scale.assign(helpers.normal(DIM, seed=8))
    key = key if group.needs_keys else None
    shape = (BATCH, HEADS, LENGTH, LENGTH)
    eye = np.broadcast_to(np.eye(LENGTH, dtype="float32"), shape)
    weights, output = (
        golden_cases.run(each, query, key, x, use_causal_mask=True)[0]
        for each, x in (
            (usual, np.concatenate([value, eye], axis=-1)),
            (group, value),
        )
    )
    key = query if key is None else key
    if kind in soft_cap.POSITIONAL or kind == "unit_keys":
        query, key = mean_square_norm(query * DIM**0.5), mean_square_norm(key)
        query = query * DIM**-0.5
    else:
        query, key = helpers.normalize(query), helpers.normalize(key)
    query, key = scaled(group, query, key)
    sees = weights[..., DIM:] > 0
    expected, _ = helpers.dense_attention(query, key, value, sees)
    golden_cases.assert_close(output, expected, 2e-5)
    assert np.abs(output - weights[..., :DIM]).max() > 0.1


def test_as_in_gemma():
    """Two heads of Gemma 3, whose scales are one more than their weights."""
    gemma = CachedGemma3Attention(
        DIM, HEADS, HEADS, use_query_key_norm=True, rope_wavelength=10000.0
    )
    x = helpers.normal(BATCH, LENGTH, 8) * np.float32(0.01)  # epsilon counts
    gemma.build(x.shape)
    attention = layers.MixedAttention(
        [layers.FullHeads(HEADS, rotary_positions=True)], DIM, qk_norm=True
    )
    attention.build(x.shape)
    for name in ("query", "key", "value"):
        kernel = helpers.normal(HEADS, 8, DIM, seed=len(name))
        kernel *= np.float32(0.1)
        getattr(gemma, f"{name}_dense").kernel.assign(kernel)
        kernel = np.moveaxis(kernel, 0, 1).reshape(8, HEADS * DIM)
        getattr(attention, f"{name}_kernel").assign(kernel)
    kernel = helpers.normal(HEADS, DIM, 8)
    gemma.output_dense.kernel.assign(kernel)
    attention.output_kernel.assign(kernel.reshape(HEADS * DIM, 8))
    (group,) = attention.head_groups
    for name in ("query", "key"):
        scale = helpers.normal(DIM, seed=20 + len(name))
        getattr(gemma, f"{name}_norm").scale.assign(scale)
        getattr(group, f"{name}_scale").assign(1 + scale)
    causal = np.broadcast_to(np.tri(LENGTH, dtype="bool"), (BATCH, LENGTH, LENGTH))
    expected = golden_cases.to_numpy(gemma(x, attention_mask=causal))
    found, _ = golden_cases.run(attention, x, use_causal_mask=True)
    golden_cases.assert_close(found, expected, 1e-5)


def attention_of(groups, **options):
    attention = layers.MixedAttention(
        groups, DIM, kernel_initializer="zeros", qk_norm=True, **options
    )
    attention.build((BATCH, LENGTH, 8))
    helpers.randomize(attention)
    return attention


def groups_of_all(**options):
    return [
        layers.LocalHeads(1, (4,), rotary_positions=True, **options),
        layers.RoutedHeads(1, 3, 6, rotary_positions=True, **options),
        layers.RoutedHeads(
            1, 3, 6, share_query_key=False, clusters_per_query=2, key_shift=1
        ),
        layers.HashedHeads(1, 4, 6, num_rounds=2, **options),
        layers.ClusterStridedHeads(1, 3, 4, **options),
    ]


@pytest.mark.parametrize(
    "some",
    [
        pytest.param(slice(3), id="first"),
        pytest.param(slice(None), marks=pytest.mark.thorough, id="all"),
    ],
)
def test_token_by_token(some):
    attention = attention_of(groups_of_all()[some])
    x = helpers.normal(BATCH, LENGTH, 8)

    def both(x):
        cache = attention.make_cache(BATCH, LENGTH)
        first, cache = attention(x[:, :6], cache=cache, cache_index=0)
        rest, _ = attention(x[:, 6:], cache=cache, cache_index=6)
        expected = attention(x, use_causal_mask=True)
        return expected, ops.concatenate([first, rest], axis=1)

    golden_cases.assert_close(*helpers.compiled(both, jit_compile=None)(x)[::-1], 2e-5)


def test_steps_that_read_another_sequence():
    groups = [layers.FullHeads(1), layers.RoutedHeads(1, 2, 4)]
    helpers.assert_steps_read_a_memory(attention_of(groups), 8)


def test_scales_learn_with_grouped_queries_and_half_precision():
    groups = [
        layers.LocalHeads(2, (4,), dtype="mixed_bfloat16"),
        layers.RoutedHeads(2, 3, 6, share_query_key=False, dtype="mixed_bfloat16"),
    ]
    attention = attention_of(groups, num_key_value_heads=2, dtype="mixed_bfloat16")
    result = golden_cases.gradients(
        attention,
        lambda output, losses: ops.sum(ops.sin(ops.cast(output, "float32"))),
        {"query": helpers.normal(BATCH, LENGTH, 8)}
        | {"use_causal_mask": True, "training": True},
    )
    scales = [g for path, g in result.variables.items() if path.endswith("_scale")]
    assert len(scales) == 4
    for gradient in scales:
        assert np.all(np.isfinite(gradient)) and np.any(gradient)


def test_queries_that_explore():
    query, _, value = soft_cap.sequences()
    make = functools.partial(layers.RoutedHeads, HEADS, 3, 4, exploring_queries=LENGTH)
    group = soft_cap.built(make, qk_norm=True)
    output, _ = golden_cases.run(
        group, query, None, value, use_causal_mask=True, training=True
    )
    query = helpers.normalize(query)
    causal = np.tri(LENGTH, dtype="bool")
    expected, _ = helpers.dense_attention(*scaled(group, query, query), value, causal)
    golden_cases.assert_close(output, expected, 1e-5)


@pytest.mark.parametrize(
    "remat", [True, pytest.param("weights", marks=pytest.mark.thorough)]
)
def test_gradients_with_remat(remat):
    expected, found = (
        golden_cases.gradients(
            attention_of(
                [layers.LocalHeads(1, (4,)), layers.RoutedHeads(1, 3, 6)], remat=each
            ),
            lambda output, losses: ops.sum(ops.sin(output)),
            {"query": helpers.normal(BATCH, LENGTH, 8)}
            | {"use_causal_mask": True, "training": True},
        )
        for each in (False, remat)
    )
    expected, found = (list(x.variables.values()) for x in (expected, found))
    for one, other in zip(expected, found, strict=True):
        golden_cases.assert_close(other, one, 1e-4)


def test_settings_and_saving(tmp_path):
    attention = layers.RoutingAttention(
        2, DIM, 3, 4, num_local_heads=1, qk_norm=True, share_query_key=False
    )
    x = helpers.normal(BATCH, LENGTH, 8)
    helpers.assert_survives_saving(attention, tmp_path, x, use_causal_mask=True)
    assert all(group.qk_norm for group in attention.head_groups)
    helpers.assert_keeps_settings(layers.FullHeads(2, qk_norm=True))


def test_refused():
    for kind in sorted(soft_cap.REFUSING):
        make, message = (
            soft_cap.cases.SMALL[kind],
            f"`qk_norm` must be False for {kind}",
        )
        with pytest.raises(ValueError, match=message):
            make(qk_norm=True)
        with pytest.raises(ValueError, match=message):
            layers.MixedAttention([make()], DIM, qk_norm=True)
    for make in (
        functools.partial(layers.FullHeads, 2),
        functools.partial(layers.MixedAttention, [layers.FullHeads(2)], DIM),
    ):
        with pytest.raises(ValueError, match="`qk_norm` must be one of False, True"):
            make(qk_norm="yes")
