"""Tests of the order of tokens by cluster; `oracle_test` has what heads see in it."""

import functools

import numpy as np
import pytest

from routing_tf.layers.routing.cluster_order import ClusterOrder
from routing_tf.layers.routing.cluster_order import SortedTokens
from routing_tf.layers.routing.cluster_order import chunk_size_for


@pytest.mark.parametrize(
    "window, chunk_size",
    [(1, 1), (3, 3), (16, 16), (17, 16), (64, 16), (65, 17), (128, 32), (130, 33)],
)
def test_chunks_are_about_a_quarter_of_the_window(window, chunk_size):
    assert chunk_size_for(window) == chunk_size


def test_keys_that_overflow_are_refused():
    clusters = np.zeros((1, 1, 2**20), "int32")
    for sort in (functools.partial(ClusterOrder, chunk_size=16), SortedTokens):
        with pytest.raises(ValueError, match=" 1048576 .* 2048 "):
            sort(clusters, num_clusters=2048)
