"""The inputs and the interface of all rules."""

import dataclasses
from typing import Any

from keras import ops

from routing_tf.layers.caches import pending_keys
from routing_tf.layers.routing import membership
from routing_tf.layers.support import backends
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support import tensors
from routing_tf.layers.support.head_inputs import HeadInputs
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.tensors import length_of


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Assignment:
    """Which clusters tokens are in: by their scores, or by number.

    Args:
        entries: `<float32>[B, H, L, K]`, scores, of which the highest is that of the
            token's cluster; or `<int32>[B, H, L, 1]`, the number of its cluster.
        num_clusters: number of clusters K.
        has_scores: whether entries are scores. Defaults to True.
    """

    entries: Any
    num_clusters: int
    has_scores: bool = True

    @property
    def scores(self):
        """Scores `<float32>[B, H, L, K]`."""
        if self.has_scores:
            return self.entries
        numbers = self.entries[..., 0]
        return backends.one_hot(numbers, self.num_clusters, dtype="float32")

    @property
    def numbers(self):
        """The cluster of each token, `<int32>[B, H, L]`."""
        if self.has_scores:
            return tensors.place_of_largest(self.entries)
        return self.entries[..., 0]

    def apart_from_padding(self, mask):
        """Returns `numbers`, and the number of clusters.

        Padding, where the mask is False, gets an extra cluster after the others.
        """
        if mask is None:
            return self.numbers, self.num_clusters
        numbers = ops.where(mask, self.numbers, self.num_clusters)
        return numbers, self.num_clusters + 1

    def best(self, number):
        """Returns the best clusters of each token, `<int32>[B, H, L, number]`."""
        if number == 1:  # Much cheaper.
            return self.numbers[..., None]
        return ops.cast(backends.top_k(self.scores, number)[1], "int32")

    def by_number(self):
        """Returns the assignment of tokens whose scores do not matter any more."""
        return Assignment(self.numbers[..., None], self.num_clusters, False)

    def with_entries(self, entries):
        """Returns the assignment of other tokens."""
        return dataclasses.replace(self, entries=entries)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RoutedTokens:
    """Tokens with their clusters.

    With grouped queries keys, values and the clusters of keys are those of key heads,
    unless `for_queries` has repeated them.

    Args:
        query: `<float32>[B, H, L, D]`, normalised.
        key: `<float32>[B, H, M, D]`, normalised.
        of_queries: `Assignment` of the queries, `[B, H, L, .]`.
        of_keys: `Assignment` of the keys, `[B, H, M, .]`.
        query_mask: `<bool>`, broadcastable to `[B, H, L]`, True for queries that may be
            members; None for all.
        key_mask: `<bool>`, broadcastable to `[B, H, M]`, the same for keys.
        inputs: the `HeadInputs` they come from.
        shares_vectors: whether queries are keys.
        shares_clusters: whether queries have the clusters of keys.
    """

    query: Any
    key: Any
    of_queries: Assignment
    of_keys: Assignment
    query_mask: Any
    key_mask: Any
    inputs: HeadInputs
    shares_vectors: bool
    shares_clusters: bool

    def for_queries(self, num_heads):
        """Returns tokens with a key and a value for each head of queries."""
        if self.query.shape[1] == self.of_keys.entries.shape[1]:
            return self
        key, own_key, value, asked, offered = (
            head_inputs.for_queries(x, num_heads)
            for x in (
                self.key,
                self.inputs.key,
                self.inputs.value,
                self.of_queries.entries,
                self.of_keys.entries,
            )
        )
        return dataclasses.replace(
            self,
            key=key,
            of_queries=self.of_queries.with_entries(asked),
            of_keys=self.of_keys.with_entries(offered),
            inputs=dataclasses.replace(self.inputs, key=own_key, value=value),
        )

    def in_last_segment(self):
        """Returns tokens of which all but the last segment, if any, is padding."""
        if self.inputs.segments is None:
            return self
        own, inputs = self.inputs.segments.is_in_last, self.inputs.in_last_segment()
        return dataclasses.replace(
            self,
            query_mask=combine_masks(self.query_mask, own),
            key_mask=combine_masks(self.key_mask, own),
            inputs=inputs,
        )

    @property
    def length(self):
        """Number of queries."""
        return length_of(self.query, 2)


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
