"""Dense attention inside each cluster: the release's rule."""

import numpy as np
from keras import ops

from routing_tf.layers import membership
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
    key_members, key_belongs = group.choose(tokens.key_scores, tokens.key_mask)
    members, belongs = key_members, key_belongs
    if tokens.query is not tokens.key:
        members, belongs = group.choose(tokens.query_scores, tokens.query_mask)
    joined = membership.gather(tokens.joined_keys_and_values(), key_members)
    output = group.dot_product(
        ops.cast(membership.gather(tokens.query, members), group.compute_dtype),
        *tokens.split(joined),
        attention_mask=_mask(group, tokens.inputs, members, key_members, key_belongs),
        bias=member_bias(tokens.inputs, key_members),
        training=training,
    )
    return membership.scatter_mean(output, members, tokens.length, belongs)


def member_bias(inputs, members):
    """Returns the token bias of each member, for all queries; None without one."""
    if inputs.token_bias is None:
        return None
    length = inputs.value.shape[2]
    return membership.gather_entries(inputs.token_bias, members, length)[..., None, :]


def member_mask(group, inputs, members, belongs):
    """Tells which slots of a cluster any query may see; None for all."""
    real = None
    if inputs.value_mask is not None:
        length = inputs.value.shape[2]
        real = membership.gather_entries(inputs.value_mask, members, length)
        real = group.shared_padding(real)[..., None, :]
    if belongs is not None:
        belongs = belongs[..., None, :]
    return combine_masks(real, belongs)


def _mask(group, inputs, members, key_members, belongs):
    causal = None
    if inputs.use_causal_mask:
        causal = _causal_mask(group, members, key_members)
    return combine_masks(member_mask(group, inputs, key_members, belongs), causal)


def _causal_mask(group, members, key_members):
    if key_members is members or group.compatibility.rank_mask:
        return np.tri(members.shape[-1], key_members.shape[-1], dtype="bool")
    return key_members[..., None, :] <= members[..., :, None]
