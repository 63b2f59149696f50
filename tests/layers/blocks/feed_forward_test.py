"""Tests of the feed-forward layer."""

import keras
import pytest

from routing_tf.layers import FeedForward
from tests import golden_cases
from tests.layers import helpers

TOLERANCES = 3e-6, 1e-5  # of gradients: JAX has a tanh of its own
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
        with keras.RematScope(mode="activations"):  # changes an attribute in calls
            layer = FeedForward(case.config["filter_size"], activation, name="ffn")
        layer.build(case["in/x"].shape)
    variables = {}
    for old, new in RELEASE_NAMES[kind].items():
        for weight in getattr(layer, f"{new}_dense").weights:
            variables[f"ffn/{old}/{weight.name}"] = weight
    helpers.assert_equals_piece(layer, case, {"inputs": "in/x"}, variables, *TOLERANCES)
