"""Clusters of vectors of bits, found anew in each sequence.

Letters: B batch, H heads, L length, N bits, C clusters.
"""

from keras import ops

from routing_tf.layers.blocks import running_sum
from routing_tf.layers.lengths import numbers
from routing_tf.layers.products import product


def cluster_bits(bits, real, num_clusters, num_iterations):
    """Finds clusters by k-means with Hamming distances.

    The first centroids are tokens at equal distances among the real ones. A bit of a
    centroid is what most members have, 0 in a tie; a cluster without members keeps its
    centroid, and a token in the middle of several is in the first of them.

    Args:
        bits: `<float32>[B, H, L, N]`, 1 for a bit that is set and -1 for others.
        real: `<bool>[B, 1, L]`, False for padding, which moves no centroid.
        num_clusters: number of clusters.
        num_iterations: number of times that centroids move.

    Returns:
        `<int32>[B, H, L]`, the cluster of each token.
    """
    centroids = _first_centroids(bits, real, num_clusters)
    for _ in range(num_iterations):
        cluster = _nearest(bits, centroids)
        members = members_of(cluster, real, num_clusters)
        sums = ops.matmul(ops.swapaxes(members, -1, -2), bits)
        has_members = ops.any(members > 0, axis=-2)[..., None]
        moved = ops.where(sums > 0, 1.0, -1.0)
        centroids = ops.where(has_members, moved, centroids)
    return _nearest(bits, centroids)


def members_of(cluster, real, num_clusters):
    """Returns `<float32>[B, H, L, C]`, 1 where a token is in a cluster and real."""
    members = ops.one_hot(cluster, num_clusters, dtype="float32")
    return members * ops.cast(real, "float32")[..., None]


def _nearest(bits, centroids):
    # Twice the Hamming distance is the number of bits minus this.
    products = ops.matmul(bits, ops.swapaxes(centroids, -1, -2))
    return ops.cast(ops.argmax(products, axis=-1), "int32")


def _first_centroids(bits, real, num_clusters):
    count = running_sum(ops.cast(real, "float32"))
    rank = ops.where(real, ops.cast(count, "int32") - 1, -1)
    total = ops.sum(ops.cast(real, "int32"), axis=-1, keepdims=True)
    chosen = numbers(num_clusters) * total // num_clusters
    picks = ops.cast(chosen[..., None] == rank[..., None, :], "float32")
    return product(picks, bits)
