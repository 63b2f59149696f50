"""Attention to the members of the best cluster in another sequence."""

from keras import ops

from routing_tf.layers.caches import rows
from routing_tf.layers.routing.cluster_order import ClusterOrder
from routing_tf.layers.routing.cluster_order import chunk_size_for
from routing_tf.layers.routing.rule import Rule
from routing_tf.layers.support import backends
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import without_padding
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers


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
