"""Attention to the last members of clusters that a query chooses: strictly causal.

Queries and keys choose clusters separately. In the order of clusters, a query still
sees one range of keys of a cluster. Queries whose ranges end in the same chunk of keys
are grouped, so that they read the same chunks. A query that reads several clusters
occurs once for each of them, and its results are joined into one softmax.

Letters: B batch, H heads, L length, Q queries: length times clusters that each reads.
"""

from keras import ops

from routing_tf.layers import backends
from routing_tf.layers import membership
from routing_tf.layers.cluster_order import ClusterOrder
from routing_tf.layers.cluster_order import chunk_size_for
from routing_tf.layers.cluster_order import ranks_in_clusters
from routing_tf.layers.lengths import length_of
from routing_tf.layers.lengths import numbers
from routing_tf.layers.masks import combine_masks
from routing_tf.layers.masks import without_padding
from routing_tf.layers.membership import entries_at
from routing_tf.layers.rules import rounds
from routing_tf.layers.rules.routed_tokens import best_clusters
from routing_tf.layers.rules.routed_tokens import own_clusters
from routing_tf.layers.rules.routed_tokens import real_tokens
from routing_tf.layers.scaled_dot_product import joined_parts
from routing_tf.layers.segments import segment_mask


def attend(group, tokens, training=None):
    """Lets each token attend to the last members of the best clusters of its query.

    Members are the tokens up to it whose keys chose this cluster. Relative positions
    are the rank of a member minus the number of members before the token, so only the
    token itself has the position 0. The work is `(2 Q + K * C) * (W + C)` pairs, linear
    in the length.
    """
    inputs = tokens.inputs
    window = group.known_window(tokens.length // tokens.num_copies)
    window = min(window, group.members_per_cluster)
    ranges = _Ranges(group, tokens, window)
    key = ranges.keys.arrange(ops.cast(tokens.key, group.compute_dtype))
    query = ranges.for_each_read(ops.cast(tokens.query, group.compute_dtype))
    vectors = ranges.queries.arrange(query), ranges.read(key)
    own_segment = segment_mask(
        inputs.segments, ranges.of_tokens, lambda x: ranges.entries(x)[..., 0, :]
    )
    mask = combine_masks(
        ranges.visible(), ranges.entries(inputs.value_mask), own_segment
    )
    bias, distances = ranges.entries(inputs.token_bias), ranges.distances()

    def read(x):
        return ranges.read(ranges.keys.arrange(x))

    if group.clusters_per_query > 1:
        parts = group.dot_product(
            *vectors,
            read(tokens.value),
            attention_mask=mask,
            bias=bias,
            distances=distances,
            training=training,
            return_logsumexp=True,
        )
        return without_padding(ranges.joined(*parts), real_tokens(inputs))
    output = rounds.attend(
        group,
        ranges.rounds(group),
        ranges.queries,
        read,
        tokens.value,
        vectors,
        mask,
        bias,
        training,
        distances=distances,
    )
    return without_padding(output, real_tokens(inputs))


class _Ranges:
    """The range of keys that each query sees, of a `window` of W members.

    Attributes:
        keys: `ClusterOrder` of the keys.
        queries: `ClusterOrder` of the queries, by the chunk in which their range ends.
        chunks: `<int32>[B, H, N, R]`, the R chunks of keys that a chunk of queries
            reads, the last of which holds the ends of their ranges.
    """

    def __init__(self, group, tokens, window):
        inputs, length = tokens.inputs, tokens.length
        self.window, self.length = window, length
        size = chunk_size_for(window)
        self.num_reads = group.clusters_per_query
        clusters, num_clusters = own_clusters(tokens.key_scores, inputs.key_mask)
        read = best_clusters(tokens.query_scores, self.num_reads)
        # The reads of all queries, one after the other.
        read = ops.concatenate(ops.unstack(read, axis=-1), axis=-1)
        self._clusters, self._read = clusters, read
        self._num_clusters = num_clusters
        self.keys = ClusterOrder(clusters, num_clusters, size)
        self.num_earlier, own = _num_keys(
            clusters, read, num_clusters, tokens.num_copies, self.num_reads
        )
        self.ends = self.num_earlier if group.key_shift else self.num_earlier + own
        last = ops.maximum(self.ends - 1, 0) // size
        last = entries_at(self.keys.first_chunk, read) + last
        num_chunks = self.keys.num_chunks
        last = ops.minimum(last, num_chunks - 1)
        if inputs.query_mask is not None:
            last = ops.where(self.for_each_read(inputs.query_mask), last, num_chunks)
            num_chunks += 1
        self.queries = ClusterOrder(last, num_chunks, size)
        last = ops.minimum(self.queries.cluster_of_chunk, self.keys.num_chunks - 1)
        num_back = -(-(window - 1) // size)
        self._back = num_back - numbers(num_back + 1)
        self.chunks = last[..., None] - self._back

    def for_each_read(self, x):
        """From tokens, `[B, H, L, ...]`, to queries, `[B, H, Q, ...]`."""
        return ops.concatenate([x] * self.num_reads, axis=2)

    def joined(self, output, logsumexp):
        """Joins the results of the reads of each token.

        From `<float>[B, H, N, C, D]` and `<float32>[B, H, N, C]` to `[B, H, L, D]`.
        """
        output, logsumexp = (
            ops.stack(ops.split(self.queries.restore(x), self.num_reads, axis=2), 3)
            for x in (output, logsumexp[..., None])
        )
        return joined_parts(output, logsumexp[..., 0])

    def read(self, chunks):
        """Returns what chunks of queries read; anything where no key is visible.

        From `[B, H, chunks of keys, C, D]` to `[B, H, N, R * C, D]`.
        """
        batch, heads, num_chunks, slots, dim = ops.shape(chunks)
        rows = ops.reshape(chunks, (batch, heads, num_chunks, slots * dim))
        rows = membership.gather(rows, ops.maximum(self.chunks, 0))
        num_rows = self.chunks.shape[-1]
        shape = (batch, heads, length_of(self.chunks, 2), num_rows * slots, dim)
        return ops.reshape(rows, shape)

    def entries(self, x):
        """Returns a mask or bias of positions, `[B, H, N, 1, R * C]`; or None."""
        if x is None:
            return None
        entries = membership.gather_entries(x, self.keys.tokens, self.length)
        return ops.swapaxes(self.read(entries[..., None]), -1, -2)

    def rounds(self, group):
        """Returns the `Rounds` of a group; None if there is nothing to join."""
        if not group.joins_rounds:
            return None
        places = self._clusters * rounds.stride(group.num_clusters)
        places = places + ranks_in_clusters(self._clusters, self._num_clusters)
        first, end = rounds.range_of_bucket(
            self._read, self.ends, self.window, group.num_clusters
        )
        return rounds.of_group(group, places, first, end)

    def visible(self):
        """Tells which keys each query sees, `<bool>[B, H, N, C, R * C]`."""
        ranks, ends = self._ranks(), self.of_queries(self.ends)[..., None]
        near = ops.logical_and(ranks < ends, ranks >= ends - self.window)
        return ops.logical_and(near, ranks >= 0)

    def distances(self):
        """Returns relative positions, `<int32>[B, H, N, C, R * C]`."""
        return self._ranks() - self.of_queries(self.num_earlier)[..., None]

    def _ranks(self):
        """Ranks of keys in the cluster of the last one, `<int32>[B, H, N, 1, R * C]`.

        They are negative for chunks of earlier clusters.
        """
        size = self.keys.chunk_size
        last = ops.maximum(self.chunks[..., -1], 0)
        chunk = entries_at(self.keys.rank_of_chunk, last)[..., None] - self._back
        ranks = chunk[..., None] * size + numbers(size)
        batch, heads, num_chunks, rows, _ = ops.shape(ranks)
        return ops.reshape(ranks, (batch, heads, num_chunks, 1, rows * size))

    def of_tokens(self, x):
        """From a tensor broadcastable to `[B, H, L]` to `[B, H, N, C]`."""
        return membership.gather_entries(
            x, self.queries.tokens % self.length, self.length
        )

    def of_queries(self, x):
        """From `[B, H, Q]` to `[B, H, N, C]`."""
        return self.queries.arrange(x[..., None])[..., 0]


def _num_keys(clusters, read, num_clusters, num_copies, num_reads):
    """Returns how many keys of earlier tokens chose the cluster that each query reads.

    Also returns how many of its own token, at most one; both are `<int32>[B, H, Q]`.
    """
    batch, heads, length = ops.shape(clusters)
    shape = (batch, heads, length // num_copies)
    chosen = backends.one_hot(clusters, num_clusters, dtype="int32")
    chosen = ops.sum(ops.reshape(chosen, (*shape, num_copies, num_clusters)), axis=3)
    earlier = ops.cumsum(chosen, axis=2) - chosen
    parts = ops.split(read, num_reads, axis=2)
    read = ops.concatenate([ops.reshape(x, (*shape, num_copies)) for x in parts], -1)

    def of_queries(x):
        found = ops.split(ops.take_along_axis(x, read, axis=-1), num_reads, axis=-1)
        found = [ops.reshape(x, (batch, heads, length)) for x in found]
        return ops.concatenate(found, axis=-1)

    return of_queries(earlier), of_queries(chosen)
