"""Tests of how a cluster is found."""

import numpy as np
import pytest

from routing_tf.analysis.probe import BlockAttention
from routing_tf.analysis.probe import Clusters
from routing_tf.analysis.reads import find_cluster


def attention():
    """Four blocks; in the last but one, head 1 of the routed heads fills cluster 2."""
    nearest = np.zeros((1, 2, 5), "int32")
    nearest[0, 1] = [2, 0, 2, 2, 1]

    def clusters(nearest):
        return Clusters(nearest, nearest[..., None] == np.arange(3))

    return [
        BlockAttention("block_0", {}, {}),
        BlockAttention("block_1", {}, {"hashed_heads": clusters(nearest[:, :1])}),
        BlockAttention(
            "block_2",
            {},
            {
                "routed_heads": clusters(nearest),
                "cluster_strided_heads": clusters(nearest[:, 1:]),
            },
        ),
        BlockAttention("block_3", {}, {}),
    ]


def test_the_default_is_the_biggest_of_the_first_head_of_the_last_layer():
    cluster = find_cluster(attention())
    assert cluster.name == "block_2 routed_heads 0, cluster 0"
    assert cluster.is_member.all()


@pytest.mark.parametrize(
    "options, name, members",
    [
        ({"head": 1}, "block_2 routed_heads 1, cluster 2", [0, 2, 3]),
        ({"head": 1, "cluster": 1}, "block_2 routed_heads 1, cluster 1", [4]),
        ({"head": 2, "cluster": 0}, "block_2 cluster_strided_heads 0, cluster 0", [1]),
        ({"layer": 1, "cluster": 1}, "block_1 hashed_heads 0, cluster 1", []),
    ],
)
def test_by_numbers(options, name, members):
    cluster = find_cluster(attention(), **options)
    assert cluster.name == name
    assert np.flatnonzero(cluster.is_member).tolist() == members


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layer": 0}, r"`layer`.* \[1, 2\]\. .*layer=0"),
        ({"head": 3}, r"`head`.* \[0, 1, 2\]\. .*head=3"),
        ({"cluster": 3}, r"`cluster`.* \[0, 1, 2\]\. .*cluster=3"),
    ],
)
def test_no_such_cluster(options, message):
    with pytest.raises(ValueError, match=message):
        find_cluster(attention(), **options)


def test_no_clusters_at_all():
    assert find_cluster(attention()[:1]) is None
    with pytest.raises(ValueError, match=r"`layer`.* \[\]\. .*layer=0"):
        find_cluster(attention()[:1], layer=0)
