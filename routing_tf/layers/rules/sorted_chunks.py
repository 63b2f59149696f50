"""Attention in chunks of the sorted tokens, to the own chunk and the one before."""

from keras import ops

from routing_tf.layers import blocks
from routing_tf.layers import membership
from routing_tf.layers.cluster_order import sort_by_cluster
from routing_tf.layers.heads.refusals import refuse_segments
from routing_tf.layers.lengths import length_of
from routing_tf.layers.lengths import numbers
from routing_tf.layers.masks import combine_masks
from routing_tf.layers.masks import without_padding
from routing_tf.layers.rules import rounds
from routing_tf.layers.rules.routed_tokens import own_clusters
from routing_tf.layers.rules.routed_tokens import real_tokens
from routing_tf.layers.rules.rule import Rule


class SortedChunks(Rule):
    """Attention of each token to its chunk of the sorted tokens, and the one before.

    Tokens are sorted by cluster, and by position inside a cluster; a chunk has as many
    tokens as the attention window. Tokens also see tokens of other clusters in these
    chunks. Padding comes last, is never seen and gets zero. The ends of chunks depend
    on all tokens, so there is no causal form. Relative positions are differences of
    place in the order.

    Reference: Kitaev et al., "Reformer: The Efficient Transformer", section 2, the
    sets after equation 5.
    """

    def in_segments(self):
        refuse_segments(
            self.group,
            "without a causal mask, their chunks contain tokens of several segments",
        )

    def attend(self, tokens, training=None):
        if not tokens.shares_scores:
            raise ValueError(
                "`share_query_key` must be True without a causal mask, because queries "
                "and keys form the same chunks. Received: share_query_key=False, "
                "use_causal_mask=False. Pass `use_causal_mask=True`, or leave "
                "`share_query_key` and `hash` out"
            )
        inputs, group = tokens.inputs, self.group
        clusters, num_clusters = own_clusters(tokens.key_scores, inputs.key_mask)
        order = _Order(clusters, num_clusters, group.known_window(tokens.length))
        num_real = tokens.length
        if inputs.key_mask is not None:
            real = ops.cast(inputs.key_mask, "int32")
            num_real = ops.sum(real, axis=-1, keepdims=True)
        chunk = order.places // order.size
        joins = rounds.of_group(
            group,
            order.places,
            ops.maximum(chunk - 1, 0) * order.size,
            ops.minimum((chunk + 1) * order.size, num_real),
        )
        output = rounds.attend(
            group,
            joins,
            order,
            lambda x: order.windows(order.arrange(x)),
            tokens.value,
            self._vectors(tokens, order),
            self._mask(order, num_real),
            self._bias(inputs, order),
            training,
            offset=order.size,
        )
        return without_padding(output, real_tokens(inputs))

    def _vectors(self, tokens, order):
        dtype = self.group.compute_dtype
        key = order.arrange(ops.cast(tokens.key, dtype))
        query = key
        if not tokens.shares_vectors:
            query = order.arrange(ops.cast(tokens.query, dtype))
        return query, order.windows(key)

    def _mask(self, order, num_real):
        """Tells which keys queries see, broadcastable to `[B, F, N, C, S]`."""
        chunks, slots = numbers(order.num_chunks), numbers(order.size)
        places = chunks[:, None] * order.size + numbers(2 * order.size) - order.size
        seen = ops.convert_to_tensor(places >= 0)
        if len(getattr(num_real, "shape", ())):
            num_real = num_real[..., None]
        seen = ops.logical_and(seen, places < num_real)[..., None, :]
        if self.group.attends_to_self:
            return seen
        own = numbers(2 * order.size) == slots[:, None] + order.size
        return combine_masks(seen, ops.logical_not(own))

    def _bias(self, inputs, order):
        if inputs.token_bias is None:
            return None
        length = length_of(inputs.value, 2)
        bias = membership.gather_entries(inputs.token_bias, order.tokens, length)
        bias = blocks.break_into_blocks(bias, order.size, axis=2)
        return ops.swapaxes(order.windows(bias[..., None]), -1, -2)


class _Order:
    """Tokens sorted by cluster, in chunks of one size.

    Attributes:
        size: number of tokens of a chunk.
        num_chunks: number of chunks.
        tokens: `<int32>[B, F, L]`, the token at each place of the order.
        places: `<int32>[B, F, L]`, the place of each token.
    """

    def __init__(self, clusters, num_clusters, size):
        length = length_of(clusters, 2)
        self.size = size
        self.num_chunks = -(-length // size)
        _, self.tokens = sort_by_cluster(clusters, num_clusters)
        self.places = ops.cast(ops.argsort(self.tokens, axis=-1), "int32")

    def arrange(self, x):
        """Puts `[B, F, L, D]` into chunks, `[B, F, N, C, D]`, followed by zeros."""
        x = membership.gather(x, self.tokens)
        return blocks.break_into_blocks(x, self.size, axis=2)

    def windows(self, x):
        """Joins each chunk with the one before it, to `[B, F, N, 2 * C, D]`."""
        return blocks.memory_windows(x, (1,), (0,), axis=2)

    def restore(self, x):
        """Undoes `arrange`."""
        batch, heads, chunks, slots, dim = ops.shape(x)
        x = ops.reshape(x, (batch, heads, chunks * slots, dim))
        return membership.gather(x, self.places)
