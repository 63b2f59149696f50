"""The last members of clusters in a fixed number of places, for steps.

In the ring of its cluster, the member of rank r is at r modulo the number of places.
Letters: B batch, H heads, L length, K clusters, R places of a ring, E size of a row.
"""

from keras import ops

from routing_tf.layers.routing.cluster_order import SortedTokens
from routing_tf.layers.support import backends
from routing_tf.layers.support import gathering
from routing_tf.layers.support.gathering import entries_at
from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.lengths import numbers


def last_entries(clusters, num_clusters, num_places, before):
    """Returns which entries of a sequence stand in the rings behind it.

    Args:
        clusters: `<int32>[B, H, L]`, `num_clusters` for what is no member.
        num_clusters: number of clusters K.
        num_places: number of places R of a ring.
        before: `<int32>[B, H, K]`, numbers of members before the sequence.

    Returns:
        `<int32>[B, H, K, R]`, the entries; which places they take, `<bool>` likewise,
        where any entry stands for the others; and the numbers of members `[B, H, K]`.
    """
    found = SortedTokens(clusters, num_clusters + 1)
    first, added = found.starts[..., :-1, None], found.counts[..., :-1]
    rank = ranks(before + added, num_places) - before[..., None]
    index = ops.clip(first + rank, 0, length_of(clusters, 2) - 1)
    return entries_at(found.tokens, index), rank >= 0, before + added


def ranks(counts, num_places):
    """Ranks of the members in the places of a ring; negative in empty ones.

    From `[...]` to `[..., R]`.
    """
    newest = counts[..., None] - 1
    places = numbers(num_places)
    return newest - (newest - places) % num_places


def joined(cache, clusters, is_member, **new):
    """Returns a cache of rings with new members behind those that are there.

    Args:
        cache: has `"counts"`, the numbers of members so far `<int32>[B, H, K]`.
        clusters: `<int32>[B, H, L, N]`, all different for one entry.
        is_member: `<bool>[B, H, L, N]`, whether an entry is in them.
        **new: `[B, H, L, E]`, entries by the names of their rings in the cache.
    """
    name, *_ = new
    num_clusters, num_places = cache[name].shape[2:4]
    batch, heads, length, number = ops.shape(clusters)
    if length == 1:
        cluster, enters = clusters[:, :, 0], is_member[:, :, 0]
        added = backends.one_hot(cluster, num_clusters, dtype="int32")
        rank = ops.sum(added * cache["counts"][:, :, None], axis=-1)
        place = cluster * num_places + rank % num_places
        added = ops.sum(added * ops.cast(enters, "int32")[..., None], axis=2)
        parts = {
            name: _updated(cache[name], place, enters[..., None], x)
            for name, x in new.items()
        }
        return {**cache, **parts, "counts": cache["counts"] + added}
    members = ops.where(is_member, clusters, num_clusters)
    members = ops.reshape(members, (batch, heads, length * number))
    entries, is_new, counts = last_entries(
        members, num_clusters, num_places, cache["counts"]
    )
    parts = {
        name: ops.where(
            is_new[..., None], gathering.gather(x, entries // number), cache[name]
        )
        for name, x in new.items()
    }
    return {**cache, **parts, "counts": counts}


def _updated(x, place, enters, new):
    """Returns rings `[B, H, K, R, E]` with `new` `[B, H, 1, E]` where it enters.

    `place`, `<int32>[B, H, N]`, counts over all rings; `enters` is `<bool>[..., 1]`.
    """
    batch, heads, num_clusters, num_places, size = ops.shape(x)
    flat = ops.reshape(x, (batch, heads, num_clusters * num_places, size))
    new = ops.where(enters, new, gathering.gather(flat, place))
    return ops.reshape(gathering.replaced(flat, place, new), ops.shape(x))
