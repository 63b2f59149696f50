"""The interface of all rules."""

from keras import ops

from routing_tf.layers import backends
from routing_tf.layers import membership
from routing_tf.layers.decoding import pending_keys
from routing_tf.layers.extremes import place_of_largest
from routing_tf.layers.lengths import length_of
from routing_tf.layers.masks import combine_masks


class Rule:
    """How the tokens of clustered heads attend, once they have scores.

    Subclasses implement `attend`; and `make_cache`, `fill_cache` and `step` where there
    is a cache. That is a dict of tensors of fixed sizes with the batch on axis 0. With
    `key_shift=1` the newest key waits in it for the value that follows, see
    `decoding.pending_keys`. The group is one of `ClusteredHeads`, which say who is a
    member. With grouped queries a cache, and the tokens that it is made of, have the
    key heads of the group; `attend` gets tokens with keys for all queries.
    """

    #: Whether no other token has a part in which clusters a token is in.
    tokens_choose = False

    #: Whether queries may explore, see `routing_tf.layers.exploring`.
    lets_explore = True

    #: How many tokens `step` takes at once, each of which reads a copy of members.
    tokens_per_step = 32

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
        best = place_of_largest(scores)
        return backends.one_hot(best, scores.shape[-1], dtype="bool")

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
        """Attends with tokens from `index` on, of at most `tokens_per_step`.

        Returns `<float>[B, H, T, D]`, and the cache with the tokens.
        """
        raise NotImplementedError

    def _no_pending_key(self, batch_size):
        """Returns what a cache holds of shifted keys: a dict, empty without any."""
        group = self.group
        if not group.key_shift:
            return {}
        shape, dtype = (
            (batch_size, group.num_key_heads * group.num_rounds, 1),
            "float32",
        )
        key = ops.zeros((*shape, group.key_dim), group.compute_dtype)
        scores = ops.zeros((*shape, group.num_clusters), dtype)
        pending = pending_keys.none(batch_size, key=key, key_scores=scores)
        return {"pending": pending}

    def _restarted(self, cache):
        """Returns a cache without its pending key."""
        if "pending" not in cache:
            return cache
        return {**cache, "pending": pending_keys.forgotten(cache["pending"])}

    def _offered(self, cache, index, tokens):
        """Returns the cache, and tokens each of which has the key that it offers.

        With shifted keys that is the one before it.
        """
        if not self.group.key_shift:
            return cache, tokens
        tokens, pending = pending_keys.offer_tokens(cache["pending"], index, tokens)
        return {**cache, "pending": pending}, tokens

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
