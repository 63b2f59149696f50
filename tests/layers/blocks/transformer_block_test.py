"""Tests of residual connections and of the block that they hold together."""

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers

TOLERANCE = 3e-6
BATCH, LENGTH, DIM = 2, 12, 10


def sequence(seed=0):
    return helpers.normal(BATCH, LENGTH, DIM, seed=seed)


def built_block(**options):
    feed_forward = layers.FeedForward(8, "relu")
    groups = layers.LocalHeads(1, (4,)), layers.RoutedHeads(2, 3, 5)
    return helpers.block(*groups, feed_forward=feed_forward, dim=DIM, **options)


@pytest.mark.parametrize(
    "path", golden_cases.paths("pieces/layer_p*process_*.npz"), ids=lambda p: p[13:-4]
)
def test_steps_equal_release(path):
    case = golden_cases.load(path)
    post = "layer_postprocess" in path
    kind = "layer_postprocess" if post else "layer_preprocess"
    steps = case.config[f"{kind}_sequence"]
    layer = layers.SublayerSteps("" if steps == "none" else steps)
    arguments = {"inputs": "in/y", "residual": "in/x"} if post else {"inputs": "in/x"}
    layer.build(*(case[name].shape for name in arguments.values()))
    variables = {}
    for norm in layer.norms:
        scope = "layer_postprocess" if post else "layer_prepostprocess"
        variables[f"{scope}/layer_norm/layer_norm_scale"] = norm.gamma
        variables[f"{scope}/layer_norm/layer_norm_bias"] = norm.beta
    helpers.assert_equals_piece(layer, case, arguments, variables, TOLERANCE)


def test_each_normalization_has_weights_of_its_own():
    x, residual = sequence(), sequence(1)
    layer = layers.SublayerSteps("nan")
    layer.build(x.shape, x.shape)
    assert len(layer.weights) == 4
    output, _ = golden_cases.run(layer, x, residual)
    expected = helpers.normalize(helpers.normalize(x) + residual)
    golden_cases.assert_close(output, expected, 1e-5)


def test_causal_mask_is_an_option():
    x = sequence()
    changed = x.copy()
    changed[:, -1] = 3.0
    for causal in (True, False):
        options = {"dim": DIM, "use_causal_mask": causal}
        block = helpers.block(layers.FullHeads(1), **options)
        before, after = (golden_cases.run(block, y)[0] for y in (x, changed))
        same = np.array_equal(before[:, :-1], after[:, :-1])
        assert same == causal


@pytest.mark.parametrize(
    "norm_position, remat",
    [("pre", True), pytest.param("post", False, marks=pytest.mark.thorough)],
)
def test_fills_and_keeps_the_keras_mask(norm_position, remat):
    block = built_block(norm_position=norm_position, remat=remat)
    block.trainable = False  # no centroid moves
    x = sequence()
    x[1, 7:] = 0.0
    inputs = keras.Input((LENGTH, DIM))
    masked = keras.layers.Masking()(inputs)
    average = keras.layers.GlobalAveragePooling1D()
    outputs = block(masked)
    model = keras.Model(inputs, [outputs, average(outputs)])
    (output, mean), _ = golden_cases.run(model, x, training=True)
    real = helpers.tail_mask(LENGTH, 12, 7)
    expected, _ = golden_cases.run(block, x, padding_mask=real, training=True)
    golden_cases.assert_close(output, expected, 1e-6)
    golden_cases.assert_close(mean[1], output[1, :7].mean(axis=0), 1e-5)
    # What is computed again for the gradients knows the mask, too.
    by_mask, by_argument = (
        golden_cases.gradients(
            layer,
            lambda outputs, losses: ops.sum(ops.square(outputs)),
            {"inputs": x, "training": True, **options},
            wrt=["inputs"],
        ).inputs["inputs"][:, :7]
        for layer, options in (
            (keras.Model(inputs, outputs), {}),
            (block, {"padding_mask": real}),
        )
    )
    golden_cases.assert_close(by_mask, by_argument, 1e-5)


def test_takes_parts_that_are_built():
    attention = built_block().attention
    kernel = golden_cases.to_numpy(attention.query_kernel)
    block = layers.TransformerBlock(attention, None)
    block.build((BATCH, LENGTH, DIM))
    assert len(attention.weights) == 4 + 3
    np.testing.assert_array_equal(kernel, golden_cases.to_numpy(attention.query_kernel))


def test_a_block_without_self_attention_keeps_that():
    reads = layers.MixedAttention([layers.FullHeads(2)], key_dim=4)
    block = layers.TransformerBlock(None, None, cross_attention=reads)
    assert type(block).from_config(block.get_config()).attention is None


def test_steps_that_add_need_a_residual():
    with pytest.raises(ValueError, match="`residual`.*residual=None .*steps='dan'"):
        layers.SublayerSteps("dan")(sequence())
