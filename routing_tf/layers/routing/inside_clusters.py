"""Dense attention inside each cluster."""

from keras import ops

from routing_tf.layers.routing import membership
from routing_tf.layers.routing.rule import Rule
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers


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
