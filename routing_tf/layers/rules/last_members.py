"""Attention to the last members of a token's cluster: strictly causal."""

from keras import ops

from routing_tf.layers import backends
from routing_tf.layers import data_shapes
from routing_tf.layers import fused_attention
from routing_tf.layers import key_heads
from routing_tf.layers import splash_attention
from routing_tf.layers.cluster_blocks import ClusterBlocks
from routing_tf.layers.cluster_blocks import block_size_for
from routing_tf.layers.cluster_order import ClusterOrder
from routing_tf.layers.cluster_order import chunk_size_for
from routing_tf.layers.cluster_order import ranks_in_clusters
from routing_tf.layers.decoding import rows
from routing_tf.layers.lengths import is_known
from routing_tf.layers.lengths import length_of
from routing_tf.layers.masks import combine_masks
from routing_tf.layers.masks import without_padding
from routing_tf.layers.membership import gather_entries
from routing_tf.layers.rules import members_of_query
from routing_tf.layers.rules import rings
from routing_tf.layers.rules import rounds
from routing_tf.layers.rules.next_members import NextMembers
from routing_tf.layers.rules.routed_tokens import best_clusters
from routing_tf.layers.rules.routed_tokens import own_clusters
from routing_tf.layers.rules.routed_tokens import real_tokens
from routing_tf.layers.rules.rule import Rule
from routing_tf.layers.segments import segment_mask

# Blocks of first members are worthwhile up to this many windows of members of a
# cluster.
MOST_WINDOWS = 2


