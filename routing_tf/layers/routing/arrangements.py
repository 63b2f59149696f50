"""The arrangement of clustered tokens in chunks, and what each chunk reads.

Letters: B batch, H heads, L length, Q queries: length times clusters that each reads, N
chunks of queries, C slots of a chunk, S keys that a chunk reads, D dim.
"""

from keras import ops

from routing_tf.layers.routing.cluster_order import ClusterOrder
from routing_tf.layers.routing.cluster_order import chunk_size_for
from routing_tf.layers.softmax.scaled_dot_product import joined_parts
from routing_tf.layers.support import backends
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import segment_mask
from routing_tf.layers.support.tensors import entries_at
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers

# A chunk of reads copies the keys that it reads, so small ones cost more than the empty
# slots of larger ones.
MIN_READS_OF_CHUNK = 32


class OfTokens:
    """Tokens whose queries read the cluster of their own keys.

    Args:
        rule: `LastMembers`.
        tokens: `RoutedTokens`.
        window: how many members a token sees.

    Attributes:
        order: `ClusterOrder` of the queries.
        query: `<float>[B, H, N, C, D]`.
        key: `<float>[B, H, N, S, D]`.
        mask: `<bool>`, broadcastable to `[B, H, N, C, S]`; None for all.
        bias: `<float>` likewise, or None.
        distances: how the dot product finds distances, as its arguments.
        clusters: `<int32>[B, H, L]`, those of keys.
        num_clusters: number of clusters, including that of padding.
        asked: `<int32>[B, H, Q]`, the clusters that queries read.
        ends: `<int32>[B, H, Q]`, number of members up to each query; None if it is the
            token's own rank plus 1, or its rank with shifted keys.
    """

    ends = None

    def __init__(self, rule, tokens, window):
        inputs = tokens.inputs
        clusters, count = tokens.of_keys.apart_from_padding(inputs.key_mask)
        self.clusters = self.asked = clusters
        self.num_clusters = count
        self.order = order = ClusterOrder(clusters, count, chunk_size_for(window))
        # The token itself is in its window, whether it sees itself or not.
        self._window = window = window + rule.key_shift
        self._length = tokens.length
        key = order.arrange(ops.cast(tokens.key, rule.compute_dtype))
        self.query, self.key = key, order.windows(key, window)
        if not tokens.shares_vectors:
            query = ops.cast(tokens.query, rule.compute_dtype)
            self.query = order.arrange(query)
        self.mask = combine_masks(
            order.window_mask(window, rule.nearest),
            segment_mask(
                inputs.segments,
                lambda x: tensors.gather_entries(x, order.tokens, self._length),
                lambda x: self._entries(x)[..., 0, :],
            ),
            self._entries(inputs.value_mask) if rule.key_shift else None,
        )
        self.bias = self._entries(inputs.token_bias)
        self.distances = {"offset": order.window_offset(window)}

    def read(self, x):
        """From entries of keys, `[B, H, L, D]`, to what chunks read."""
        return self.order.windows(self.order.arrange(x), self._window)

    def _entries(self, x):
        """Returns a mask or bias of positions for each window, or None."""
        if x is None:
            return None
        entries = tensors.gather_entries(x, self.order.tokens, self._length)
        windows = self.order.windows(entries[..., None], self._window)
        return ops.swapaxes(windows, -1, -2)


