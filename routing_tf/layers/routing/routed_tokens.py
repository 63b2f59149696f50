"""The inputs of all rules."""

import dataclasses
from typing import Any

from keras import ops

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
