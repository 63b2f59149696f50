"""Clusters that choose their members within each segment of packed sequences."""

from keras import ops

from routing_tf.layers.routing import membership
from routing_tf.layers.routing import segment_members
from routing_tf.layers.routing.cluster_order import ranks_in_clusters
from routing_tf.layers.routing.rule import Rule
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import segment_mask
from routing_tf.layers.support.masks import without_padding
from routing_tf.layers.support.tensors import smaller


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
