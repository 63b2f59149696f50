"""Tests of linear attention: feature maps instead of a softmax."""

import functools

import keras
import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import assert_follows

HEADS, LENGTH, DIM = 2, 37, 6
MAPS = ("elu", "positive", "fourier")


def built_group(feature_map, dim=DIM, value_dim=DIM, **options):
    group = zoo.FeatureMapHeads(HEADS, feature_map, **options)
    return helpers.built(group, dim, value_dim, False)


tokens = functools.partial(helpers.streams, LENGTH)


def features(group, query, key):
    """The papers' features of scaled queries and of keys, in float64."""
    query, dim = query * query.shape[-1] ** 0.5, query.shape[-1]
    if group.feature_map == "elu":
        return [np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (query, key)]
    vectors = golden_cases.to_numpy(group.random_vectors).astype("float64")
    if group.feature_map == "positive":
        query, key = query / dim**0.25, key / dim**0.25
        return [
            np.exp(
                np.einsum("bhld,hmd->bhlm", x, vectors)
                - np.sum(x**2, axis=-1, keepdims=True) / 2
            )
            for x in (query, key)
        ]
    vectors = vectors * golden_cases.to_numpy(group.sigma)[:, None]
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    angles = [np.einsum("bhld,hmd->bhlm", x, vectors) for x in (query, key)]
    return [np.concatenate([np.sin(x), np.cos(x)], axis=-1) for x in angles]


def expected_output(group, query, key, value, real, bias, causal):
    query, key = features(group, query, key)
    weights = np.einsum("bhif,bhjf->bhij", query, key)
    factors = np.exp(bias.astype("float64"))[:, None, None] * real[:, None, None]
    if causal:
        factors = factors * np.tri(LENGTH)
    weights = weights * factors
    sums = weights.sum(axis=-1, keepdims=True)
    if group.feature_map == "fourier":
        weights, sums = (x / group.num_features for x in (weights, sums))
        sums = np.maximum(sums, np.exp(-2) * factors.max(axis=-1, keepdims=True))
    return weights @ value / np.maximum(sums, 1e-300)


@pytest.mark.parametrize(
    "feature_map, causal, chunk_length",
    [
        *(("positive", True, length) for length in (1, 8, 128)),
        *((feature_map, False, 8) for feature_map in MAPS),
        *((feature_map, True, 8) for feature_map in ("elu", "fourier")),
    ],
)
def test_equals_the_formula(feature_map, causal, chunk_length):
    """With 37 chunks in groups, with a chunk that is filled up, and with one."""
    options = {"num_features": 40, "chunk_length": chunk_length}
    group = zoo.FeatureMapHeads(HEADS, feature_map, **options)
    about = {"has_bias": True, "causal": causal}
    output = assert_follows(expected_output, group, LENGTH, **about)
    if causal:
        assert np.all(output[1, :, : LENGTH // 3] == 0.0)


@pytest.mark.parametrize("name", [f"{m}/{k}" for m in MAPS for k in ("full", "causal")])
def test_equals_other_implementations(name):
    """Of idiap's fast-transformers and of performer-pytorch; see `tools/peers`."""
    golden = golden_cases.load("peers/feature_map.npz")
    feature_map, kind = name.split("/")
    vectors, dim = golden["vectors"], golden["query"].shape[-1]
    group = built_group(
        feature_map, dim, golden["value"].shape[-1], num_features=len(vectors)
    )
    for weight in group.weights:
        values = golden["sigma"] if weight.name == "sigma" else vectors
        weight.assign(np.broadcast_to(values, weight.shape))

    output, _ = golden_cases.run(
        group,
        golden["query"] * dim**-0.5,
        golden["key"],
        golden["value"],
        use_causal_mask=kind == "causal",
    )

    golden_cases.assert_close(output, golden[name], 1e-5)


def test_random_vectors_are_orthogonal_in_blocks_and_isotropic():
    group = built_group("positive", num_features=600)
    vectors = golden_cases.to_numpy(group.random_vectors).reshape(-1, DIM, DIM)
    products = vectors @ vectors.swapaxes(1, 2)
    np.testing.assert_allclose(products * (1 - np.eye(DIM)), 0, atol=1e-5)
    flat = vectors.reshape(-1, DIM)
    np.testing.assert_allclose(flat.mean(axis=0), 0, atol=0.15)
    np.testing.assert_allclose(flat.T @ flat / len(flat), np.eye(DIM), atol=0.15)
    again = built_group("positive", num_features=600)
    other = built_group("positive", num_features=600, seed=1)
    same, differs = (golden_cases.to_numpy(x.random_vectors) for x in (again, other))
    np.testing.assert_array_equal(same.reshape(flat.shape), flat)
    assert np.any(differs.reshape(flat.shape) != flat)
    learned = built_group("fourier", num_features=8).trainable_weights
    assert [weight.name for weight in learned] == ["sigma"]


def test_a_large_later_key_costs_earlier_queries_no_precision():
    """A maximum over all keys would leave nothing of the earlier ones in float32."""
    group = built_group("positive", num_features=64, chunk_length=8)
    query, key, value = tokens()
    bias = np.zeros((2, LENGTH), "float32")
    changed, changed_bias = key.copy(), bias.copy()
    changed[:, :, 20:] *= 40
    changed_bias[:, 20:] = 300.0
    call = helpers.compiled(
        lambda *x: group(*x[:3], token_bias=x[3], use_causal_mask=True)
    )
    outputs = call(query, key, value, bias), call(query, changed, value, changed_bias)
    np.testing.assert_array_equal(*(x[:, :, :20] for x in outputs))
    assert np.all(np.isfinite(outputs[1]))


@pytest.mark.parametrize("feature_map", MAPS)
def test_sums_are_exact_in_half_precision(feature_map):
    """Inputs and outputs are rounded, sums are not."""
    group = built_group(feature_map, dtype="mixed_bfloat16", chunk_length=4)
    exact = built_group(feature_map, chunk_length=4)
    arrays = [golden_cases.to_numpy(keras.ops.cast(x, "bfloat16")) for x in tokens()]
    arrays = [x.astype("float32") for x in arrays]
    output, expected = (
        golden_cases.run(g, *arrays, use_causal_mask=True)[0] for g in (group, exact)
    )
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    golden_cases.assert_close(output, expected, 2.0**-8)
