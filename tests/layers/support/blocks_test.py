"""Tests of cutting sequences into blocks."""

import numpy as np
import pytest

from routing_tf.layers.support import blocks
from routing_tf.layers.support.positions import Positions
from tests import golden_cases
from tests.layers import helpers


def test_blocks_hold_the_sequence_and_join_again():
    x = helpers.normal(2, 3, 10, 5)
    cut = blocks.break_into_blocks(x, 4, axis=2)
    assert cut.shape == (2, 3, 3, 4, 5)
    as_array = golden_cases.to_numpy(cut)
    np.testing.assert_array_equal(as_array[:, :, 1], x[:, :, 4:8])
    np.testing.assert_array_equal(as_array[:, :, 2, 2:], 0.0)
    joined = blocks.put_back_blocks(cut, 10, axis=2)
    np.testing.assert_array_equal(golden_cases.to_numpy(joined), x)


def test_shift_right_equals_release():
    case = golden_cases.load("pieces/right_shift_blockwise_1d.npz")
    for source, expected in (("in/x", "out/float"), ("in/ids", "out/ids")):
        shifted = golden_cases.to_numpy(blocks.shift_right(case[source]))
        assert shifted.dtype == case[source].dtype
        np.testing.assert_array_equal(shifted, case[expected])
    ids = golden_cases.to_numpy(blocks.shift_right(np.array([[3, 4, 5]])))
    np.testing.assert_array_equal(ids, [[0, 3, 4]])


def test_shift_right_on_two_axes_equals_release():
    case = golden_cases.load("pieces/right_shift_blockwise_2d.npz")
    order = Positions((8, 6), tuple(case.config["block_shape"]))
    for source, expected in (("in/x", "out/float"), ("in/ids", "out/ids")):
        x = case[source]
        sequence = order.arrange(x.reshape(2, 48, -1), axis=1)
        shifted = order.restore(blocks.shift_right(sequence), axis=1)
        shifted = golden_cases.to_numpy(shifted).reshape(x.shape)
        np.testing.assert_array_equal(shifted, case[expected])


def test_blocked_order_goes_block_by_block_and_row_by_row():
    rows, columns = np.divmod(np.arange(7 * 5), 5)
    order = Positions(lengths=(7, 5), block_shape=(2, 3))
    assert order.grid == (4, 2) and order.length == 48 and order.is_padded
    ids = np.arange(1, 36)[None, :, None]
    sequence = golden_cases.to_numpy(order.arrange(ids, axis=1))[0, :, 0]
    block = np.stack([rows // 2, columns // 3, rows % 2, columns % 3])
    places = np.ravel_multi_index(block, (4, 2, 2, 3))
    expected = np.zeros(48, "int64")
    expected[places] = ids[0, :, 0]
    np.testing.assert_array_equal(sequence, expected)


@pytest.mark.parametrize(
    "lengths, shape", [((7,), (3,)), ((7, 5), (2, 3)), ((2, 3), (4, 4)), ((4,), (4,))]
)
def test_restore_undoes_arrange(lengths, shape):
    order = Positions(lengths, shape)
    size = np.prod(lengths)
    for x, axis in ((helpers.normal(2, 3, size, 4), 2), (np.ones((2, size)) > 0, 1)):
        arranged = order.arrange(x, axis=axis)
        assert arranged.shape[axis] == order.length
        as_array = golden_cases.to_numpy(arranged)
        assert as_array.dtype == x.dtype
        # Zeros fill up the blocks.
        assert np.count_nonzero(as_array) == np.count_nonzero(x)
        restored = golden_cases.to_numpy(order.restore(arranged, axis=axis))
        np.testing.assert_array_equal(restored, x)


def blocked(lengths, shape, x):
    """A golden input `(batch, *lengths, dim)` in blocked order, and the order."""
    order = Positions(lengths, shape)
    flat = x.reshape(len(x), -1, x.shape[-1])
    return order, order.arrange(flat, axis=1)


LAYOUTS = [("1d", (16,)), ("2d", (6, 9))]


@pytest.fixture(scope="module")
def layout():
    return golden_cases.load("pieces/block_layout.npz")


@pytest.mark.parametrize("name, lengths", LAYOUTS)
def test_blocked_order_equals_release(layout, name, lengths):
    x, shape = (
        layout[f"in/x{len(lengths)}"],
        tuple(layout.config[f"query_shape_{name}"]),
    )
    order, sequence = blocked(lengths, shape, x)
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
    x, shape = (
        layout[f"in/x{len(lengths)}"],
        tuple(layout.config[f"query_shape_{name}"]),
    )
    order, sequence = blocked(lengths, shape, x)
    cut = golden_cases.to_numpy(sequence).reshape(2, *order.grid, -1, 2)
    pairs = zip(layout.config[f"flange_{name}"], shape, strict=True)
    before = tuple(flange // block for flange, block in pairs)
    after = (0, *before[1:]) if masked else before
    windows = blocks.memory_windows(cut, before, after, axis=1)
    kind = "masked" if masked else "unmasked"
    expected = layout[f"out/memory_blocks_{name}_{kind}"]
    np.testing.assert_array_equal(golden_cases.to_numpy(windows), expected)


@pytest.mark.parametrize("name, multiples", [("1d", {1: 5}), ("2d", {1: 2, 2: 4})])
def test_padding_equals_release(layout, name, multiples):
    expected = layout[f"out/pad_to_multiple_{name}"]
    x = layout[f"in/x{name[0]}"]
    for axis, multiple in multiples.items():
        assert expected.shape[axis] % multiple == 0
        x = blocks.pad_to_multiple(x, multiple, axis)
    np.testing.assert_array_equal(golden_cases.to_numpy(x), expected)


@pytest.mark.parametrize("length", [1, 15, 16, 50])
def test_running_sum(length):
    x = np.random.default_rng(0).integers(0, 9, (2, 3, length)).astype("float32")
    sums = golden_cases.to_numpy(blocks.running_sum(x))
    np.testing.assert_array_equal(sums, np.cumsum(x, axis=-1))
