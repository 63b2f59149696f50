"""Tests of Nyström heads; `every_head_test` has what they refuse."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import HEADS
from tests.zoo.dense_blocks import assert_follows
from tests.zoo.dense_blocks import softmax


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
    """The formula for the real tokens of one head."""
    landmarks, key_landmarks = means(query, number), means(key, number)
    middle = inverse(softmax(landmarks @ key_landmarks.T), num_iterations)
    rest = softmax(landmarks @ key.T) @ value
    return softmax(query @ key_landmarks.T) @ middle @ rest


def expected_output(group, query, key, value, real, query_real):
    number, num_iterations = group.num_landmarks, group.num_iterations
    kernel = golden_cases.to_numpy(group.convolution_kernel)
    output, length = np.zeros(value.shape), value.shape[2]
    for b, h in np.ndindex(query.shape[:2]):
        shown = real[b]
        arrays = (x[b, h, shown] for x in (query, key, value))
        output[b, h, shown] = expected_row(*arrays, number, num_iterations)
        near = np.pad(value[b, h] * shown[:, None], [(1, 1), (0, 0)])
        output[b, h] += sum(kernel[i, h] * near[i : i + length] for i in range(3))
    return output


@pytest.mark.parametrize("length", [24, 17, 4, 1])
def test_equals_the_formula(length):
    """Also with tokens that do not fill segments evenly, and with fewer of them."""
    group = zoo.NystromHeads(HEADS, 6, convolution_size=3, num_iterations=4)
    real = helpers.tail_mask(length, length, length - length // 3)
    real[1, : length // 4] = False
    assert_follows(expected_output, group, length, real=real, query_real=real)


@pytest.mark.parametrize("name", ["plain", "convolved", "masked"])
def test_equals_another_implementation(name):
    """Of the package nystrom-attention; see `tools/peers`."""
    golden = golden_cases.load("peers/nystrom.npz")
    dim = golden["query"].shape[-1]
    size = None if name == "plain" else len(golden["kernel"])
    group = helpers.built(zoo.NystromHeads(HEADS, 4, convolution_size=size), dim)
    for weight in group.weights:
        weight.assign(golden["kernel"])
    mask = golden["mask"] if name == "masked" else np.ones_like(golden["mask"])
    masks = {"query_mask": mask, "value_mask": mask} if name == "masked" else {}
    query = golden["query"] * dim**-0.5

    output, _ = golden_cases.run(group, query, golden["key"], golden["value"], **masks)

    output, expected = (x.swapaxes(1, 2)[mask] for x in (output, golden[name]))
    golden_cases.assert_close(output, expected, 1e-5)