class ClusterReads:
    """Ranges of members of clusters, and the queries that read them.

    In the order of clusters, a query sees one range of keys of a cluster. Queries whose
    ranges end in the same chunk of keys are grouped, so that they read the same chunks.

    Args:
        clusters: `<int32>[B, H, L]`, those of keys.
        num_clusters: number of clusters, including that of padding.
        read: `<int32>[B, H, Q]`, the cluster that each query reads.
        ends: `<int32>[B, H, Q]`, the rank in its cluster after the last key that a
            query sees.
        asks: `<bool>[B, H, Q]`, False for queries that read nothing; None for none.
        window: how many members a query sees at most.
        leaves_out: whether queries that read nothing, which see no key either, may
            share a slot. Defaults to False.

    Attributes:
        keys: `ClusterOrder` of the keys.
        order: `ClusterOrder` of the queries.
        last: `<int32>[B, H, N]`, the last chunk of keys that each chunk of queries
            reads.
    """

    def __init__(
        self, clusters, num_clusters, read, ends, asks, window, leaves_out=False
    ):
        size = chunk_size_for(window)
        self.keys = ClusterOrder(clusters, num_clusters, size)
        last = ops.maximum(ends - 1, 0) // size
        last = entries_at(self.keys.first_chunk, read) + last
        num_chunks = self.keys.num_chunks
        last = ops.minimum(last, num_chunks - 1)
        if asks is not None:
            last = ops.where(asks, last, num_chunks)
            num_chunks += 1
        self.order = ClusterOrder(last, num_chunks, max(size, MIN_READS_OF_CHUNK))
        # Functions traced for batches of any size are often exported, too.
        if leaves_out and is_known(*last.shape) and backends.may_follow_data():
            self.order.leave_out_last()
        last = ops.minimum(self.order.cluster_of_chunk, self.keys.num_chunks - 1)
        self.last = last
        num_back = -(-(window - 1) // size)
        self._back = num_back - numbers(num_back + 1)
        # The last of them holds the ends of the ranges.
        self._chunks = last[..., None] - self._back

    def read(self, x):
        """From entries of keys, `[B, H, L, D]`, to what chunks read."""
        return self._of_chunks(self.keys.arrange(x))

    def ranks(self):
        """Ranks of keys in the cluster of the last one, `<int32>[B, H, N, 1, S]`.

        They are negative for chunks of earlier clusters.
        """
        size = self.keys.chunk_size
        last = ops.maximum(self._chunks[..., -1], 0)
        chunk = entries_at(self.keys.rank_of_chunk, last)[..., None] - self._back
        ranks = chunk[..., None] * size + numbers(size)
        batch, heads, num_chunks, rows, _ = ops.shape(ranks)
        return ops.reshape(ranks, (batch, heads, num_chunks, 1, rows * size))

    def of_queries(self, x):
        """From `[B, H, Q]` to `[B, H, N, C]`."""
        return self.order.arrange(x[..., None])[..., 0]

    def _of_chunks(self, chunks):
        """Returns what chunks of queries read; anything where no key is visible.

        From `[B, H, chunks of keys, C, D]` to `[B, H, N, S, D]`.
        """
        batch, heads, num_chunks, slots, dim = ops.shape(chunks)
        rows = ops.reshape(chunks, (batch, heads, num_chunks, slots * dim))
        rows = tensors.gather(rows, ops.maximum(self._chunks, 0))
        num_rows = self._chunks.shape[-1]
        shape = (batch, heads, length_of(self._chunks, 2), num_rows * slots, dim)
        return ops.reshape(rows, shape)


class OfQueries(ClusterReads):
    """Queries that choose the clusters that they read.

    A query that reads several clusters occurs once for each of them. Relative positions
    are the rank of a member minus the number of members before the token, so only the
    token itself has the position 0.

    Args and attributes: as of `OfTokens`.
    """

    def __init__(self, rule, tokens, window):
        inputs, length = tokens.inputs, tokens.length
        self._window, self._length = window, length
        self._num_reads = rule.num_reads
        self._lay_out(rule, tokens)
        query = self._for_each_read(ops.cast(tokens.query, rule.compute_dtype))
        self.query = self.order.arrange(query)
        self.key = self.read(ops.cast(tokens.key, rule.compute_dtype))
        self.mask = combine_masks(
            self._visible(),
            self._entries(inputs.value_mask),
            segment_mask(
                inputs.segments,
                lambda x: tensors.gather_entries(x, self.order.tokens % length, length),
                lambda x: self._entries(x)[..., 0, :],
            ),
        )
        self.bias = self._entries(inputs.token_bias)
        distances = self.ranks() - self.of_queries(self._num_earlier)[..., None]
        self.distances = {"distances": distances}

    def _lay_out(self, rule, tokens):
        """Finds the chunks of keys, and those that each chunk of queries reads."""
        inputs = tokens.inputs
        clusters, count = tokens.of_keys.apart_from_padding(inputs.key_mask)
        read = tokens.of_queries.best(self._num_reads)
        # The reads of all queries, one after the other.
        read = ops.concatenate(ops.unstack(read, axis=-1), axis=-1)
        self.clusters, self.num_clusters, self.asked = clusters, count, read
        self._num_earlier, own = rule.num_keys(clusters, read, count)
        self.ends = self._num_earlier if rule.key_shift else self._num_earlier + own
        asks = inputs.query_mask
        asks = None if asks is None else self._for_each_read(asks)
        super().__init__(clusters, count, read, self.ends, asks, self._window)

    def joined(self, output, logsumexp):
        """Joins the results of the reads of each token into one softmax.

        From `<float>[B, H, N, C, D]` and `<float32>[B, H, N, C]` to `[B, H, L, D]`.
        """
        output, logsumexp = (
            ops.stack(ops.split(self.order.restore(x), self._num_reads, axis=2), 3)
            for x in (output, logsumexp[..., None])
        )
        return joined_parts(output, logsumexp[..., 0])

    def _for_each_read(self, x):
        """From tokens, `[B, H, L, ...]`, to queries, `[B, H, Q, ...]`."""
        return ops.concatenate([x] * self._num_reads, axis=2)

    def _entries(self, x):
        """Returns a mask or bias of positions, `[B, H, N, 1, S]`; or None."""
        if x is None:
            return None
        entries = tensors.gather_entries(x, self.keys.tokens, self._length)
        return ops.swapaxes(self._of_chunks(entries[..., None]), -1, -2)

    def _visible(self):
        """Returns which keys each query sees, `<bool>[B, H, N, C, S]`."""
        ranks, ends = self.ranks(), self.of_queries(self.ends)[..., None]
        near = ops.logical_and(ranks < ends, ranks >= ends - self._window)
        return ops.logical_and(near, ranks >= 0)
