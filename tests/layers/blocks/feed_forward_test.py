"""Tests of the feed-forward layer."""

import keras
import numpy as np
import pytest

from routing_tf.layers import FeedForward
from tests import golden_cases
from tests.layers import helpers

TOLERANCE = 3e-6
GRADIENT_TOLERANCE = 1e-5  # JAX has a tanh of its own
RELEASE_NAMES = {
    "geglu": {"weight1": "input", "weight2": "gate", "weight3": "output"},
    "conv_hidden_relu": {"conv1": "input", "conv2": "output"},
    "none": {},
}


@pytest.mark.parametrize("kind", RELEASE_NAMES)
def test_equals_release(kind):
    case = golden_cases.load(f"pieces/ffn_{kind}.npz")
    # The release's "none" is the identity: a block without a feed-forward layer.
    layer = keras.layers.Identity()
    if kind != "none":
        activation = "geglu" if kind == "geglu" else "relu"
        layer = FeedForward(case.config["filter_size"], activation, name="ffn")
        layer.build(case["in/x"].shape)
    variables = {}
    for old, new in RELEASE_NAMES[kind].items():
        for weight in getattr(layer, f"{new}_dense").weights:
            variables[f"ffn/{old}/{weight.name}"] = weight
    tolerances = TOLERANCE, GRADIENT_TOLERANCE
    helpers.assert_equals_piece(layer, case, {"inputs": "in/x"}, variables, *tolerances)


def test_sigmoid_gelu_has_biases_and_a_last_kernel_of_its_own():
    layer = FeedForward(8, "sigmoid_gelu", output_initializer="ones")
    layer.build((2, 5, 6))
    assert np.all(golden_cases.to_numpy(layer.output_dense.kernel) == 1.0)
    assert [tuple(w.shape) for w in layer.weights] == [(6, 8), (8,), (8, 6), (6,)]
    helpers.randomize(layer)
    first, bias, second, last_bias = (golden_cases.to_numpy(w) for w in layer.weights)
    x = helpers.normal(2, 5, 6)
    hidden = x @ first + bias
    expected = (hidden / (1 + np.exp(-1.702 * hidden))) @ second + last_bias
    golden_cases.assert_close(golden_cases.to_numpy(layer(x)), expected, TOLERANCE)
