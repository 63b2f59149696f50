"""Tests of the way of positions into a sequence and back."""

import numpy as np
import pytest

from routing_tf.layers.support.positions import Positions
from tests import golden_cases
from tests.layers import helpers


@pytest.mark.parametrize(
    "lengths, block_shape, grid, length",
    [
        ((7,), None, None, 7),
        ((7,), (4,), None, 8),
        ((3, 5), None, (1, 1), 15),
        ((3, 5), (2, 2), (2, 3), 24),
    ],
)
def test_way_there_and_back(lengths, block_shape, grid, length):
    positions = Positions(lengths, block_shape)
    assert positions.grid == grid
    x = helpers.normal(2, *lengths, 3)
    flat = golden_cases.to_numpy(positions.flatten(x))
    np.testing.assert_array_equal(flat, x.reshape(2, -1, 3))
    heads = np.stack([flat, 2 * flat], axis=1)
    arranged = golden_cases.to_numpy(positions.arrange(heads))
    assert arranged.shape == (2, 2, length, 3)
    restored = golden_cases.to_numpy(positions.restore(arranged))
    np.testing.assert_array_equal(restored, heads)
    back = golden_cases.to_numpy(positions.unflatten(restored[:, 0]))
    np.testing.assert_array_equal(back, x)


def test_masks_follow_the_positions():
    positions = Positions((3, 5), (2, 2))
    mask = helpers.normal(2, 3, 5) > 0
    sequence = golden_cases.to_numpy(positions.sequence("query_mask", mask))
    assert sequence.shape == (2, 24) and sequence.dtype == "bool"
    arranged = positions.arrange(mask.reshape(2, 1, 15))
    np.testing.assert_array_equal(sequence, golden_cases.to_numpy(arranged)[:, 0])


def test_a_mask_is_made_only_where_blocks_are_filled_up():
    assert Positions((6,), None).sequence("value_mask", None, fill=True) is None
    assert Positions((6,), (3,)).sequence("value_mask", None, fill=True) is None
    assert Positions((6,), (4,)).sequence("token_bias", None) is None
    made = Positions((6,), (4,)).sequence("value_mask", None, fill=True)
    np.testing.assert_array_equal(
        golden_cases.to_numpy(made), [[True] * 6 + 2 * [False]]
    )


@pytest.mark.parametrize("shape", [(2, 15), (2, 5, 3), (2, 3, 5, 1)])
def test_refuses_masks_of_another_shape(shape):
    with pytest.raises(ValueError) as error:
        Positions((3, 5), None).sequence("value_mask", np.ones(shape, "bool"))
    assert "`value_mask`" in str(error.value)
    message = f"Received: value_mask.shape={shape} for positions (3, 5)"
    assert message in str(error.value)
