"""Tests of the order of tokens by cluster; `oracle_test` has what heads see in it."""

import functools

import numpy as np
import pytest
from keras import ops

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


@pytest.mark.parametrize("shares", [(0.2, 0.4), (0.2, 1.0)])
def test_tokens_of_the_last_cluster_share_a_slot(shares):
    random = np.random.default_rng(0)
    is_last = random.random((1, 2, 90)) > np.array(shares)[:, None]
    clusters = np.where(is_last, 4, random.integers(0, 4, is_last.shape))
    clusters = ops.convert_to_tensor(clusters.astype("int32"))
    order = ClusterOrder(clusters, num_clusters=5, chunk_size=1)
    order.leave_out_last()
    x = np.stack([np.arange(180).reshape(is_last.shape), is_last], axis=-1)
    found = order.restore(order.arrange(ops.convert_to_tensor(x.astype("int32"))))
    found = ops.convert_to_numpy(found)
    np.testing.assert_array_equal(found[..., 1], is_last)
    np.testing.assert_array_equal(found[~is_last], x[~is_last])
    most = (~is_last).sum(axis=-1).max()
    assert order.tokens.shape[2] == min(most + 1, 90)
