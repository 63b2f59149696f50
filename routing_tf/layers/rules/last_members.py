"""Attention to the last members of a token's own cluster: strictly causal."""

from keras import ops

from routing_tf.layers.cluster_order import ClusterOrder
from routing_tf.layers.cluster_order import chunk_size_for
from routing_tf.layers.masks import combine_masks
from routing_tf.layers.masks import without_padding
from routing_tf.layers.membership import gather_entries


def attend(group, tokens, training=None):
    """Lets each token attend to the last members of its cluster, itself included.

    A token has one cluster, that of its key. Relative positions are differences of
    rank in the cluster. Padding belongs to a cluster of its own that nobody reads, and
    gets zero. The work is `(L + K * C) * (W + C)` pairs, linear in the length.

    Args:
        group: the `ClusteredHeads`.
        tokens: `RoutedTokens` of one sequence.
        training: whether dropout is on; None (the default) for no.

    Returns:
        `<float>[B, H, L, D]`.
    """
    clusters, num_clusters = own_clusters(
        group, tokens.key_scores, tokens.inputs.value_mask
    )
    window = group.window(tokens.length)
    order = ClusterOrder(clusters, num_clusters, chunk_size_for(window))
    key = order.arrange(ops.cast(tokens.key, group.compute_dtype))
    query = key
    if tokens.query is not tokens.key:
        query = order.arrange(ops.cast(tokens.query, group.compute_dtype))
    output = group.dot_product(
        query,
        order.windows(key, window),
        order.windows(order.arrange(tokens.value), window),
        attention_mask=order.window_mask(window),
        bias=_bias(tokens.inputs, order, window),
        offset=order.window_offset(window),
        training=training,
    )
    return without_padding(order.restore(output), real_tokens(tokens.inputs))


def own_clusters(group, scores, mask):
    """Returns the cluster of each token, and the number of clusters.

    Args:
        group: the `ClusteredHeads`.
        scores: `<float32>[B, H, L, K]`.
        mask: `<bool>`, broadcastable to `[B, H, L]`, False for padding, which gets a
            cluster of its own behind the others; or None.
    """
    num_clusters = scores.shape[-1]
    clusters = ops.cast(ops.argmax(scores, axis=-1), "int32")
    if mask is None:
        return clusters, num_clusters
    return ops.where(mask, clusters, num_clusters), num_clusters + 1


def real_tokens(inputs):
    """Returns where both query and key are no padding; None for everywhere."""
    return combine_masks(inputs.query_mask, inputs.value_mask)


def _bias(inputs, order, window):
    if inputs.token_bias is None:
        return None
    bias = gather_entries(inputs.token_bias, order.tokens, inputs.value.shape[2])
    return ops.swapaxes(order.windows(bias[..., None], window), -1, -2)
