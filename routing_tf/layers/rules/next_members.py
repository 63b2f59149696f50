"""What the tokens of a call see of the last members of clusters, behind a cache.

Letters: B batch, H heads of queries, G key heads, T tokens of the call, K clusters, N
clusters that each of them reads, R places of a ring, E size of a row.
"""

import numpy as np
from keras import ops

from routing_tf.layers import key_heads
from routing_tf.layers import membership
from routing_tf.layers.membership import entries_at
from routing_tf.layers.rules import rings


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
        counts, number = cache["counts"], joins.shape[2]
        up_to = counts[:, :, None] + ops.cumsum(joins, axis=2)
        earlier = up_to - joins
        self.read, self._read = read, key_heads.of_queries(read, joins.shape[1])
        up_to_query, before_query = (
            ops.take_along_axis(key_heads.for_queries(x, read.shape[1]), read, axis=-1)
            for x in (up_to, earlier)
        )
        self.ends = up_to_query
        ranks = rings.ranks(self._of_clusters(counts, entries_at), num_places)
        new_ranks, is_read = (
            self._of_clusters(ops.swapaxes(x, 2, 3), membership.gather)
            for x in (earlier, joins)
        )
        places = np.arange(number, dtype="int32")
        is_earlier = places[:, None] >= places + (not sees_itself)
        is_read = ops.logical_and(is_read > 0, is_earlier[:, None])
        exists = ops.concatenate([ranks >= 0, is_read], axis=-1)
        ranks = ops.concatenate([ranks, new_ranks], axis=-1)
        near = ranks >= (up_to_query - window)[..., None]
        self.visible = ops.logical_and(exists, near)
        # A shifted key is that of an earlier token.
        before = up_to_query if key_shift else before_query
        self.distances = ranks - before[..., None]

    def rows(self, ring, new):
        """Returns what stands at the members, `[B, H, T, N, R + T, E]`.

        From `[B, G, K, R, E]` in the rings, and `[B, G, T, E]` of the tokens.
        """
        found = self._of_clusters(ring, rings.of_cluster)
        shape = ops.shape(found)
        new = key_heads.for_queries(new, found.shape[1])[:, :, None, None]
        number = new.shape[4]
        new = ops.broadcast_to(new, (*shape[:4], number, shape[-1]))
        return ops.concatenate([found, new], axis=4)

    def _of_clusters(self, x, find):
        """From `[B, G, K, ...]` to what `find` returns of the read clusters."""
        return key_heads.all_queries(find(x, self._read))
