"""One hidden unit of each block, against a dense oracle of its own in NumPy."""

import numpy as np
from keras import ops

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo import dense_blocks
from tests.zoo.dense_blocks import softmax

BATCH, LENGTH, DIM, HIDDEN, BLOCK = 2, 7, 6, 12, 4


def built(dim=DIM, **options):
    options = {"kernel_initializer": "zeros", **options}
    layer = zoo.SparseFeedForward(HIDDEN, BLOCK, 3, **options)
    if dim == DIM:
        return helpers.randomized(layer, (None, None, DIM))
    layer.build((None, None, dim))
    return layer


def parts(layer, x):
    """Returns logits `[batch, length, blocks, block size]` and all hidden units."""
    logits = x @ dense_blocks.values(layer.bottleneck.kernel)
    logits = dense_blocks.dense(logits, layer.controller)
    kernel, bias = dense_blocks.values(layer.input_kernel, layer.input_bias)
    hidden = np.maximum(x @ kernel.T + bias, 0)
    return logits.reshape(*x.shape[:2], -1, BLOCK), hidden


def output(layer, hidden):
    kernel, bias = dense_blocks.values(layer.output_kernel, layer.output_bias)
    return hidden @ kernel + bias


def oracle(layer, x):
    """Looks for the best unit of one block of one token after another."""
    logits, hidden = parts(layer, x)
    masked = np.zeros_like(hidden)
    for b, t, block in np.ndindex(logits.shape[:3]):
        unit = block * BLOCK + int(np.argmax(logits[b, t, block]))
        masked[b, t, unit] = hidden[b, t, unit]
    return output(layer, masked)


def test_equals_the_oracle():
    layer, x = built(), helpers.normal(BATCH, LENGTH, DIM)
    expected = oracle(layer, x)
    golden_cases.assert_close(golden_cases.run(layer, x)[0], expected, 1e-5)
    for position in range(LENGTH):
        token = x[:, position : position + 1]
        actual, _ = golden_cases.run(layer, token)
        golden_cases.assert_close(actual, expected[:, position : position + 1], 1e-5)
    chosen = parts(layer, x)[0].argmax(axis=-1)
    np.testing.assert_array_equal(golden_cases.to_numpy(layer.choose(x)), chosen)


def test_a_single_token_reads_only_chosen_rows():
    layer, token = built(), helpers.normal(1, 1, DIM)
    expected, _ = golden_cases.run(layer, token)
    chosen = golden_cases.to_numpy(layer.choose(token)).reshape(-1)
    rows = np.arange(0, HIDDEN, BLOCK) + chosen
    for weight in (layer.input_kernel, layer.input_bias, layer.output_kernel):
        spoilt = np.full(weight.shape, np.nan, "float32")
        spoilt[rows] = golden_cases.to_numpy(weight)[rows]
        weight.assign(spoilt)
    np.testing.assert_array_equal(golden_cases.run(layer, token)[0], expected)


def test_gradients_of_a_choice_are_those_of_the_softmax():
    layer = built(hard_probability=1.0, temperature=0.0)
    x, direction = (helpers.normal(BATCH, LENGTH, DIM, seed=s) for s in (0, 1))
    result = golden_cases.gradients(
        layer,
        lambda output, losses: ops.sum(ops.multiply(output, direction)),
        {"inputs": x, "training": True},
        wrt=("inputs",),
    )
    golden_cases.assert_close(result.outputs, oracle(layer, x), 1e-5)
    for gradient in (*result.variables.values(), *result.inputs.values()):
        assert np.all(np.isfinite(gradient)) and np.any(gradient)
    logits, hidden = parts(layer, x)
    towards = hidden * (direction @ dense_blocks.values(layer.output_kernel).T)
    towards, weights = towards.reshape(logits.shape), softmax(logits)
    expected = weights * (towards - (weights * towards).sum(axis=-1, keepdims=True))
    actual = result.variables[layer.controller.bias.path]
    golden_cases.assert_close(actual, expected.sum(axis=(0, 1)).reshape(-1), 1e-4)


def test_noise_chooses_by_the_probabilities():
    """At the temperature of 1; without noise a choice is always the best one."""
    layer = built(dim=1, hard_probability=1.0, temperature=1.0, seed=3)
    layer.input_bias.assign(np.ones(HIDDEN))
    layer.output_kernel.assign(np.eye(HIDDEN)[:, :1])
    # A unit of the first block has 0.4 of the probability, the others have 0.2.
    layer.controller.bias.assign(np.log([2.0] + [1.0] * (HIDDEN - 1)))
    x = np.zeros((1, 3000, 1), "float32")
    first, second = (golden_cases.run(layer, x, training=True)[0] for _ in range(2))
    assert abs(first.mean() - 0.4) < 0.04 and np.any(first != second)
    np.testing.assert_array_equal(np.round(first), np.round(first) > 0)
    np.testing.assert_array_equal(golden_cases.run(layer, x)[0], 1.0)


def test_steps_of_training_choose_or_weigh_all_units():
    layer, x = built(temperature=0.0, seed=1), helpers.normal(1, 2, DIM)
    logits, hidden = parts(layer, x)
    soft = output(layer, hidden * softmax(logits).reshape(hidden.shape))
    outputs = [golden_cases.run(layer, x, training=True)[0] for _ in range(200)]
    chosen, weighed = (
        sum(np.allclose(actual, expected, atol=1e-4) for actual in outputs)
        for expected in (oracle(layer, x), soft)
    )
    assert 35 <= chosen <= 85 and weighed == 200 - chosen
