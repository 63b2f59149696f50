"""The last members of clusters in a fixed number of places, for steps.

In the ring of its cluster, the member of rank r is at r modulo the number of places.
Letters: B batch, H heads, L length, K clusters, R places of a ring, E size of a row.
"""

import numpy as np
from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.membership import entries_at


def last_entries(clusters, num_clusters, num_places):
    """Returns which entries of a sequence are in the rings after it.

    From `<int32>[B, H, L]`, `num_clusters` for tokens that are not members, to
    `<int32>[B, H, K, R]`, any entry in empty places, and the numbers of members
    `[B, H, K]`.
    """
    length = clusters.shape[2]
    # Sorted by cluster and position.
    keys = clusters * length + np.arange(length, dtype="int32")
    by_cluster = ops.sort(keys, axis=-1) % length
    counts = ops.sum(ops.one_hot(clusters, num_clusters, dtype="int32"), axis=2)
    first = ops.cumsum(counts, axis=-1) - counts
    index = first[..., None] + ranks(counts, num_places)
    return entries_at(by_cluster, ops.clip(index, 0, length - 1)), counts


def ranks(counts, num_places):
    """Ranks of the members in the places of a ring; negative in empty ones.

    From `[...]` to `[..., R]`.
    """
    newest = counts[..., None] - 1
    places = np.arange(num_places, dtype="int32")
    return newest - (newest - places) % num_places


def of_cluster(x, cluster):
    """Returns the rings of clusters `[B, H, ...]`: `[B, H, ..., R, E]`.

    `x` is `[B, H, K, R, E]`.
    """
    batch, heads, num_clusters, num_places, size = ops.shape(x)
    flat = ops.reshape(x, (batch, heads, num_clusters, num_places * size))
    found = membership.gather(flat, cluster)
    return ops.reshape(found, (*ops.shape(cluster), num_places, size))


def at(x, place):
    """Returns the entries at places `[B, H, ...]`, counted over all rings.

    From `[B, H, K, R, E]` to `[B, H, ..., E]`.
    """
    return membership.gather(_flat(x), place)


def updated(x, place, new):
    """Returns `[B, H, K, R, E]` with `new` `[B, H, ..., E]` at places `[B, H, ...]`."""
    flat, size = _flat(x), x.shape[-1]
    index = membership.flat_positions(place, flat.shape[2])
    rows = ops.scatter_update(
        ops.reshape(flat, (-1, size)), index[:, None], ops.reshape(new, (-1, size))
    )
    return ops.reshape(rows, ops.shape(x))


def _flat(x):
    """From `[B, H, K, R, E]` to `[B, H, K * R, E]`."""
    batch, heads, num_clusters, num_places, size = ops.shape(x)
    return ops.reshape(x, (batch, heads, num_clusters * num_places, size))
