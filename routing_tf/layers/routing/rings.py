"""The last members of clusters in a fixed number of places, for steps.

In the ring of its cluster, the member of rank r is at r modulo the number of places.
Letters: B batch, H heads (of queries), G key heads, L length, T tokens of a call, K
clusters, N clusters of an entry or a read, R places of a ring, E size of a row.
"""

from keras import ops

from routing_tf.layers.routing.cluster_order import SortedTokens
from routing_tf.layers.support import backends
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support import tensors
from routing_tf.layers.support.tensors import numbers


def ranks(counts, num_places):
    """Returns the ranks in a ring, `[..., R]`; negative in empty places."""
    newest = counts[..., None] - 1
    places = numbers(num_places)
    return newest - (newest - places) % num_places


def joined(cache, clusters, is_member, **new):
    """Returns a cache of rings with new members after those that are there.

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
            name: _updated(cache[name], place, enters, x) for name, x in new.items()
        }
        return {**cache, **parts, "counts": cache["counts"] + added}
    members = ops.where(is_member, clusters, num_clusters)
    members = ops.reshape(members, (batch, heads, length * number))
    found, before = SortedTokens(members, num_clusters + 1), cache["counts"]
    first, added = found.starts[..., :-1, None], found.counts[..., :-1]
    rank = ranks(before + added, num_places) - before[..., None]
    index = ops.clip(first + rank, 0, length * number - 1)
    entries, are_new = tensors.entries_at(found.tokens, index) // number, rank >= 0
    parts = {
        name: ops.where(are_new[..., None], tensors.gather(x, entries), cache[name])
        for name, x in new.items()
    }
    return {**cache, **parts, "counts": before + added}


def _updated(x, place, enters, new):
    """Returns rings `[B, H, K, R, E]` with `new` `[B, H, 1, E]` where it enters.

    `place`, `<int32>[B, H, N]`, counts over all rings; `enters` is `<bool>[B, H, N]`.
    """
    batch, heads, num_clusters, num_places, size = ops.shape(x)
    flat = ops.reshape(x, (batch, heads, num_clusters * num_places, size))
    new = ops.broadcast_to(new, (*ops.shape(place), size))
    return ops.reshape(tensors.replaced(flat, place, new, enters), ops.shape(x))


class NextMembers:
    """The members of the read clusters: those in the rings, then the tokens themselves.

    Args:
        cache: has `"counts"`, the numbers of members so far `<int32>[B, G, K]`.
        joins: `<int32>[B, G, T, K]`, 1 where a token's key joins a cluster.
        read: `<int32>[B, H, T, N]`, the clusters that each query reads.
        num_places: number R of places of a ring.
        window: how many of the last members a query sees.
        key_shift: 1 if a token's key is that of the token before it.
        sees_itself: whether a token that joins what it reads is seen by itself.

    Attributes:
        read: as given.
        ends: `<int32>[B, H, T, N]`, number of members up to each token.
        visible: `<bool>[B, H, T, N, R + T]`, which members each query sees.
        distances: `<int32>[B, H, T, N, R + T]`, relative positions.
    """

    def __init__(
        self, cache, joins, read, num_places, window, key_shift=0, sees_itself=True
    ):
        number = joins.shape[2]
        self.read = self._read = read
        if joins.shape[1] < read.shape[1]:
            self._read = head_inputs.of_queries(read, joins.shape[1])
        # Of each cluster: members before the call, before each token, and these.
        joins = ops.swapaxes(joins, 2, 3)
        counts = cache["counts"][..., None]
        earlier = counts + ops.cumsum(joins, axis=-1) - joins
        table = ops.concatenate([counts, earlier, joins], axis=-1)
        table = self._of_clusters(table, tensors.gather)
        new_ranks, joins = table[..., 1 : number + 1], table[..., number + 1 :]
        places = numbers(number)
        own = ops.cast(places[:, None] == places, "int32")[:, None]
        before = ops.sum(new_ranks * own, axis=-1)
        self.ends = before + ops.sum(joins * own, axis=-1)
        old_ranks = ranks(table[..., 0], num_places)
        is_earlier = places[:, None] >= places + int(not sees_itself)
        is_read = ops.logical_and(joins > 0, is_earlier[:, None])
        exists = ops.concatenate([old_ranks >= 0, is_read], axis=-1)
        all_ranks = ops.concatenate([old_ranks, new_ranks], axis=-1)
        near = all_ranks >= (self.ends - window)[..., None]
        self.visible = ops.logical_and(exists, near)
        # A shifted key is that of an earlier token.
        self.distances = all_ranks - (self.ends if key_shift else before)[..., None]

    def rows(self, ring, new):
        """Returns what stands at the members, `[B, H, T, N, R + T, E]`.

        From `[B, G, K, R, E]` in the rings, and `[B, G, T, E]` of the tokens.
        """
        found = self._of_clusters(ring, tensors.gather_blocks)
        shape = ops.shape(found)
        if new.shape[1] != found.shape[1]:
            new = head_inputs.for_queries(new, found.shape[1])
        new = new[:, :, None, None]
        number = new.shape[4]
        new = ops.broadcast_to(new, (*shape[:4], number, shape[-1]))
        return ops.concatenate([found, new], axis=4)

    def _of_clusters(self, x, find):
        """From `[B, G, K, ...]` to what `find` returns of the read clusters."""
        found = find(x, self._read)
        return found if self._read is self.read else head_inputs.all_queries(found)
