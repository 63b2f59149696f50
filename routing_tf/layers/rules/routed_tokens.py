"""What all rules work on."""

import dataclasses
from typing import Any

from keras import ops

from routing_tf.layers.heads.head_group import HeadInputs
from routing_tf.layers.parts import split


@dataclasses.dataclass(frozen=True)
class RoutedTokens:
    """Tokens with their scores against the clusters.

    Args:
        query: `<float32>[B, H, L, D]`, normalised.
        key: `<float32>[B, H, M, D]`, normalised; the very tensor `query` if shared.
        query_scores: `<float32>[B, H, L, K]`.
        key_scores: `<float32>[B, H, M, K]`; the very tensor `query_scores` if shared.
        query_mask: `<bool>`, broadcastable to `[B, H, L]`, True for queries that may be
            members; None for all.
        key_mask: `<bool>`, broadcastable to `[B, H, M]`, likewise for keys.
        inputs: the `HeadInputs` they come from.
    """

    query: Any
    key: Any
    query_scores: Any
    key_scores: Any
    query_mask: Any
    key_mask: Any
    inputs: HeadInputs

    @property
    def value(self):
        """Values `<float>[B, H, M, D]`."""
        return self.inputs.value

    @property
    def length(self):
        """Number of queries."""
        return self.query.shape[2]

    @property
    def num_clusters(self):
        """Number of clusters."""
        return self.key_scores.shape[-1]

    def joined_keys_and_values(self):
        """Returns keys and values as one tensor, to be moved together.

        Returns:
            `<float>[B, H, M, D]`; `split` takes it apart.
        """
        key = ops.cast(self.key, self.value.dtype)
        return ops.concatenate([key, self.value], axis=-1)

    def split(self, joined):
        """Undoes `joined_keys_and_values`, whatever happened to the other axes."""
        sizes = [self.key.shape[-1], self.value.shape[-1]]
        return split(joined, sizes, axis=-1)
