"""Tests of alpha-entmax; `oracle_test` has heads that take it for the softmax."""

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import zoo
from routing_tf.zoo.entmax import entmax
from tests import golden_cases
from tests.layers import helpers

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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_sees_no_hidden_key(dtype):
    layer = zoo.EntmaxDotProduct(entmax_alpha=1.001, dtype=dtype)
    x = helpers.normal(1, 5, 4)
    mask = np.tri(5, dtype="bool")
    mask[2] = False
    eye = np.eye(5, dtype="float32")[None]
    weights, _ = golden_cases.run(layer, x, x, eye, attention_mask=mask)
    weights = weights.astype("float32")
    assert np.all(weights[0][~mask] == 0.0)
    np.testing.assert_allclose(weights[0].sum(axis=-1), mask.any(axis=-1), atol=0.02)


def test_refused():
    layer = zoo.EntmaxDotProduct(2)
    with pytest.raises(ValueError, match="`return_logsumexp`.*return_logsumexp=True"):
        layer(*[helpers.normal(1, 5, 4)] * 3, return_logsumexp=True)
