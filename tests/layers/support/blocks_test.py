"""Tests of cutting sequences into blocks."""

import numpy as np
import pytest

from routing_tf.layers.support import tensors
from routing_tf.layers.support.positions import Positions
from tests import golden_cases


def test_shift_right_equals_release():
    case = golden_cases.load("pieces/right_shift_blockwise_1d.npz")
    for source, expected in (("in/x", "out/float"), ("in/ids", "out/ids")):
        shifted = golden_cases.to_numpy(tensors.shift_right(case[source]))
        assert shifted.dtype == case[source].dtype
        np.testing.assert_array_equal(shifted, case[expected])
    ids = golden_cases.to_numpy(tensors.shift_right(np.array([[3, 4, 5]])))
    np.testing.assert_array_equal(ids, [[0, 3, 4]])


def test_shift_right_on_two_axes_equals_release():
    case = golden_cases.load("pieces/right_shift_blockwise_2d.npz")
    order = Positions((8, 6), tuple(case.config["block_shape"]))
    for source, expected in (("in/x", "out/float"), ("in/ids", "out/ids")):
        x = case[source]
        sequence = order.arrange(x.reshape(2, 48, -1), axis=1)
        shifted = order.restore(tensors.shift_right(sequence), axis=1)
        shifted = golden_cases.to_numpy(shifted).reshape(x.shape)
        np.testing.assert_array_equal(shifted, case[expected])


LAYOUTS = [("1d", (16,)), ("2d", (6, 9))]


@pytest.fixture(scope="module")
def layout():
    return golden_cases.load("pieces/block_layout.npz")


def blocked(layout, name, lengths):
    """A golden input `(batch, *lengths, dim)`, its order, and it in that order."""
    x = layout[f"in/x{len(lengths)}"]
    order = Positions(lengths, tuple(layout.config[f"query_shape_{name}"]))
    return x, order, order.arrange(x.reshape(len(x), -1, x.shape[-1]), axis=1)


@pytest.mark.parametrize("name, lengths", LAYOUTS)
def test_blocked_order_equals_release(layout, name, lengths):
    x, order, sequence = blocked(layout, name, lengths)
    expected = layout[f"out/blocks_{name}"]
    assert order.grid == expected.shape[1:-2]
    assert order.length == np.prod(lengths) and not order.is_padded
    sequence = golden_cases.to_numpy(sequence)
    np.testing.assert_array_equal(sequence, expected.reshape(sequence.shape))
    restored = golden_cases.to_numpy(order.restore(sequence, axis=1)).reshape(x.shape)
    np.testing.assert_array_equal(restored, layout[f"out/put_back_{name}"])
    # A decoding step takes the positions one by one in this order.
    item = layout[f"out/item_at_step_7_{name}"]
    np.testing.assert_array_equal(sequence[:, 7], item.reshape(len(x), -1))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name, lengths", LAYOUTS)
def test_memory_windows_equal_release(layout, name, lengths, masked):
    _, order, sequence = blocked(layout, name, lengths)
    cut = golden_cases.to_numpy(sequence).reshape(2, *order.grid, -1, 2)
    shape = layout.config[f"query_shape_{name}"]
    pairs = zip(layout.config[f"flange_{name}"], shape, strict=True)
    before = tuple(flange // block for flange, block in pairs)
    after = (0, *before[1:]) if masked else before
    windows = tensors.memory_windows(cut, before, after, axis=1)
    kind = "masked" if masked else "unmasked"
    expected = layout[f"out/memory_blocks_{name}_{kind}"]
    np.testing.assert_array_equal(golden_cases.to_numpy(windows), expected)


@pytest.mark.parametrize("name, multiples", [("1d", {1: 5}), ("2d", {1: 2, 2: 4})])
def test_padding_equals_release(layout, name, multiples):
    expected = layout[f"out/pad_to_multiple_{name}"]
    x = layout[f"in/x{name[0]}"]
    for axis, multiple in multiples.items():
        assert expected.shape[axis] % multiple == 0
        x = tensors.pad_to_multiple(x, multiple, axis)
    np.testing.assert_array_equal(golden_cases.to_numpy(x), expected)
