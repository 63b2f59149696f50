"""Attention to the members of the best cluster in another sequence."""

import numpy as np
from keras import ops

from routing_tf.layers import key_heads
from routing_tf.layers import membership
from routing_tf.layers.cluster_order import ClusterOrder
from routing_tf.layers.cluster_order import chunk_size_for
from routing_tf.layers.decoding import rows
from routing_tf.layers.lengths import length_of
from routing_tf.layers.lengths import numbers
from routing_tf.layers.masks import without_padding
from routing_tf.layers.rules.inside_segments import BestClusterOfSegment
from routing_tf.layers.rules.routed_tokens import own_clusters
from routing_tf.layers.rules.rule import Rule


class BestCluster(Rule):
    """Attention of each query to the members of its best cluster in the memory.

    The clusters choose their members from the memory. Each query goes to its best
    cluster independently, so no query depends on another one. Relative positions are
    the rank of a key among the members minus that of the query among the queries of the
    cluster. Padding gets zero. For steps the members are arranged once.
    """

    def in_segments(self):
        return BestClusterOfSegment(self.group)

    def attend(self, tokens, training=None):
        inputs = tokens.inputs
        members, filled = self.group.choose(
            tokens.key_scores, tokens.key_mask, training=training
        )
        clusters, num_clusters = own_clusters(tokens.query_scores, inputs.query_mask)
        window = self.group.known_window(length_of(tokens.key, 2))
        chunk_size = chunk_size_for(window)
        order = ClusterOrder(clusters, num_clusters, chunk_size)
        # Padding may read anything.
        read = ops.minimum(order.cluster_of_chunk, tokens.num_clusters - 1)
        members = membership.gather(members, read)
        if filled is not None:
            filled = membership.gather(filled, read)
        key = ops.cast(tokens.key, self.group.compute_dtype)
        output = self.group.dot_product(
            ops.cast(order.arrange(tokens.query), self.group.compute_dtype),
            membership.gather(key, members),
            membership.gather(tokens.value, members),
            attention_mask=self.member_mask(inputs, members, filled),
            bias=self.member_bias(inputs, members),
            distances=_distances(order, length_of(members, -1)),
            training=training,
        )
        return without_padding(order.restore(output), inputs.query_mask)

    def make_memory(self, tokens):
        members, filled = self.group.choose(tokens.key_scores, tokens.key_mask)
        memory = membership.gather(rows.of_tokens(tokens), members)
        if filled is not None:
            real = memory[..., -1:] * ops.cast(filled, memory.dtype)[..., None]
            memory = ops.concatenate([memory[..., :-1], real], axis=-1)
        batch, _, num_clusters, _ = ops.shape(members)
        shape = (batch, self.group.num_heads, num_clusters)
        return {
            "rows": memory,
            "counts": ops.zeros(shape, "int32"),
            "newest": {
                "cluster": ops.zeros(shape[:2], "int32"),
                "position": ops.full(shape[:2], -1, dtype="int32"),
            },
        }

    def restart(self, cache):
        position = cache["newest"]["position"]
        newest = {**cache["newest"], "position": ops.full_like(position, -1)}
        counts = ops.zeros_like(cache["counts"])
        return {**cache, "counts": counts, "newest": newest}

    def step(self, cache, index, tokens):
        newest, counts = cache["newest"], cache["counts"]
        num_clusters = counts.shape[-1]
        is_older = ops.logical_and(newest["position"] >= 0, newest["position"] < index)
        added = ops.one_hot(newest["cluster"], num_clusters, dtype="int32")
        counts = counts + added * ops.cast(is_older, "int32")[..., None]
        cluster = ops.cast(ops.argmax(tokens.query_scores[:, :, 0], axis=-1), "int32")
        num_key_heads = cache["rows"].shape[1]
        members = membership.gather_blocks(
            cache["rows"], key_heads.of_queries(cluster, num_key_heads)
        )
        rank = membership.entries_at(counts, cluster[..., None])
        output = rows.attend_to_rows(
            self.group,
            ops.cast(tokens.query, self.group.compute_dtype),
            key_heads.all_queries(members),
            None,
            np.arange(members.shape[3], dtype="int32") - rank,
        )
        mask = tokens.inputs.query_mask
        position = ops.zeros_like(newest["position"]) + index
        if mask is not None:
            position = ops.where(mask[..., 0], position, -1)
        newest = {"cluster": cluster, "position": position}
        cache = {**cache, "counts": counts, "newest": newest}
        return without_padding(output, mask), cache


def _distances(order, window):
    return numbers(window) - order.ranks()[..., None]
