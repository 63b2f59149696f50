"""Tests of the parts of an axis."""

import numpy as np
import pytest

from routing_tf.layers.support.axes import cut_axis
from routing_tf.layers.support.axes import split_axis
from tests import golden_cases

X = np.arange(24.0).reshape(2, 4, 3)


@pytest.mark.parametrize("sizes", [[4], [1, 3], [2, 1, 1]])
def test_parts_are_those_of_indexing(sizes):
    parts = golden_cases.to_numpy(split_axis(X, sizes, axis=1))
    assert [part.shape[1] for part in parts] == sizes
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), X)


@pytest.mark.parametrize(
    "axis, start, stop", [(1, 0, 4), (1, 0, 2), (1, 2, 4), (1, 2, 2)]
)
@pytest.mark.parametrize("from_the_end", [False, True])
def test_one_part(axis, start, stop, from_the_end):
    axis = axis - X.ndim if from_the_end else axis
    part = golden_cases.to_numpy(cut_axis(X, start, stop, axis))
    np.testing.assert_array_equal(part, X[:, start:stop])


def test_the_middle():
    part = golden_cases.to_numpy(cut_axis(X, 1, 2, axis=2))
    np.testing.assert_array_equal(part, X[:, :, 1:2])
