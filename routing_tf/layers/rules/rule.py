"""The interface of all rules."""

from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.lengths import length_of
from routing_tf.layers.masks import combine_masks


class Rule:
    """How the tokens of clustered heads attend, once they have scores.

    Subclasses implement `attend`, and for decoding also `make_cache`, `fill_cache` and
    `step`. A cache is a dict of tensors of fixed sizes with the batch on axis 0. A
    token that is fed again at the same position replaces the earlier one. With
    `key_shift=1`, the row of a token's key is opened without a value, and completed
    with the value of the next token, which may replace it in the same way. The group is
    one of `ClusteredHeads`, which say who is a member. With grouped queries, a cache
    and its tokens have the key heads of the group; `attend` gets tokens with keys for
    all queries.
    """

    #: Whether no other token has a part in which clusters a token is in.
    tokens_choose = False

    #: Whether queries may explore, see `routing_tf.layers.exploring`.
    lets_explore = True

    def __init__(self, group):
        self.group = group

    def in_segments(self):
        """Returns the rule of this kind for `Segments`; refuses if there is none."""
        return self

    def restart(self, cache):
        """Returns a cache as it was before the first token or query."""
        raise NotImplementedError

    def members(self, scores):
        """Tells which token is in which cluster, if `tokens_choose`.

        From scores `<float32>[..., K]` to `<bool>[..., K]`.
        """
        best = ops.argmax(scores, axis=-1)
        return ops.one_hot(best, scores.shape[-1], dtype="bool")

    def attend(self, tokens, training=None):
        """Lets all `RoutedTokens` attend; returns `<float>[B, H, L, D]`."""
        raise NotImplementedError

    def make_cache(self, batch_size, max_length):
        """Returns an empty cache; refuses if later tokens decide who is a member."""
        raise ValueError(
            "A cache needs heads in which no later token decides who is a member. "
            f"Received: {type(self.group)}. Compute the whole sequence again "
            "at each step"
        )

    def make_memory(self, tokens):
        """Returns the cache of another sequence that tokens attend to.

        Refuses if queries do not find their clusters independently.
        """
        raise ValueError(
            "A cache needs queries that find their clusters on their own. Received: "
            f"{type(self.group)}. Compute the whole sequence again at each step"
        )

    def fill_cache(self, cache, tokens):
        """Returns the cache after `RoutedTokens` that start at position 0."""
        raise NotImplementedError

    def step(self, cache, index, tokens):
        """Attends with one token at `index`; returns `[B, H, 1, D]` and the cache."""
        raise NotImplementedError

    def mean_over_clusters(self, output, asks, axis):
        """Averages a token's results over its clusters, which are on an axis.

        `asks` has the shape of `output` without its last axis, True for clusters of the
        token.
        """
        weights = ops.cast(asks, output.dtype)[..., None]
        sums, counts = ops.sum(output * weights, axis), ops.sum(weights, axis)
        return membership.mean_of(sums, counts, self.group.count_offset)

    def member_bias(self, inputs, members):
        """Returns the token bias of each member, for all queries; None without one."""
        if inputs.token_bias is None:
            return None
        length = length_of(inputs.value, 2)
        entries = membership.gather_entries(inputs.token_bias, members, length)
        return entries[..., None, :]

    def member_mask(self, inputs, members, filled=None):
        """Tells which slots of a cluster queries may see; None for all.

        `filled`, as `members` `[B, H, K, W]`, is False in slots without a member.
        """
        real = None
        if inputs.value_mask is not None:
            length = length_of(inputs.value, 2)
            real = membership.gather_entries(inputs.value_mask, members, length)
            real = self.group.padding_mask(real)[..., None, :]
        if filled is not None:
            filled = filled[..., None, :]
        return combine_masks(real, filled)
