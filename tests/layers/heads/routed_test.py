"""Tests of routed heads; `oracle_test` has their rule."""

import keras

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers


def scoped(routing_scope="full"):
    options = {"routing": "expert_choice", "routing_scope": routing_scope}
    return layers.RoutingAttention(2, 4, 2, 3, **options)


def scoped_model(routing_scope):
    inputs = keras.Input((9, 5))
    x = scoped(routing_scope)(inputs, use_causal_mask=True)
    block = layers.TransformerBlock(scoped(routing_scope), None, remat=True)
    return keras.Model(inputs, block(x))


def test_models_and_blocks_hand_the_scope_of_a_call_on():
    """In training too, where gradients may compute all of it again."""
    outputs, gradients = [], []
    by_name = {"routing_scope": "prefix"}
    for own, called in (("prefix", {}), ("full", by_name), ("full", {})):
        model = scoped_model(own)
        helpers.randomize(model)
        arguments = {"inputs": helpers.normal(2, 9, 5), "training": True, **called}
        result = golden_cases.gradients(
            model, lambda y, losses: keras.ops.sum(y**3), arguments, wrt=("inputs",)
        )
        outputs.append(result.outputs)
        gradients.append(result.inputs["inputs"])
    golden_cases.assert_close(outputs[1], outputs[0], 1e-5)
    golden_cases.assert_close(gradients[1], gradients[0], 1e-5)
    assert golden_cases.relative_error(gradients[2], gradients[0]) > 1e-2
