"""The interface of all rules."""

import dataclasses

from keras import ops

from routing_tf.layers.caches import pending_keys
from routing_tf.layers.routing import membership
from routing_tf.layers.support import backends
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.tensors import length_of


class Rule:
    """How the tokens of clustered heads attend, once they have clusters.

    Subclasses implement `attend`; and `make_cache`, `fill_cache` and `step` where there
    is a cache. That is a dict of tensors of fixed sizes with the batch on axis 0. With
    `key_shift=1` the newest key waits in it for the value that follows, see
    `caches.pending_keys`. With grouped queries a cache, and the tokens that it is
    made of, have the key heads of the group; `attend` gets tokens with keys for all
    queries.

    Args:
        group: the `ClusteredHeads`, once their sizes are known. A rule reads its
            settings when it is made, and is no part of it.
    """

    #: Whether no other token has a part in which clusters a token is in.
    tokens_choose = False

    #: Whether queries may explore, see `routing_tf.layers.routing.exploring`.
    lets_explore = True

    #: Whether a key that waits for its value is known by scores, not by its cluster.
    remembers_scores = True

    #: How many tokens `step` takes at once, each of which reads a copy of members.
    tokens_per_step = 32

    def __init__(self, group):
        self.heads = type(group)
        self.num_heads, self.num_key_heads = group.num_heads, group.num_key_heads
        self.key_dim, self.value_dim = group.key_dim, group.value_dim
        self.num_clusters = group.num_clusters
        self.window = group.attention_window
        self.key_shift = group.key_shift
        self.compute_dtype = group.compute_dtype
        self.dot_product = group.dot_product
        self.padding_mask = group.padding_mask
        self.count_offset = group.count_offset

    def window_in(self, x):
        """Returns how many members a token may see of `[B, H, L, ...]`, an integer."""
        return self.window if x.shape[2] is None else min(self.window, x.shape[2])

    def restart(self, cache):
        """Returns a cache as it was before the first token or query."""
        raise NotImplementedError

    def members(self, scores):
        """Returns each token's cluster, `<bool>[..., K]`, if `tokens_choose`."""
        best = tensors.place_of_largest(scores)
        return backends.one_hot(best, scores.shape[-1], dtype="bool")

    def attend(self, tokens, training=None):
        """Lets all `RoutedTokens` attend; returns `<float>[B, H, L, D]`."""
        raise NotImplementedError

    def make_cache(self, batch_size, max_length):
        """Returns an empty cache; refuses if later tokens decide who is a member."""
        raise ValueError(
            "A cache needs heads in which no later token decides who is a member. "
            f"Received: {self.heads}. Compute the whole sequence again at each step"
        )

    def make_memory(self, tokens):
        """Returns the cache of another sequence that tokens attend to.

        Refuses if queries do not find their clusters independently.
        """
        raise ValueError(
            "A cache needs queries that find their clusters on their own. Received: "
            f"{self.heads}. Compute the whole sequence again at each step"
        )

    def fill_cache(self, cache, tokens):
        """Returns the cache after `RoutedTokens` that start at position 0."""
        raise NotImplementedError

    def step(self, cache, index, tokens):
        """Attends from `index` on; returns `<float>[B, H, T, D]` and the cache."""
        raise NotImplementedError

    def _no_pending_key(self, batch_size):
        """Returns what a cache holds of shifted keys: a dict, empty without any."""
        if not self.key_shift:
            return {}
        shape = (batch_size, self.num_key_heads, 1)
        key = ops.zeros((*shape, self.key_dim), self.compute_dtype)
        entries = ops.zeros((*shape, 1), "int32")
        if self.remembers_scores:
            entries = ops.zeros((*shape, self.num_clusters), "float32")
        return {"pending": pending_keys.none(batch_size, key=key, entries=entries)}

    def _offered(self, cache, index, tokens):
        """Returns the cache, and tokens each of which has the key that it offers.

        With shifted keys that is the one before it.
        """
        if not self.key_shift:
            return cache, tokens
        if not self.remembers_scores:
            tokens = dataclasses.replace(tokens, of_keys=tokens.of_keys.by_number())
        tokens, pending = pending_keys.offer_tokens(cache["pending"], index, tokens)
        return {**cache, "pending": pending}, tokens

    def mean_over_clusters(self, output, asks, axis):
        """Averages over the clusters on an axis; `asks` is True for a token's own."""
        weights = ops.cast(asks, output.dtype)[..., None]
        sums, counts = ops.sum(output * weights, axis), ops.sum(weights, axis)
        return membership.mean_of(sums, counts, self.count_offset)

    def member_bias(self, inputs, members):
        """Returns the token bias of each member, for all queries; None without one."""
        if inputs.token_bias is None:
            return None
        length = length_of(inputs.value, 2)
        entries = tensors.gather_entries(inputs.token_bias, members, length)
        return entries[..., None, :]

    def member_mask(self, inputs, members, filled=None):
        """Returns which slots of a cluster queries may see; None for all.

        `filled`, as `members` `[B, H, K, W]`, is False in slots without a member.
        """
        real = None
        if inputs.value_mask is not None:
            length = length_of(inputs.value, 2)
            real = tensors.gather_entries(inputs.value_mask, members, length)
            real = self.padding_mask(real)[..., None, :]
        if filled is not None:
            filled = filled[..., None, :]
        return combine_masks(real, filled)
