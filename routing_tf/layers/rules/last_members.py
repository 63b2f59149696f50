"""Attention to the last members of a token's cluster: strictly causal."""

from keras import ops

from routing_tf.layers.cluster_order import ClusterOrder
from routing_tf.layers.cluster_order import chunk_size_for
from routing_tf.layers.lengths import length_of
from routing_tf.layers.masks import combine_masks
from routing_tf.layers.masks import without_padding
from routing_tf.layers.membership import gather_entries
from routing_tf.layers.rules import members_of_query
from routing_tf.layers.rules.routed_tokens import own_clusters
from routing_tf.layers.rules.routed_tokens import real_tokens


def attend(group, tokens, training=None):
    """Lets each token attend to the last members of its cluster, itself included.

    A token has one cluster; where queries choose on their own, see `members_of_query`.
    With shifted keys a token reads the values that follow the last members before it.
    Relative positions are differences of rank in the cluster. Padding belongs to a
    cluster of its own that nobody reads, and gets zero. The work is `(L + K * C) *
    (W + C)` pairs, linear in the length.

    Args:
        group: the `ClusteredHeads`.
        tokens: `RoutedTokens` of one sequence.
        training: whether dropout is on; None (the default) for no.

    Returns:
        `<float>[B, H, L, D]`.
    """
    if tokens.query_scores is not tokens.key_scores:
        return members_of_query.attend(group, tokens, training)
    inputs = tokens.inputs
    clusters, num_clusters = own_clusters(tokens.key_scores, inputs.key_mask)
    window = group.known_window(tokens.length)
    order = ClusterOrder(clusters, num_clusters, chunk_size_for(window))
    key = order.arrange(ops.cast(tokens.key, group.compute_dtype))
    query = key
    if tokens.query is not tokens.key:
        query = order.arrange(ops.cast(tokens.query, group.compute_dtype))
    # The token itself stands in its window, seen or not.
    window += group.key_shift
    mask = order.window_mask(window, nearest=group.key_shift)
    if group.key_shift:
        mask = combine_masks(mask, _entries(inputs.value_mask, inputs, order, window))
    output = group.dot_product(
        query,
        order.windows(key, window),
        order.windows(order.arrange(tokens.value), window),
        attention_mask=mask,
        bias=_entries(inputs.token_bias, inputs, order, window),
        offset=order.window_offset(window),
        training=training,
    )
    return without_padding(order.restore(output), real_tokens(inputs))


def _entries(x, inputs, order, window):
    """Returns a mask or bias of positions for each window, or None."""
    if x is None:
        return None
    entries = gather_entries(x, order.tokens, length_of(inputs.value, 2))
    return ops.swapaxes(order.windows(entries[..., None], window), -1, -2)
