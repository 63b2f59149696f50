"""Tests of alpha-entmax: the function, and heads that take it for the softmax."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf.zoo.entmax import entmax
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, LENGTH, DIM = 2, 2, 14, 6
GOLDEN = golden_cases.load("peers/entmax.npz")


class Entmax(keras.layers.Layer):
    """Makes a layer of it, for the tools of these tests."""

    def call(self, logits, alpha):
        return entmax(logits, alpha)


@pytest.mark.parametrize("number, alpha", list(enumerate(GOLDEN["alphas"])))
def test_equals_the_code_of_the_authors(number, alpha):
    """Weights and gradients, see `tools/peers/entmax_weights.py`."""
    expected = GOLDEN.group(str(number))
    logits = GOLDEN["logits"].astype("float32")
    alphas = np.full((len(logits), 1), alpha, "float32")
    upstream = GOLDEN["upstream"].astype("float32")
    weights, _ = golden_cases.run(Entmax(), logits, alphas)
    golden_cases.assert_close(weights, expected["weights"], 2e-5)
    np.testing.assert_array_equal(weights == 0.0, expected["weights"] == 0.0)
    gradients = golden_cases.gradients(
        Entmax(),
        lambda output, losses: ops.sum(ops.multiply(output, upstream)),
        {"logits": logits, "alpha": alphas},
        wrt=("logits", "alpha"),
    ).inputs
    for name, actual in (("by_logits", "logits"), ("by_alpha", "alpha")):
        largest = np.abs(expected[name]).max()
        golden_cases.assert_close(
            gradients[actual] / largest, expected[name] / largest, 2e-4
        )
    outside = expected["weights"] == 0.0
    assert np.all(gradients["logits"][outside] == 0.0)


def sparse_weights(weights, alpha):
    """What entmax makes of the logits of a softmax: they differ by a constant."""
    power = 1 / (alpha - 1)
    logits = np.log(np.maximum(weights.astype("float64"), 1e-300))
    scores = (alpha - 1) * (logits - logits.max(axis=-1, keepdims=True))
    low, high = np.full(scores.shape[:-1] + (1,), -1.0), np.zeros(1)
    for _ in range(60):
        middle = (low + high) / 2
        total = (np.maximum(scores - middle, 0) ** power).sum(-1, keepdims=True)
        low, high = np.where(total > 1, middle, low), np.where(total > 1, high, middle)
    return np.maximum(scores - low, 0) ** power


RELATIVE = {"max_relative_position": 3, "embeddings_initializer": "zeros"}
# Heads with one softmax for a query.
KINDS = {
    "full": functools.partial(layers.FullHeads, HEADS, **RELATIVE),
    "local": functools.partial(layers.LocalHeads, HEADS, (4,), **RELATIVE),
    "strided": functools.partial(layers.StridedHeads, HEADS, (3,), **RELATIVE),
    "fixed": functools.partial(layers.FixedHeads, HEADS, 4, 2),
    "hashed": functools.partial(layers.HashedHeads, HEADS, 2, 8, **RELATIVE),
    "token choice": functools.partial(layers.RoutedHeads, HEADS, 2, 8, **RELATIVE),
    "apart": functools.partial(
        layers.RoutedHeads, HEADS, 2, 8, share_query_key=False, **RELATIVE
    ),
}


def built_group(kind, **options):
    group = KINDS[kind](**options)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    random = np.random.default_rng(0)
    for weight in group.weights:
        if weight.name != "alpha_scores":
            weight.assign(random.normal(size=weight.shape))
    return group


def weights_of(group, bias, real):
    value = np.eye(LENGTH, dtype="float32")
    shape = (BATCH, HEADS, LENGTH, LENGTH)
    start = np.zeros((*shape[:3], DIM), "float32")
    query = helpers.normal(*start.shape)
    key = helpers.normal(*start.shape, seed=1) if group.needs_keys else None
    value = np.concatenate([start, np.broadcast_to(value, shape)], axis=-1)
    output, _ = golden_cases.run(
        group,
        query,
        key,
        value,
        query_mask=real,
        value_mask=real,
        token_bias=bias,
        use_causal_mask=True,
    )
    return output[..., DIM:]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=() if kind in ("local", "apart") else pytest.mark.thorough
        )
        for kind in KINDS
    ],
)
@pytest.mark.parametrize("alpha", [1.5, "learned"])
def test_heads_weigh_their_keys_with_it(kind, alpha):
    real = helpers.mask_with_a_hole(LENGTH, LENGTH, 11)
    bias = helpers.normal(BATCH, LENGTH, seed=4)
    usual, group = built_group(kind), built_group(kind, entmax_alpha=alpha)
    scores = np.zeros(HEADS)
    if alpha == "learned":
        scores = helpers.normal(HEADS, seed=5)
        group.dot_product.alpha_scores.assign(scores)
    softmax, weights = (weights_of(each, bias, real) for each in (usual, group))
    alphas = 1 + 1 / (1 + np.exp(-scores))[:, None, None]
    sees = softmax.sum(axis=-1) > 0
    expected = np.where(sees[..., None], sparse_weights(softmax, alphas), 0.0)
    golden_cases.assert_close(weights, expected, 2e-4)
    assert np.any((weights == 0.0) & (softmax > 0.0))
    assert np.all(weights[softmax == 0.0] == 0.0)


@pytest.mark.parametrize(
    "kind", ["full", pytest.param("apart", marks=pytest.mark.thorough)]
)
def test_steps_and_saving(kind, tmp_path):
    group = KINDS[kind](entmax_alpha="learned")
    attention = layers.MixedAttention([group], DIM, kernel_initializer="zeros")
    attention.build((None, None, 8))
    helpers.randomize(attention)
    helpers.assert_keeps_settings(group)

    def both(x):
        first, cache = attention(x[:, :5], cache=attention.make_cache(2, 9))
        rest, _ = attention(x[:, 5:], cache=cache, cache_index=5)
        expected = attention(x, use_causal_mask=True)
        return expected, ops.concatenate([first, rest], axis=1)

    expected, steps = helpers.compiled(both, jit_compile=None)(helpers.normal(2, 9, 8))
    golden_cases.assert_close(steps, expected, 1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_sees_no_hidden_key(dtype):
    layer = layers.ScaledDotProduct(entmax_alpha=1.001, dtype=dtype)
    x = helpers.normal(1, 5, 4)
    mask = np.tri(5, dtype="bool")
    mask[2] = False
    eye = np.eye(5, dtype="float32")[None]
    weights, _ = golden_cases.run(layer, x, x, eye, attention_mask=mask)
    weights = weights.astype("float32")
    assert np.all(weights[0][~mask] == 0.0)
    np.testing.assert_allclose(weights[0].sum(axis=-1), mask.any(axis=-1), atol=0.02)


def test_alpha_learns_beside_keys_that_two_masks_hide():
    """In float16 their logits are -inf."""
    layer = layers.ScaledDotProduct(entmax_alpha="learned", dtype="mixed_float16")
    x = helpers.normal(1, HEADS, 5, 4)
    layer.build(*[x.shape] * 3)
    mask = np.arange(5) < 3
    result = golden_cases.gradients(
        layer,
        lambda output, losses: ops.sum(ops.cast(output, "float32") ** 2),
        {"query": x, "key": x, "value": x}
        | {"attention_mask": mask, "use_causal_mask": True},
        wrt=("query",),
    )
    assert len(result.variables) == 1
    for gradient in (*result.inputs.values(), *result.variables.values()):
        assert np.all(np.isfinite(gradient)) and np.any(gradient)


def test_refused():
    for kind in (layers.BlockTopKHeads, layers.NativeSparseHeads):
        with pytest.raises(ValueError, match="`entmax_alpha` must be None for .*=1.5"):
            kind(2, entmax_alpha=1.5)
    for options in ({"num_rounds": 2}, {"attends_to_self": False}):
        with pytest.raises(ValueError, match="`entmax_alpha` must be None with .*=1.5"):
            layers.HashedHeads(2, 4, 5, entmax_alpha=1.5, **options)
    with pytest.raises(ValueError, match="from 1.001 to 2. Received: entmax_alpha=3"):
        layers.ScaledDotProduct(entmax_alpha=3)
    x = helpers.normal(1, 5, 4)
    with pytest.raises(ValueError, match="`return_logsumexp` must be False"):
        layers.ScaledDotProduct(entmax_alpha=2)(x, x, x, return_logsumexp=True)
