"""Tests of the order of tokens by cluster; `oracle_test` has what heads see in it."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf.layers.routing.cluster_order import ClusterOrder
from routing_tf.layers.routing.cluster_order import SortedTokens
from routing_tf.layers.routing.cluster_order import chunk_size_for
from routing_tf.layers.support.blocks import memory_windows
from tests import golden_cases
from tests.layers import helpers


@pytest.mark.parametrize(
    "window, chunk_size",
    [(1, 1), (3, 3), (16, 16), (17, 16), (64, 16), (65, 17), (128, 32), (130, 33)],
)
def test_chunks_are_about_a_quarter_of_the_window(window, chunk_size):
    assert chunk_size_for(window) == chunk_size


def test_keys_that_overflow_are_refused():
    clusters = np.zeros((1, 1, 2**20), "int32")
    for sort in (functools.partial(ClusterOrder, chunk_size=16), SortedTokens):
        with pytest.raises(ValueError, match="2048 clusters"):
            sort(clusters, num_clusters=2048)


@pytest.mark.parametrize("window", [1, 3, 5, 9])
def test_windows_join_chunks_with_those_before(window):
    """The first ones may have anything before them, which gets no gradient."""
    clusters = ops.zeros((2, 3, 8), "int32")
    order = ClusterOrder(clusters, num_clusters=1, chunk_size=2)
    x, before = helpers.normal(2, 3, 4, 2, 5), order.window_offset(window) // 2
    is_inside = memory_windows(np.ones_like(x), (before,), (0,), axis=2)
    is_inside = golden_cases.to_numpy(is_inside)
    weights = is_inside * helpers.normal(*is_inside.shape, seed=1)

    def gradients(windows):
        return golden_cases.gradients(
            keras.layers.Lambda(windows),
            lambda windows, losses: ops.sum(ops.multiply(windows, weights)),
            {"inputs": x},
            wrt=["inputs"],
        )

    zeros = gradients(lambda x: memory_windows(x, (before,), (0,), axis=2))
    anything = gradients(lambda x: order.windows(x, window))
    found = golden_cases.to_numpy(anything.outputs) * is_inside
    np.testing.assert_array_equal(found, zeros.outputs)
    golden_cases.assert_close(anything.inputs["inputs"], zeros.inputs["inputs"], 1e-6)
