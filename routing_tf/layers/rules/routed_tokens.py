"""The inputs of all rules."""

import dataclasses
from typing import Any

from keras import ops

from routing_tf.layers import backends
from routing_tf.layers import key_heads
from routing_tf.layers.extremes import place_of_largest
from routing_tf.layers.heads.head_inputs import HeadInputs
from routing_tf.layers.lengths import length_of
from routing_tf.layers.masks import combine_masks


@dataclasses.dataclass(frozen=True)
class RoutedTokens:
    """Tokens with their scores against the clusters.

    With grouped queries keys, values and the scores of keys are those of key heads,
    unless `for_queries` has repeated them.

    Args:
        query: `<float32>[B, H, L, D]`, normalised.
        key: `<float32>[B, H, M, D]`, normalised.
        query_scores: `<float32>[B, H, L, K]`.
        key_scores: `<float32>[B, H, M, K]`.
        query_mask: `<bool>`, broadcastable to `[B, H, L]`, True for queries that may be
            members; None for all.
        key_mask: `<bool>`, broadcastable to `[B, H, M]`, the same for keys.
        inputs: the `HeadInputs` they come from.
        shares_vectors: whether queries are keys.
        shares_scores: whether queries have the scores of keys.
        num_copies: number of entries for each token, one after the other. Defaults to
            1.
    """

    query: Any
    key: Any
    query_scores: Any
    key_scores: Any
    query_mask: Any
    key_mask: Any
    inputs: HeadInputs
    shares_vectors: bool
    shares_scores: bool
    num_copies: int = 1

    @property
    def value(self):
        """Values `<float>[B, H, M, D]`."""
        return self.inputs.value

    def for_queries(self, num_heads):
        """Returns tokens with a key and a value for each head of queries."""
        if self.query.shape[1] == self.key_scores.shape[1]:
            return self
        names = ("key", "query_scores", "key_scores")
        parts = {
            name: key_heads.for_queries(getattr(self, name), num_heads)
            for name in names
        }
        key, value = (
            key_heads.for_queries(x, num_heads) for x in (self.inputs.key, self.value)
        )
        inputs = dataclasses.replace(self.inputs, key=key, value=value)
        return dataclasses.replace(self, inputs=inputs, **parts)

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

    @property
    def num_clusters(self):
        """Number of clusters."""
        return self.key_scores.shape[-1]


def own_clusters(scores, mask):
    """Returns the cluster of each token `[B, H, L]`, and the number of clusters.

    Padding, where the mask is False, gets an extra cluster after the others.
    """
    num_clusters = scores.shape[-1]
    clusters = place_of_largest(scores)
    if mask is None:
        return clusters, num_clusters
    return ops.where(mask, clusters, num_clusters), num_clusters + 1


def best_clusters(scores, number):
    """Returns the best clusters of each token, `<int32>[B, H, L, number]`."""
    if number == 1:  # Much cheaper.
        return place_of_largest(scores)[..., None]
    return ops.cast(backends.top_k(scores, number)[1], "int32")


def real_tokens(inputs):
    """Returns where query and key are both real; None for everywhere."""
    return combine_masks(inputs.query_mask, inputs.key_mask)


def real_keys(tokens, shape):
    """Tells which keys are real, whatever their queries are."""
    mask = combine_masks(tokens.key_mask, tokens.inputs.key_mask)
    return ops.ones(shape, "bool") if mask is None else ops.broadcast_to(mask, shape)