class LastMembers(Rule):
    """Attention of each token to the last members of its cluster, itself included.

    A token has one cluster. If queries choose separately, or read several clusters, see
    `members_of_query`. With shifted keys, a token reads the values that follow the last
    members before it. Relative positions are differences of rank in the cluster.
    Padding belongs to an extra cluster that nobody reads, and gets zero. The work is
    `(L + K * C) * (W + C)` pairs, linear in the length. A cache contains the last
    members of each cluster, so its size does not grow with long contexts.
    """

    tokens_choose = True

    def attend(self, tokens, training=None):
        by_kernel = self._takes_kernel(tokens, training)
        if not tokens.shares_scores or self.group.clusters_per_query > 1:
            return members_of_query.attend(self.group, tokens, training)
        inputs = tokens.inputs
        clusters, num_clusters = own_clusters(tokens.key_scores, inputs.key_mask)
        window = self.group.known_window(tokens.length // tokens.num_copies)
        if by_kernel:
            return self._attend_by_kernel(tokens, clusters, num_clusters, window)
        joins = self._rounds(clusters, num_clusters, window, inputs.segments)
        if joins is None and self._fits_blocks(tokens, window, training):
            all_have_one = num_clusters == tokens.num_clusters
            blocks = self._blocks(tokens, clusters, window, all_have_one)
            return self._attend_in_blocks(tokens, blocks, training)
        order = ClusterOrder(clusters, num_clusters, chunk_size_for(window))
        key = order.arrange(ops.cast(tokens.key, self.group.compute_dtype))
        query = key
        if not tokens.shares_vectors:
            query = order.arrange(ops.cast(tokens.query, self.group.compute_dtype))
        # The token itself is in its window, whether it sees itself or not.
        window += self.group.key_shift
        mask = combine_masks(
            order.window_mask(window, self._nearest),
            segment_mask(
                inputs.segments,
                lambda x: gather_entries(x, order.tokens, tokens.length),
                lambda x: _entries(x, inputs, order, window)[..., 0, :],
            ),
        )
        if self.group.key_shift:
            mask = combine_masks(
                mask, _entries(inputs.value_mask, inputs, order, window)
            )
        output = rounds.attend(
            self.group,
            joins,
            order,
            lambda x: order.windows(order.arrange(x), window),
            tokens.value,
            (query, order.windows(key, window)),
            mask,
            _entries(inputs.token_bias, inputs, order, window),
            training,
            offset=order.window_offset(window),
        )
        return without_padding(output, real_tokens(inputs))

    def _takes_kernel(self, tokens, training):
        """Whether a kernel computes the attention, which keeps no weights of pairs."""
        implementation = fused_attention.chosen(self.group.attention_implementation)
        takes_it = implementation == "auto" and splash_attention.is_there()
        if implementation != "splash" and not takes_it:
            return False
        reason = splash_attention.obstacle(self.group, tokens.inputs, training)
        if not tokens.shares_scores:
            reason = "queries choose clusters apart from keys"
        if self.group.clusters_per_query > 1:
            reason = "queries read several clusters"
        if reason is not None:
            fused_attention.decline(implementation, reason)
        return reason is None

    def _attend_by_kernel(self, tokens, clusters, num_clusters, window):
        group, inputs = self.group, tokens.inputs
        query, key = (
            ops.cast(x, group.compute_dtype) for x in (tokens.query, tokens.key)
        )
        output = splash_attention.attend(
            query,
            key,
            tokens.value,
            clusters,
            num_clusters,
            window + group.key_shift,
            self._nearest,
            inputs.value_mask if group.key_shift else None,
        )
        return without_padding(output, real_tokens(inputs))

    @property
    def _nearest(self):
        """Rank of the nearest visible member, counted back; 0 for the token itself."""
        sees_itself = not self.group.key_shift and self.group.attends_to_self
        return int(not sees_itself)

    def _fits_blocks(self, tokens, window, training):
        """Whether blocks of first members and chunks of later ones are faster."""
        group = self.group
        # Functions traced for batches of any size are often exported, too.
        if not is_known(*tokens.value.shape) or not data_shapes.may_follow_data():
            return False
        if 0 in tokens.value.shape:
            return False
        if group.entmax_alpha == "learned" or (group.dropout and training):
            return False  # Chunks do not know heads, and would draw other numbers.
        # With fewer clusters, most members are later ones.
        return tokens.length <= MOST_WINDOWS * window * tokens.num_clusters

    def _blocks(self, tokens, clusters, window, all_have_one):
        size, count = chunk_size_for(window), tokens.num_clusters
        block = block_size_for(tokens.length, count, window, size)
        window += self.group.key_shift
        return ClusterBlocks(clusters, count, window, block, size, all_have_one)

    def _attend_in_blocks(self, tokens, blocks, training):
        group, inputs = self.group, tokens.inputs
        key = ops.cast(tokens.key, group.compute_dtype)
        query, later_query, key_windows = blocks.arrange_and_read(key)
        key = query
        if not tokens.shares_vectors:
            query = ops.cast(tokens.query, group.compute_dtype)
            query, later_query = blocks.arrange(query)
        value, _, value_windows = blocks.arrange_and_read(tokens.value)
        value_mask = inputs.value_mask if group.key_shift else None
        mask, later_mask = blocks.entries(value_mask)
        bias, later_bias = blocks.entries(inputs.token_bias)
        own, later_own = _own_segments(blocks, inputs.segments)
        first = group.dot_product(
            query,
            key,
            value,
            attention_mask=combine_masks(blocks.mask(self._nearest), mask, own),
            bias=bias,
            use_causal_mask=True,
            training=training,
        )
        later = group.dot_product(
            later_query,
            key_windows,
            value_windows,
            attention_mask=combine_masks(
                blocks.window_mask(self._nearest), later_mask, later_own
            ),
            bias=later_bias,
            offset=blocks.offset,
            training=training,
        )
        output = blocks.restore(first, later)
        return without_padding(output, real_tokens(inputs))

    def _rounds(self, clusters, num_clusters, window, segments):
        if not self.group.joins_rounds:
            return None
        ranks = ranks_in_clusters(clusters, num_clusters)
        places = clusters * rounds.stride(self.group.num_clusters) + ranks
        ends = ranks + 1 - self.group.key_shift
        first, end = rounds.range_of_bucket(
            clusters, ends, window, self.group.num_clusters
        )
        if segments is not None:
            starts = ops.broadcast_to(segments.query_starts, ops.shape(clusters))
            first_own = places - ranks_in_clusters(clusters, num_clusters, starts)
            first = ops.maximum(first, first_own)
        return rounds.of_group(self.group, places, first, end)

    def make_cache(self, batch_size, max_length):
        group = self.group
        # If a token always sees itself, it is the last one of the window.
        sees_itself = not group.key_shift and not group.routes_queries
        sees_itself = sees_itself and group.clusters_per_query == 1
        num_rows = max(group.members_per_cluster - sees_itself, 1)
        shape = (batch_size, group.num_key_heads * group.num_rounds, group.num_clusters)
        cache = self._no_pending_key(batch_size)
        if group.num_rounds > 1:
            # Where the keys of the rows stand in every round.
            places = (*shape, num_rows, group.num_rounds)
            cache["places"] = ops.zeros(places, "int32")
        return {
            **cache,
            "rows": rows.empty_rows(group, *shape, num_rows),
            "counts": ops.zeros(shape, "int32"),
        }

    def restart(self, cache):
        cache = self._restarted(cache)
        return {**cache, "counts": ops.zeros_like(cache["counts"])}

    def fill_cache(self, cache, tokens):
        cache, tokens = self._offered(self.restart(cache), 0, tokens)
        clusters, is_member = _joined_cluster(tokens)
        new = {"rows": rows.of_tokens(tokens)}
        if "places" in cache:
            members = ops.where(is_member, clusters, tokens.num_clusters)
            places = members * rounds.stride(tokens.num_clusters)
            places = places + ranks_in_clusters(members, tokens.num_clusters + 1)
            new["places"] = rounds.of_each_round(places, self.group.num_rounds)
        return rings.joined(cache, clusters[..., None], is_member[..., None], **new)

    def step(self, cache, index, tokens):
        group, inputs = self.group, tokens.inputs
        if group.key_shift:
            cache, tokens = self._offered(cache, index, tokens)
        clusters, is_member = _joined_cluster(tokens)
        joins = backends.one_hot(clusters, group.num_clusters, dtype="int32")
        joins = joins * ops.cast(is_member, "int32")[..., None]
        read = best_clusters(tokens.query_scores, group.clusters_per_query)
        members = NextMembers(
            cache,
            joins,
            # where the cluster of the key serves its queries
            key_heads.for_queries(read, tokens.query.shape[1]),
            cache["rows"].shape[3],
            group.members_per_cluster,
            group.key_shift,
            group.attends_to_self,
        )
        new = {"rows": rows.of_tokens(tokens)}
        seen = (
            ops.cast(tokens.query, group.compute_dtype)[:, :, :, None],
            _in_one_list(members.rows(cache["rows"], new["rows"])),
            _in_one_list(members.visible)[..., None, :],
            _in_one_list(members.distances)[..., None, :],
        )
        if group.joins_rounds:
            output, new["places"] = self._step_in_rounds(
                cache, clusters, joins, members, seen, inputs.value
            )
        else:
            output = rows.attend_to_rows(group, *seen)[..., 0, :]
        if "places" not in cache:
            new = {"rows": new["rows"]}
        cache = rings.joined(cache, clusters[..., None], is_member[..., None], **new)
        return without_padding(output, real_tokens(inputs)), cache

    def _step_in_rounds(self, cache, clusters, joins, members, seen, value):
        """Attends with tokens whose rounds are joined.

        Returns the output, and where the keys stand in all rounds.
        """
        group, bias = self.group, None
        ranks = cache["counts"][:, :, None] + ops.cumsum(joins, axis=2) - joins
        ranks = ops.take_along_axis(ranks, clusters[..., None], axis=-1)[..., 0]
        first, end = rounds.range_of_bucket(
            members.read[..., 0],
            members.ends[..., 0],
            group.attention_window,
            group.num_clusters,
        )
        places = clusters * rounds.stride(group.num_clusters) + ranks
        own = rounds.of_group(group, places, first, end)
        if "places" in cache:
            places = _in_one_list(members.rows(cache["places"], own.places))
            bias = own.bias(places, own.ranges[..., None, :])
        output, logsumexp = rows.attend_to_rows(
            group, *seen, bias=bias, return_logsumexp=True
        )
        output = own.joined(output[..., 0, :], logsumexp[..., 0], value)
        return output, own.places


def _joined_cluster(tokens):
    """Returns the best cluster of each key `<int32>[B, H, T]`, and who is a member."""
    clusters, mask = best_clusters(tokens.key_scores, 1)[..., 0], tokens.key_mask
    if mask is None:
        return clusters, ops.ones_like(clusters, "bool")
    return clusters, ops.broadcast_to(mask, ops.shape(clusters))


def _in_one_list(x):
    """From `[B, H, T, N, S, ...]` to `[B, H, T, N * S, ...]`."""
    batch, heads, length, number, size, *rest = ops.shape(x)
    return ops.reshape(x, (batch, heads, length, number * size, *rest))


def _own_segments(blocks, segments):
    """Tells which keys are in a token's segment, in blocks and in chunks.

    Returns `<bool>[B, H, K, T, T]` and `<bool>[N, C, S]`, or None for both.
    """
    if segments is None:
        return None, None
    keys = blocks.entries(segments.value)
    first, windows = (x[..., 0, :, None] for x in keys)
    own = first, windows[:, -blocks.chunk_size :]
    return [query == key for query, key in zip(own, keys)]


def _entries(x, inputs, order, window):
    """Returns a mask or bias of positions for each window, or None."""
    if x is None:
        return None
    entries = gather_entries(x, order.tokens, length_of(inputs.value, 2))
    return ops.swapaxes(order.windows(entries[..., None], window), -1, -2)
