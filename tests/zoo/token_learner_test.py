"""Tokens learned of many inputs and brought back, against NumPy."""

import math

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import dense
from tests.zoo.dense_blocks import norm
from tests.zoo.dense_blocks import sigmoid

BATCH, LENGTH, DIM, TOKENS = 2, 11, 6, 3


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


@pytest.mark.parametrize("normalization", ["softmax", "sigmoid"])
def test_tokens_are_means_weighted_by_maps(normalization):
    layer = zoo.TokenLearner(TOKENS, bottleneck_dim=5, normalization=normalization)
    helpers.randomized(layer, (None, None, DIM))
    x = helpers.normal(BATCH, LENGTH, DIM)
    real = helpers.mask_with_a_hole(LENGTH, LENGTH, 7)
    hidden = gelu(dense(norm(x, layer.norm), layer.hidden_dense))
    maps = dense(hidden, layer.map_dense).swapaxes(1, 2)
    if normalization == "softmax":
        weights = np.exp(maps) * real[:, None]
        weights /= weights.sum(axis=-1, keepdims=True)
    else:
        weights = sigmoid(maps) * real[:, None] / real.sum(axis=-1)[:, None, None]
    actual, _ = golden_cases.run(layer, x, mask=real)
    golden_cases.assert_close(actual, weights @ x, 1e-5)
    nothing, _ = golden_cases.run(layer, x, mask=np.zeros_like(real))
    np.testing.assert_array_equal(nothing, 0)


def test_fuser_weighs_mixed_tokens_at_each_position():
    layer = zoo.TokenFuser()
    helpers.randomized(layer, (None, TOKENS, DIM), (None, None, 4))
    tokens = helpers.normal(BATCH, TOKENS, DIM)
    inputs = helpers.normal(BATCH, LENGTH, 4)
    kernel = golden_cases.to_numpy(layer.mixing_kernel)
    mixed = kernel.T @ norm(tokens, layer.token_norm)
    shares = sigmoid(dense(inputs, layer.weight_dense))
    expected = shares @ norm(mixed, layer.mixed_norm)
    actual, _ = golden_cases.run(layer, tokens, inputs)
    golden_cases.assert_close(actual, expected, 1e-5)
