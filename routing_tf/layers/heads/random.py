"""Random clusters: the paper's ablation of content-based routing."""

import dataclasses

import keras
import numpy as np
from keras import ops

from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.routing.last_members import LastMembers
from routing_tf.layers.routing.rule import Assignment
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import static_length


@keras.saving.register_keras_serializable("routing_tf")
class RandomHeads(ClusteredHeads):
    """Heads that attend inside clusters of random members, whatever their content.

    The clusters are drawn from `seed` for each position, and are the same for every
    text, length and call; in packed documents, for each position in a segment.
    Everything else is as in `RoutedHeads`, so the two differ only in the content that
    routing uses. Under a causal mask, the token at each position has one random cluster
    and attends to its last `attention_window` tokens, itself included (token choice).
    Elsewhere each cluster contains `attention_window` random positions (expert choice).

    Args:
        num_heads: number of heads in the group.
        num_clusters: number of clusters of each head.
        attention_window: number of members of a cluster, in tokens.
        seed: non-negative integer that decides the members. Layers with the same seed
            draw the same members. Defaults to 0.
        share_query_key: whether the projection of the queries also makes the keys. In
            self-attention, queries and keys are then the same and have one membership.
            Defaults to True.
        **kwargs: `exploring_queries` of `ClusteredHeads`, and arguments of `HeadGroup`;
            relative positions are in ranks.

    Call arguments and Returns: as in `HeadGroup`. Relative positions are differences
    of rank in the sorted list of members. Padding is a member only if a cluster finds
    too few tokens, and is never seen.

    Raises:
        ValueError: when built, if `key_dim` is less than 2; when called, if
            `use_causal_mask=True` and query and value differ in length, or a length is
            unknown while TensorFlow traces the call.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.RandomHeads(2, num_clusters=4, attention_window=8)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16)), use_causal_mask=True).shape == (1, 32, 16)
    ```

    Reference: paper, section 5.1 and Table 1, "Random Transformer".
    """

    num_clusters = Argument(check_positive_integer)
    seed = Argument(check_non_negative_integer)

    def __init__(self, num_heads, num_clusters, attention_window, seed=0, **kwargs):
        super().__init__(num_heads, attention_window, **kwargs)
        self.num_clusters = num_clusters
        self.seed = seed

    @property
    def routes_queries(self):
        # A position has one cluster, whatever stands there.
        return False

    def causal_rule(self, routing_scope=None, has_segments=False):
        return self.rule(LastMembers)

    def random_scores(self, length):
        """Returns scores `<float32>[1, heads, length, clusters]` as a NumPy array.

        Those of a position do not depend on the length.
        """
        generator = np.random.default_rng(self.seed)
        shape = (length, self.num_heads, self.num_clusters)
        scores = generator.random(shape, dtype="float32")
        return np.moveaxis(scores, 1, 0)[None]

    def assign(self, streams, masks, training=None, adds_losses=True):
        assigned = []
        for stream in streams:
            scores = self.random_scores(static_length("query", stream, axis=2))
            scores = ops.broadcast_to(scores, (ops.shape(stream)[0], *scores.shape[1:]))
            assigned.append(Assignment(scores, self.num_clusters))
        return assigned

    def routed_tokens(self, inputs, rule, training=False):
        tokens = super().routed_tokens(inputs, rule, training)
        segments = inputs.segments
        if segments is None:
            return tokens
        # Each segment has the clusters that it would have on its own.
        return dataclasses.replace(
            tokens,
            of_queries=_at_places(tokens.of_queries, segments.query_places),
            of_keys=_at_places(tokens.of_keys, segments.value_places),
        )

    def make_cache(self, batch_size, max_length, positions=None):
        cache = super().make_cache(batch_size, max_length, positions)
        return {**cache, "clusters": self._clusters(batch_size, max_length)}

    def make_memory(self, inputs, max_length):
        cache = super().make_memory(inputs, max_length)
        batch_size = ops.shape(inputs.value)[0]
        return {**cache, "clusters": self._clusters(batch_size, max_length)}

    def max_positions(self, cache):
        return cache["clusters"].shape[2]

    def _clusters(self, batch_size, max_length):
        """The cluster of each position, `<int32>[batch, heads, max_length]`."""
        clusters = np.argmax(self.random_scores(max_length), axis=-1).astype("int32")
        return ops.broadcast_to(clusters, (batch_size, *clusters.shape[1:]))

    def next_tokens(self, inputs, rule, cache, index):
        tokens, number = super().routed_tokens(inputs, rule), inputs.query.shape[2]
        places = index + numbers(number)
        if inputs.segments is not None:
            places = inputs.segments.query_places
        clusters = cache["clusters"]
        places = ops.minimum(places, clusters.shape[2] - 1)
        places = ops.broadcast_to(places, (*ops.shape(clusters)[:2], number))
        clusters = tensors.entries_at(clusters, places)[..., None]
        own = Assignment(clusters, self.num_clusters, False)
        return dataclasses.replace(tokens, of_queries=own, of_keys=own)


def _at_places(assigned, places):
    """Returns the `Assignment` of places in segments."""
    places = ops.broadcast_to(places, ops.shape(assigned.entries)[:3])
    return assigned.with_entries(tensors.gather(assigned.entries, places))
