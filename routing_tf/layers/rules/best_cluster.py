"""Attention to the members of the best cluster in another sequence."""

from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.cluster_order import ClusterOrder
from routing_tf.layers.cluster_order import chunk_size_for
from routing_tf.layers.lengths import length_of
from routing_tf.layers.lengths import numbers
from routing_tf.layers.masks import without_padding
from routing_tf.layers.rules.inside_clusters import member_bias
from routing_tf.layers.rules.inside_clusters import member_mask
from routing_tf.layers.rules.routed_tokens import own_clusters


def attend(group, tokens, training=None):
    """Lets each query attend to the memory's members of its own best cluster.

    The clusters choose their members from the memory; each query goes to its best
    cluster on its own, so no query depends on another one. Relative positions are the
    rank of a key among the members minus that of the query among the queries of the
    cluster. Padding gets zero.

    Args:
        group: the `ClusteredHeads`.
        tokens: `RoutedTokens` of two sequences.
        training: whether dropout is on; None (the default) for no.

    Returns:
        `<float>[B, H, L, D]`.
    """
    inputs = tokens.inputs
    members, belongs = group.choose(
        tokens.key_scores, tokens.key_mask, training=training
    )
    clusters, num_clusters = own_clusters(tokens.query_scores, inputs.query_mask)
    window = group.known_window(length_of(tokens.key, 2))
    chunk_size = chunk_size_for(window)
    order = ClusterOrder(clusters, num_clusters, chunk_size)
    # Padding may read what it likes.
    read = ops.minimum(order.cluster_of_chunk, tokens.num_clusters - 1)
    members = membership.gather(members, read)
    if belongs is not None:
        belongs = membership.gather(belongs, read)
    key = ops.cast(tokens.key, group.compute_dtype)
    output = group.dot_product(
        ops.cast(order.arrange(tokens.query), group.compute_dtype),
        membership.gather(key, members),
        membership.gather(tokens.value, members),
        attention_mask=member_mask(group, inputs, members, belongs),
        bias=member_bias(inputs, members),
        distances=_distances(order, length_of(members, -1)),
        training=training,
    )
    return without_padding(order.restore(output), inputs.query_mask)


def _distances(order, window):
    return numbers(window) - order.ranks()[..., None]
