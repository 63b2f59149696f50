"""Attention inside clusters, within segments too, and to those of another sequence."""

from keras import ops

from routing_tf.layers.caches import rows
from routing_tf.layers.routing import membership
from routing_tf.layers.routing import segment_members
from routing_tf.layers.routing.cluster_order import ClusterOrder
from routing_tf.layers.routing.cluster_order import chunk_size_for
from routing_tf.layers.routing.cluster_order import ranks_in_clusters
from routing_tf.layers.routing.rule import Rule
from routing_tf.layers.support import backends
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import segment_mask
from routing_tf.layers.support.masks import without_padding
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import smaller


class InsideClusters(Rule):
    """Attention of the members of each cluster to each other.

    A token's results are averaged over its clusters; a token in no cluster gets zero.
    Members are chosen from the whole sequence.

    Reference: `clustered_local_attention_helper` of the release.
    """

    def __init__(self, group):
        super().__init__(group)
        self.choose = group.choose

    def compares_ranks(self, tokens):
        """Returns whether a causal mask may compare ranks instead of positions."""
        return tokens.shares_vectors

    def attend(self, tokens, training=None):
        members, filled = self.choose(
            tokens.of_keys, tokens.key_mask, training=training
        )
        key = tensors.gather(ops.cast(tokens.key, self.compute_dtype), members)
        value = tensors.gather(tokens.inputs.value, members)
        query, query_members, query_filled = key, members, filled
        if not tokens.shares_vectors:
            query_members, query_filled = self.choose(
                tokens.of_queries, tokens.query_mask, training=training
            )
            query = ops.cast(tokens.query, self.compute_dtype)
            query = tensors.gather(query, query_members)
        in_order = self.compares_ranks(tokens)
        is_causal = tokens.inputs.use_causal_mask
        mask = self.member_mask(tokens.inputs, members, filled)
        if is_causal and not in_order:
            last = query_members[..., :, None] - self.key_shift
            mask = combine_masks(mask, members[..., None, :] <= last)
        elif self.key_shift:
            # A token does not see its own key.
            places = numbers(length_of(members, -1))
            mask = combine_masks(mask, places[:, None] != places)
        output = self.dot_product(
            query,
            key,
            value,
            attention_mask=mask,
            bias=self.member_bias(tokens.inputs, members),
            use_causal_mask=is_causal and in_order,
            training=training,
        )
        return membership.scatter_mean(
            output,
            query_members,
            tokens.length,
            query_filled,
            self.count_offset,
        )


class InsideSegments(Rule):
    """Attention of the members of a cluster in a segment to each other.

    The same as `InsideClusters`, for each segment of a sequence. The number of segments
    depends on the data, so each cluster has room for all tokens: the work is
    `3 * L * K * W` pairs, where W is the attention window.
    """

    def __init__(self, group):
        super().__init__(group)
        self.choose_in_segments = group.choose_in_segments

    def attend(self, tokens, training=None):
        segments, shift = tokens.inputs.segments, self.key_shift
        size = smaller(self.window, tokens.length)
        members, filled = keys = self._lists(tokens, "key", training)
        asking, asks = keys
        if not tokens.shares_clusters:
            asking, asks = self._lists(tokens, "query", training)

        def cut(x):
            return _joined(tensors.break_into_blocks(x, size, axis=3))

        def read(x):
            x = tensors.break_into_blocks(x, size, axis=3)
            return _joined(tensors.memory_windows(x, (1,), (1,), axis=3))

        def of_clusters(x):
            return ops.repeat(x[:, :, None], self.num_clusters, axis=2)

        own = segment_mask(
            segments, lambda x: cut(of_clusters(x)), lambda x: read(of_clusters(x))
        )
        last = cut(asking)[..., :, None] - shift
        is_causal = tokens.inputs.use_causal_mask
        earlier = read(members)[..., None, :] <= last if is_causal else None
        bias = self.member_bias(tokens.inputs, members)
        if bias is not None:
            bias = read(bias[:, :, :, 0])[..., None, :]
        real = self.member_mask(tokens.inputs, members, filled)[:, :, :, 0]
        output = self.dot_product(
            cut(self._gathered(tokens.query, asking)),
            read(self._gathered(tokens.key, members)),
            read(tensors.gather(tokens.inputs.value, members)),
            attention_mask=combine_masks(own, read(real)[..., None, :], earlier),
            bias=bias,
            offset=size,
            training=training,
        )
        shape = (*ops.shape(members)[:3], -1, *ops.shape(output)[3:])
        output = ops.reshape(output, shape)
        output = tensors.put_back_blocks(output, tokens.length, axis=3)
        return membership.scatter_mean(
            output, asking, tokens.length, asks, self.count_offset
        )

    def _lists(self, tokens, name, training):
        found, mask = tokens.of_keys, tokens.key_mask
        if name == "query":
            found, mask = tokens.of_queries, tokens.query_mask
        starts = tokens.inputs.segments.query_starts
        is_member = self.choose_in_segments(found, starts, mask, training)
        return segment_members.lists(is_member, starts)

    def _gathered(self, x, members):
        return tensors.gather(ops.cast(x, self.compute_dtype), members)


