"""Attention to the last members of a token's cluster: strictly causal."""

from keras import ops

from routing_tf.layers.caches import pending_keys
from routing_tf.layers.caches import rows
from routing_tf.layers.routing import rings
from routing_tf.layers.routing import splash_attention
from routing_tf.layers.routing.arrangements import OfQueries
from routing_tf.layers.routing.arrangements import OfTokens
from routing_tf.layers.routing.cluster_blocks import ClusterBlocks
from routing_tf.layers.routing.cluster_blocks import block_size_for
from routing_tf.layers.routing.cluster_order import chunk_size_for
from routing_tf.layers.routing.rule import Rule
from routing_tf.layers.softmax import fused_attention
from routing_tf.layers.support import backends
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.tensors import is_known

# Blocks of first members are worthwhile up to this many windows of members of a
# cluster.
MOST_WINDOWS = 2


class LastMembers(Rule):
    """Attention of each token to the last members of its cluster, itself included.

    A token has one cluster. If queries choose separately, or read several clusters, see
    `OfQueries`. With shifted keys, a token reads the values that follow the last
    members before it. Relative positions are differences of rank in the cluster.
    Padding belongs to an extra cluster that nobody reads, and gets zero. The work is
    `(L + K * C) * (W + C)` pairs, linear in the length. A cache contains the last
    members of each cluster, so its size does not grow with long contexts.
    """

    tokens_choose = True
    remembers_scores = False

    #: Whether a token sees itself in a step if it is in the cluster that it reads.
    sees_itself = True

    def __init__(self, group):
        super().__init__(group)
        self.num_reads = group.clusters_per_query
        # Of each cluster that a query reads.
        self.window = group.attention_window // self.num_reads
        self.reads_own = not group.routes_queries
        self.attention_implementation = group.attention_implementation
        # Rank of the nearest visible member, counted back; 0 for the token itself.
        self.nearest = self.key_shift

    def attend(self, tokens, training=None):
        by_kernel = False
        if self.attention_implementation != "plain":
            by_kernel = self._takes_kernel(tokens, training)
        window = self.window_in(tokens.query)
        if not tokens.shares_clusters or self.num_reads > 1:
            output = self.attend_in(OfQueries(self, tokens, window), tokens, training)
        elif by_kernel:
            output = self._attend_by_kernel(tokens, window)
        elif self.fits_blocks(tokens, window, training):
            output = self._attend_in_blocks(tokens, window, training)
        else:
            output = self.attend_in(OfTokens(self, tokens, window), tokens, training)
        return tokens.inputs.without_padding(output)

    def attend_in(self, arranged, tokens, training):
        """Attends in chunks; returns `<float>[B, H, L, D]`.

        Args:
            arranged: the `OfTokens` or `OfQueries` of these tokens.
            tokens: `RoutedTokens`.
            training: whether dropout is on.
        """
        joins_reads = self.num_reads > 1
        results = self.dot_product(
            arranged.query,
            arranged.key,
            arranged.read(tokens.inputs.value),
            attention_mask=arranged.mask,
            bias=arranged.bias,
            training=training,
            return_logsumexp=joins_reads,
            **arranged.distances,
        )
        if joins_reads:
            return arranged.joined(*results)
        return arranged.order.restore(results)

    def num_keys(self, clusters, read, num_clusters):
        """Counts the keys of earlier tokens in the cluster that each query reads.

        Args:
            clusters: `<int32>[B, H, L]`, those of keys.
            read: `<int32>[B, H, Q]`, the reads of all queries, one after the other.
            num_clusters: number of clusters.

        Returns:
            These numbers, and those of the token's own keys, both `<int32>[B, H, Q]`.
        """
        chosen = backends.one_hot(clusters, num_clusters, dtype="int32")
        earlier = ops.cumsum(chosen, axis=2) - chosen
        batch, heads, length = ops.shape(clusters)
        num_reads = self.num_reads
        read = ops.reshape(read, (batch, heads, num_reads, length))
        read = ops.swapaxes(read, 2, 3)

        def of_queries(x):
            found = ops.swapaxes(ops.take_along_axis(x, read, axis=-1), 2, 3)
            return ops.reshape(found, (batch, heads, num_reads * length))

        return of_queries(earlier), of_queries(chosen)

    def obstacle(self, tokens, training):
        """Returns why a kernel cannot compute the attention, in words; or None."""
        if self.num_reads > 1:
            return "queries read several clusters"
        if not tokens.shares_clusters:
            return "queries choose clusters apart from keys"
        return splash_attention.obstacle(
            self.dot_product, self.compute_dtype, tokens.inputs, training
        )

    def _takes_kernel(self, tokens, training):
        """Whether a kernel computes the attention, which keeps no weights of pairs."""
        implementation = fused_attention.chosen(self.attention_implementation)
        takes_it = implementation == "auto" and splash_attention.is_there()
        if implementation != "splash" and not takes_it:
            return False
        reason = self.obstacle(tokens, training)
        if reason is not None:
            fused_attention.decline(implementation, reason)
        return reason is None

    def _attend_by_kernel(self, tokens, window):
        inputs = tokens.inputs
        clusters, num_clusters = tokens.of_keys.apart_from_padding(inputs.key_mask)
        return splash_attention.attend(
            ops.cast(tokens.query, self.compute_dtype),
            ops.cast(tokens.key, self.compute_dtype),
            inputs.value,
            clusters,
            num_clusters,
            window + self.key_shift,
            self.nearest,
            inputs.value_mask if self.key_shift else None,
        )

    def fits_blocks(self, tokens, window, training):
        """Whether blocks of first members and chunks of later ones are faster."""
        shape = tokens.inputs.value.shape
        # Functions traced for batches of any size are often exported, too.
        if not is_known(*shape) or 0 in shape or not backends.may_follow_data():
            return False
        # With fewer clusters, most members are later ones.
        if shape[2] > MOST_WINDOWS * window * tokens.of_keys.num_clusters:
            return False
        # Chunks do not know heads, and would draw other numbers.
        return not self.dot_product.depends_on_place(training)

    def _attend_in_blocks(self, tokens, window, training):
        inputs, of_keys = tokens.inputs, tokens.of_keys
        clusters, _ = of_keys.apart_from_padding(inputs.key_mask)
        size, count = chunk_size_for(window), of_keys.num_clusters
        block = block_size_for(inputs.value.shape[2], count, window, size)
        blocks = ClusterBlocks(
            clusters,
            count,
            window + self.key_shift,
            block,
            size,
            inputs.key_mask is None,
        )
        key = ops.cast(tokens.key, self.compute_dtype)
        query, later_query, key_windows = blocks.arrange_and_read(key)
        key = query
        if not tokens.shares_vectors:
            query = ops.cast(tokens.query, self.compute_dtype)
            query, later_query = blocks.arrange(query)
        value, _, value_windows = blocks.arrange_and_read(inputs.value)
        mask, later_mask = self._masks_in_blocks(blocks, inputs)
        bias = later_bias = None
        if inputs.token_bias is not None:
            bias, later_bias = blocks.entries(inputs.token_bias)
        first = self.dot_product(
            query,
            key,
            value,
            attention_mask=mask,
            bias=bias,
            use_causal_mask=True,
            training=training,
        )
        later = self.dot_product(
            later_query,
            key_windows,
            value_windows,
            attention_mask=later_mask,
            bias=later_bias,
            offset=blocks.offset,
            training=training,
        )
        return blocks.restore(first, later)

    def _masks_in_blocks(self, blocks, inputs):
        """Returns which keys tokens see, in blocks and in chunks; None for all."""
        mask, later_mask = blocks.mask(self.nearest), blocks.window_mask(self.nearest)
        if self.key_shift:
            real, later_real = blocks.entries(inputs.value_mask)
            mask = combine_masks(mask, real)
            later_mask = combine_masks(later_mask, later_real)
        if inputs.segments is None:
            return mask, later_mask
        keys = blocks.entries(inputs.segments.value)
        first, windows = (x[..., 0, :, None] for x in keys)
        own = first, windows[:, -blocks.chunk_size :]
        own, later_own = (query == key for query, key in zip(own, keys))
        return combine_masks(mask, own), combine_masks(later_mask, later_own)

    def make_cache(self, batch_size, max_length):
        # If a token always sees itself, it is the last one of the window.
        sees_itself = not self.key_shift and self.reads_own and self.num_reads == 1
        num_rows = max(self.window - sees_itself, 1)
        shape = (batch_size, self.num_key_heads, self.num_clusters)
        return {
            **self._no_pending_key(batch_size),
            "rows": rows.empty_rows(self, *shape, num_rows),
            "counts": ops.zeros(shape, "int32"),
        }

    def restart(self, cache):
        counts = ops.zeros_like(cache["counts"])
        return {**pending_keys.forgotten(cache), "counts": counts}

    def fill_cache(self, cache, tokens):
        cache, tokens = self._offered(self.restart(cache), 0, tokens)
        clusters, is_member = joined_cluster(tokens)
        return rings.joined(
            cache,
            clusters[..., None],
            is_member[..., None],
            rows=rows.of_tokens(tokens),
        )

    def step(self, cache, index, tokens):
        if self.key_shift:
            cache, tokens = self._offered(cache, index, tokens)
        clusters, is_member = joined_cluster(tokens)
        new_rows = rows.of_tokens(tokens)
        _, seen = self.next_members(cache, tokens, clusters, is_member, new_rows)
        output = rows.attend_to_rows(self, *seen)[..., 0, :]
        cache = rings.joined(
            cache, clusters[..., None], is_member[..., None], rows=new_rows
        )
        return tokens.inputs.without_padding(output), cache

    def next_members(self, cache, tokens, clusters, is_member, new_rows):
        """Returns the `NextMembers` of tokens, and arguments of `attend_to_rows`."""
        joins = backends.one_hot(clusters, self.num_clusters, dtype="int32")
        joins = joins * ops.cast(is_member, "int32")[..., None]
        read, heads = clusters[..., None], tokens.query.shape[1]
        if self.key_shift or self.num_reads > 1 or not tokens.shares_clusters:
            read = tokens.of_queries.best(self.num_reads)
        if read.shape[1] != heads:
            # where the cluster of the key serves its queries
            read = head_inputs.for_queries(read, heads)
        members = rings.NextMembers(
            cache,
            joins,
            read,
            cache["rows"].shape[3],
            self.window,
            self.key_shift,
            self.sees_itself,
        )
        found = members.rows(cache["rows"], new_rows)
        batch, heads, length, number, size, dim = ops.shape(found)
        flat = (batch, heads, length, number * size)
        seen = (
            ops.cast(tokens.query, self.compute_dtype)[:, :, :, None],
            ops.reshape(found, (*flat, dim)),
            ops.reshape(members.visible, flat)[..., None, :],
            ops.reshape(members.distances, flat)[..., None, :],
        )
        return members, seen


def joined_cluster(tokens):
    """Returns the cluster of each key `<int32>[B, H, T]`, and who is a member."""
    clusters, mask = tokens.of_keys.numbers, tokens.key_mask
    if mask is None:
        return clusters, ops.ones_like(clusters, "bool")
    return clusters, ops.broadcast_to(mask, ops.shape(clusters))
