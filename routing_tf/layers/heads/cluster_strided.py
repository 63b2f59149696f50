"""Strided attention in the order of distance to a centroid."""

import keras

from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.routing import membership
from routing_tf.layers.routing import segment_members
from routing_tf.layers.routing.all_scores import AllScores
from routing_tf.layers.routing.clustering import Clustering
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.validation import check_optional_integer


@keras.saving.register_keras_serializable("routing_tf")
class ClusterStridedHeads(ClusteredHeads):
    """Heads whose clusters hold tokens at all distances from a centroid.

    Tokens are sorted by their score with a learned centroid, and every `max(1, length
    // attention_window)`-th one is a member of its cluster. Attention is dense inside a
    cluster, and a token's results are averaged over its clusters. Under a causal mask,
    members are chosen for each query among the tokens up to it. In attention to another
    sequence, each query sees the tokens of its best centroid.

    State: that of `OnlineKMeans`, which moves when `training=True`. Padding is never
    seen, and moves no centroid.

    Args:
        num_heads: number of heads in the group.
        num_clusters: number of centroids of each head.
        attention_window: number of members of a cluster, in tokens.
        share_query_key: whether the projection of the queries also makes the keys.
            Defaults to True.
        prefix_block_size: number of queries that are computed at once under a causal
            mask; more take more memory. None (the default) for `attention_window`.
        **kwargs: arguments of `Clustering` and of `ClusteredHeads`.

    Call arguments and Returns: as in `HeadGroup`. Relative positions are differences of
    rank in the sorted list of members. The clustering loss is added to `losses`.

    Raises:
        ValueError: when built, if `key_dim` is less than 2; when called, if
            `use_causal_mask=True` and query and value differ in length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.ClusterStridedHeads(2, num_clusters=4, attention_window=8)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16)), use_causal_mask=True).shape == (1, 32, 16)
    ```

    Reference: `clustered_local_attention_helper` of the release.
    """

    remembers_key_heads = True

    prefix_block_size = Argument(check_optional_integer)

    def __init__(
        self,
        num_heads,
        num_clusters,
        attention_window,
        *,
        prefix_block_size=None,
        **kwargs,
    ):
        clustering, kwargs = Clustering.taken_from(kwargs)
        super().__init__(num_heads, attention_window, **kwargs)
        self.add_centroids(num_clusters, clustering)
        self.prefix_block_size = prefix_block_size

    def causal_rule(self, routing_scope=None, has_segments=False):
        return self.rule(AllScores)

    def max_positions(self, cache):
        return cache["rows"].shape[2]

    def choose(self, assigned, mask, training=None):
        scores = assigned.scores
        window = self.window(length_of(scores, 2))
        return membership.strided_choice(scores, window, mask), None

    def choose_in_segments(self, assigned, starts, mask, training=None):
        window = self.attention_window
        return segment_members.strided_choice(assigned.scores, window, starts, mask)