class BestClusterOfSegment(Rule):
    """Attention of each query to the members of its best cluster in one segment.

    The same as `BestCluster`, for the segment of another sequence that a query sees.
    The work is that of full attention. Relative positions are ranks in the segments.
    """

    def __init__(self, group):
        super().__init__(group)
        self.choose_in_segments = group.choose_in_segments
        self.max_relative_position = group.max_relative_position

    def attend(self, tokens, training=None):
        inputs, segments = tokens.inputs, tokens.inputs.segments
        is_member = self.choose_in_segments(
            tokens.of_keys, segments.value_starts, tokens.key_mask, training
        )
        clusters, num_clusters = tokens.of_queries.apart_from_padding(inputs.query_mask)
        # Padding may read anything.
        read = ops.minimum(clusters, self.num_clusters - 1)
        distances = None
        if self.max_relative_position is not None:
            starts = ops.broadcast_to(segments.query_starts, ops.shape(clusters))
            ranks = ranks_in_clusters(clusters, num_clusters, starts)
            key_ranks = segment_members.ranks_of_members(
                is_member, segments.value_starts
            )
            distances = tensors.gather(key_ranks, read) - ranks[..., None]
        mask, bias = (
            None if x is None else x[:, :, None]
            for x in (inputs.value_mask, inputs.token_bias)
        )
        output = self.dot_product(
            ops.cast(tokens.query, self.compute_dtype),
            ops.cast(tokens.key, self.compute_dtype),
            inputs.value,
            attention_mask=combine_masks(
                tensors.gather(is_member, read),
                segment_mask(segments, lambda x: x, lambda x: x),
                mask,
            ),
            bias=bias,
            distances=distances,
            training=training,
        )
        return without_padding(output, inputs.query_mask)


def _joined(x):
    """Joins the blocks of all clusters, `[B, H, K, N, ...]`, in one axis."""
    batch, heads, clusters, num_blocks, *rest = ops.shape(x)
    return ops.reshape(x, (batch, heads, clusters * num_blocks, *rest))


class BestCluster(Rule):
    """Attention of each query to the members of its best cluster in the memory.

    The clusters choose their members from the memory. Each query goes to its best
    cluster independently, so no query depends on another one. Relative positions are
    the rank of a key among the members minus that of the query among the queries of the
    cluster. Padding gets zero. For steps the members are arranged once.
    """

    def __init__(self, group):
        super().__init__(group)
        self.choose = group.choose

    def attend(self, tokens, training=None):
        inputs = tokens.inputs
        members, filled = self.choose(
            tokens.of_keys, tokens.key_mask, training=training
        )
        clusters, num_clusters = tokens.of_queries.apart_from_padding(inputs.query_mask)
        chunk_size = chunk_size_for(self.window_in(tokens.key))
        order = ClusterOrder(clusters, num_clusters, chunk_size)
        # Padding may read anything.
        read = ops.minimum(order.cluster_of_chunk, self.num_clusters - 1)
        members = tensors.gather(members, read)
        if filled is not None:
            filled = tensors.gather(filled, read)
        key = ops.cast(tokens.key, self.compute_dtype)
        output = self.dot_product(
            ops.cast(order.arrange(tokens.query), self.compute_dtype),
            tensors.gather(key, members),
            tensors.gather(inputs.value, members),
            attention_mask=self.member_mask(inputs, members, filled),
            bias=self.member_bias(inputs, members),
            distances=numbers(length_of(members, -1)) - order.ranks()[..., None],
            training=training,
        )
        return without_padding(order.restore(output), inputs.query_mask)

    def make_memory(self, tokens):
        members, filled = self.choose(tokens.of_keys, tokens.key_mask)
        memory = tensors.gather(rows.of_tokens(tokens), members)
        if filled is not None:
            real = memory[..., -1:] * ops.cast(filled, memory.dtype)[..., None]
            memory = ops.concatenate([memory[..., :-1], real], axis=-1)
        batch, _, num_clusters, _ = ops.shape(members)
        shape = (batch, self.num_heads, num_clusters)
        return {"rows": memory, "counts": ops.zeros(shape, "int32")}

    def restart(self, cache):
        return {**cache, "counts": ops.zeros_like(cache["counts"])}

    def step(self, cache, index, tokens):
        mask, num_key_heads = tokens.inputs.query_mask, cache["rows"].shape[1]
        clusters = tokens.of_queries.numbers
        members = tensors.gather_blocks(
            cache["rows"], head_inputs.of_queries(clusters, num_key_heads)
        )
        asks = backends.one_hot(clusters, self.num_clusters, dtype="int32")
        if mask is not None:
            asks = asks * ops.cast(mask, "int32")[..., None]
        # Earlier queries of each cluster, those of this call included.
        counts = cache["counts"][:, :, None] + ops.cumsum(asks, axis=2)
        ranks = ops.take_along_axis(counts - asks, clusters[..., None], axis=-1)
        output = rows.attend_to_rows(
            self,
            ops.cast(tokens.query, self.compute_dtype)[:, :, :, None],
            head_inputs.all_queries(members),
            None,
            (numbers(members.shape[4]) - ranks)[:, :, :, None],
        )
        output = without_padding(output[:, :, :, 0], mask)
        return output, {**cache, "counts": counts[:, :, -1]}
