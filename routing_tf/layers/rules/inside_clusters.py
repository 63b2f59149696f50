"""Dense attention inside each cluster: the release's rule."""

from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.lengths import length_of
from routing_tf.layers.lengths import numbers
from routing_tf.layers.masks import combine_masks


def attend(group, tokens, training=None):
    """Lets the members of each cluster attend to each other.

    A token's results are averaged over the clusters it sits in; a token in none gets
    zero. Which tokens are members is decided from the whole sequence.

    Args:
        group: the `ClusteredHeads`.
        tokens: `RoutedTokens`.
        training: whether dropout is on; None (the default) for no.

    Returns:
        `<float>[B, H, L, D]`.

    Reference: `clustered_local_attention_helper` of the release.
    """
    members, belongs = group.choose(
        tokens.key_scores, tokens.key_mask, training=training
    )
    key = membership.gather(ops.cast(tokens.key, group.compute_dtype), members)
    value = membership.gather(tokens.value, members)
    query, query_members, query_belongs = key, members, belongs
    if tokens.query is not tokens.key:
        query_members, query_belongs = group.choose(
            tokens.query_scores, tokens.query_mask, training=training
        )
        query = ops.cast(tokens.query, group.compute_dtype)
        query = membership.gather(query, query_members)
    in_order = query_members is members or group.compatibility.rank_mask
    is_causal = tokens.inputs.use_causal_mask
    mask = member_mask(group, tokens.inputs, members, belongs)
    if is_causal and not in_order:
        last = query_members[..., :, None] - group.key_shift
        mask = combine_masks(mask, members[..., None, :] <= last)
    elif group.key_shift:
        # A token does not see its own key.
        places = numbers(length_of(members, -1))
        mask = combine_masks(mask, places[:, None] != places)
    output = group.dot_product(
        query,
        key,
        value,
        attention_mask=mask,
        bias=member_bias(tokens.inputs, members),
        use_causal_mask=is_causal and in_order,
        training=training,
    )
    return membership.scatter_mean(output, query_members, tokens.length, query_belongs)


def member_bias(inputs, members):
    """Returns the token bias of each member, for all queries; None without one."""
    if inputs.token_bias is None:
        return None
    length = length_of(inputs.value, 2)
    return membership.gather_entries(inputs.token_bias, members, length)[..., None, :]


def member_mask(group, inputs, members, belongs):
    """Tells which slots of a cluster any query may see; None for all."""
    real = None
    if inputs.value_mask is not None:
        length = length_of(inputs.value, 2)
        real = membership.gather_entries(inputs.value_mask, members, length)
        real = group.shared_padding(real)[..., None, :]
    if belongs is not None:
        belongs = belongs[..., None, :]
    return combine_masks(real, belongs)
