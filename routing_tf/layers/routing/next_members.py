"""What the tokens of a call see of the last members of clusters, behind a cache.

Letters: B batch, H heads of queries, G key heads, T tokens of the call, K clusters, N
clusters that each of them reads, R places of a ring, E size of a row.
"""

from keras import ops

from routing_tf.layers.routing import rings
from routing_tf.layers.support import gathering
from routing_tf.layers.support import key_heads
from routing_tf.layers.support.lengths import numbers


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
            self._read = key_heads.of_queries(read, joins.shape[1])
        # Of each cluster: members before the call, before each token, and these.
        joins = ops.swapaxes(joins, 2, 3)
        counts = cache["counts"][..., None]
        earlier = counts + ops.cumsum(joins, axis=-1) - joins
        table = ops.concatenate([counts, earlier, joins], axis=-1)
        table = self._of_clusters(table, gathering.gather)
        new_ranks, joins = table[..., 1 : number + 1], table[..., number + 1 :]
        places = numbers(number)
        own = ops.cast(places[:, None] == places, "int32")[:, None]
        before = ops.sum(new_ranks * own, axis=-1)
        self.ends = before + ops.sum(joins * own, axis=-1)
        ranks = rings.ranks(table[..., 0], num_places)
        is_earlier = places[:, None] >= places + int(not sees_itself)
        is_read = ops.logical_and(joins > 0, is_earlier[:, None])
        exists = ops.concatenate([ranks >= 0, is_read], axis=-1)
        ranks = ops.concatenate([ranks, new_ranks], axis=-1)
        near = ranks >= (self.ends - window)[..., None]
        self.visible = ops.logical_and(exists, near)
        # A shifted key is that of an earlier token.
        self.distances = ranks - (self.ends if key_shift else before)[..., None]

    def rows(self, ring, new):
        """Returns what stands at the members, `[B, H, T, N, R + T, E]`.

        From `[B, G, K, R, E]` in the rings, and `[B, G, T, E]` of the tokens.
        """
        found = self._of_clusters(ring, gathering.gather_blocks)
        shape = ops.shape(found)
        if new.shape[1] != found.shape[1]:
            new = key_heads.for_queries(new, found.shape[1])
        new = new[:, :, None, None]
        number = new.shape[4]
        new = ops.broadcast_to(new, (*shape[:4], number, shape[-1]))
        return ops.concatenate([found, new], axis=4)

    def _of_clusters(self, x, find):
        """From `[B, G, K, ...]` to what `find` returns of the read clusters."""
        found = find(x, self._read)
        return found if self._read is self.read else key_heads.all_queries(found)
