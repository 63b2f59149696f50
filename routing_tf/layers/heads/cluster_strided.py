"""Strided attention in the order of distance to a centroid."""

import keras
from keras import ops

from routing_tf.layers import membership
from routing_tf.layers import segment_members
from routing_tf.layers.heads.clustered import CentroidHeads
from routing_tf.layers.lengths import length_of
from routing_tf.layers.rules.all_scores import AllScores


@keras.saving.register_keras_serializable("routing_tf")
class ClusterStridedHeads(CentroidHeads):
    """Heads whose clusters hold tokens at all distances from a centroid.

    The tokens are put in the order of their score against a learned centroid, and
    every `max(1, length // attention_window)`-th one is a member of its cluster:
    where `RoutedHeads` take the nearest tokens, these take an even sample. Attention
    is dense inside a cluster, and a token's results are averaged over the clusters it
    sits in.

    Under a causal mask all this is judged for each query among the tokens up to it,
    so the length is their number: strictly causal, at the cost of full attention times
    the number of clusters.

    In attention to another sequence the clusters hold tokens of that sequence, and each
    query sees those of its own best centroid.

    State: that of `OnlineKMeans`, moved when `training=True`. Padding is no token, is
    never seen, and moves no centroid.

    Args:
        num_heads: number of heads in the group.
        num_clusters: number of centroids of each head.
        attention_window: number of members of a cluster, in tokens.
        share_query_key: whether keys are made by the projection of the queries. In
            self-attention queries and keys are then the same and have one membership.
            Defaults to True.
        prefix_block_size: number of queries that go at once under a causal mask, in
            tokens. It does not change results: more take more memory, fewer more
            turns. None (the default) for `attention_window`.
        **kwargs: arguments of `Clustering`, which say how centroids move, and of
            `ClusteredHeads`.

    Call arguments and Returns: as in `HeadGroup`. Relative positions are differences
    of rank in the sorted list of members. The clustering loss is added to `losses`.

    Raises:
        ValueError: if `attention_window` or `prefix_block_size` is not a positive
            integer, or an argument is refused by `HeadGroup` or `Clustering`; when
            built, if `key_dim` is less than 2; when called, if `use_causal_mask=True`
            and query and value differ in length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.ClusterStridedHeads(2, num_clusters=4, attention_window=8)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16)), use_causal_mask=True).shape == (1, 32, 16)
    ```

    Reference: `clustered_local_attention_helper(strided_attention=True)` of the
    release.
    """

    def causal_rule(self, routing_scope=None):
        return AllScores(self)

    def max_positions(self, cache):
        return cache["rows"].shape[2]

    def choose(self, scores, mask, training=None):
        window = self.window(length_of(scores, 2))
        return membership.strided_choice(scores, window, mask), None

    def choose_in_segments(self, scores, starts, mask, training=None):
        window = self.attention_window
        return segment_members.strided_choice(scores, window, starts, mask)

    def num_candidates(self, length):
        return length

    def is_member(self, ranks, num_tokens):
        stride = ops.maximum(num_tokens // self.attention_window, 1)
        return ops.logical_and(
            ranks % stride == 0, ranks < stride * self.attention_window
        )
