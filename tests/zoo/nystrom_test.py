"""Tests of Nyström heads; `not_causal_test` has what they refuse."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import softmax

BATCH, HEADS, DIM = 2, 2, 6


def built_group(num_landmarks, dim=DIM, **options):
    return helpers.built(zoo.NystromHeads(HEADS, num_landmarks, **options), dim)


tokens = helpers.streams


def means(x, number):
    """Means of as even segments as there can be, of `[length, dim]`."""
    segment = np.arange(len(x)) * number // max(len(x), number)
    return np.stack([x[segment == i].mean(axis=0) for i in np.unique(segment)])


def inverse(x, num_iterations):
    result = x.T / (np.linalg.norm(x, 1) * np.linalg.norm(x, np.inf))
    one = np.eye(len(x))
    for _ in range(num_iterations):
        both = x @ result
        result = result @ (13 * one - both @ (15 * one - both @ (7 * one - both))) / 4
    return result


def expected_row(query, key, value, number, num_iterations):
    """The formula for the real tokens of one head, in float64."""
    query, key, value = (x.astype("float64") for x in (query, key, value))
    landmarks, key_landmarks = means(query, number), means(key, number)
    middle = inverse(softmax(landmarks @ key_landmarks.T), num_iterations)
    rest = softmax(landmarks @ key.T) @ value
    return softmax(query @ key_landmarks.T) @ middle @ rest


@pytest.mark.parametrize("length", [24, 17, 4, 1])
def test_equals_the_formula(length):
    """Also with tokens that do not fill segments evenly, and with fewer of them."""
    group = built_group(6, convolution_size=3, num_iterations=4)
    arrays = tokens(length)
    real = helpers.tail_mask(length, length, length - length // 3)
    real[1, : length // 4] = False

    output, _ = golden_cases.run(group, *arrays, query_mask=real, value_mask=real)

    kernel = golden_cases.to_numpy(group.convolution_kernel)
    for b, h in np.ndindex(BATCH, HEADS):
        shown = real[b]
        rows = expected_row(*(x[b, h][shown] for x in arrays), 6, 4)
        value = np.pad(arrays[2][b, h] * shown[:, None], [(1, 1), (0, 0)])
        near = sum(kernel[i, h] * value[i : i + length] for i in range(3))
        golden_cases.assert_close(output[b, h][shown], rows + near[shown], 2e-5)


@pytest.mark.parametrize("name", ["plain", "convolved", "masked"])
def test_equals_another_implementation(name):
    """Of the package nystrom-attention; see `tools/peers`."""
    golden = golden_cases.load("peers/nystrom.npz")
    dim = golden["query"].shape[-1]
    size = None if name == "plain" else len(golden["kernel"])
    group = built_group(4, dim, convolution_size=size)
    for weight in group.weights:
        weight.assign(golden["kernel"])
    mask = golden["mask"] if name == "masked" else np.ones_like(golden["mask"])
    masks = {"query_mask": mask, "value_mask": mask} if name == "masked" else {}

    output, _ = golden_cases.run(
        group, golden["query"] * dim**-0.5, golden["key"], golden["value"], **masks
    )

    output, expected = (x.swapaxes(1, 2)[mask] for x in (output, golden[name]))
    golden_cases.assert_close(output, expected, 1e-5)


def test_sequences_of_a_batch_do_not_touch_each_other():
    """The code of the paper starts from the largest norm in a batch."""
    group = built_group(4, num_iterations=2, convolution_size=None)
    arrays = tokens(12)
    others = [np.concatenate([x[:1], 9 * x[1:]]) for x in arrays]
    outputs = [golden_cases.run(group, *each)[0][0] for each in (arrays, others)]
    np.testing.assert_array_equal(*outputs)
