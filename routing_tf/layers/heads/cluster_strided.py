"""Strided attention in the order of distance to a centroid."""

import dataclasses

import keras
from keras import ops

from routing_tf.layers.caches import rows
from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.routing import membership
from routing_tf.layers.routing import segment_members
from routing_tf.layers.routing.best_members import Prefixes
from routing_tf.layers.routing.online_kmeans import Clustering
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.head_inputs import read_next_values
from routing_tf.layers.support.masks import without_padding
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.validation import check_optional_integer


class AllScores(Prefixes):
    """Prefixes whose members are evenly spread over the order of scores.

    Any token may become a member later, so caches contain all.
    """

    def num_candidates(self, length):
        return length

    def is_member(self, ranks, num_tokens):
        stride = ops.maximum(num_tokens // self.window, 1)
        return ops.logical_and(ranks % stride == 0, ranks < stride * self.window)

    def make_cache(self, batch_size, max_length):
        names = {"key": self.num_key_heads}
        if not self.shares_vectors:
            names["query"] = self.num_heads
        keys = (batch_size, self.num_key_heads, max_length)
        cache = {"rows": rows.empty_rows(self, *keys)}
        for name, heads in names.items():
            real = (batch_size, heads, max_length)
            scores = (*real, self.num_clusters)
            cache[f"{name}_scores"] = ops.zeros(scores, "float32")
            cache[f"{name}_mask"] = ops.zeros(real, "bool")
        return cache

    def restart(self, cache):
        names = [name for name in ("key_mask", "query_mask") if name in cache]
        return {**cache, **{name: ops.zeros_like(cache[name]) for name in names}}

    @property
    def tokens_per_step(self):
        # As many go at once as in one pass.
        return self.block_size

    def fill_cache(self, cache, tokens):
        return _update(cache, 0, tokens)

    def step(self, cache, index, tokens):
        cache = _update(cache, index, tokens)
        remembered_rows, key_scores, key_mask = (
            head_inputs.for_queries(cache[name], tokens.query.shape[1])
            for name in ("rows", "key_scores", "key_mask")
        )
        key, value, bias, real = rows.split_rows(self, remembered_rows)
        query = ops.cast(tokens.query, self.compute_dtype)
        inputs = dataclasses.replace(
            tokens.inputs,
            value=value,
            key_mask=key_mask,
            value_mask=real,
            token_bias=bias,
            segments=None,
        )
        remembered = dataclasses.replace(
            tokens,
            key=key,
            of_queries=tokens.of_queries.with_entries(
                cache.get("query_scores", key_scores)
            ),
            of_keys=tokens.of_keys.with_entries(key_scores),
            query_mask=cache.get("query_mask", key_mask),
            key_mask=key_mask,
            inputs=read_next_values(inputs) if self.key_shift else inputs,
        )
        output = self.attend_block(remembered, index, query, training=False)
        return without_padding(output, tokens.inputs.query_mask), cache


def _update(cache, index, tokens):
    """Returns the cache with the rows, scores and masks of tokens from `index` on."""
    new = {"rows": rows.of_tokens(tokens)}
    found = {"key": (tokens.of_keys.scores, tokens.key_mask)}
    if "query_scores" in cache:
        found["query"] = tokens.of_queries.scores, tokens.query_mask
    for name, (scores, mask) in found.items():
        shape = ops.shape(scores)[:3]
        new[f"{name}_scores"] = scores
        new[f"{name}_mask"] = (
            ops.ones(shape, "bool") if mask is None else ops.broadcast_to(mask, shape)
        )
    return {
        name: ops.slice_update(
            cache[name], (0, 0, index) + (0,) * (len(x.shape) - 3), x
        )
        for name, x in new.items()
    }


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
