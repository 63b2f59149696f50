"""Layers with the flaws of the release, one method for each flaw.

There are two levels. `Trained...` heads have the flaws that trained weights of the
release rely on, which show in outputs even without padding. `Exact...` heads also have
the flaws of padding and training, and compute the release's numbers.
"""

import dataclasses

import keras
from keras import ops

from routing_tf import layers
from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.heads.head_group import refuse_segments
from routing_tf.layers.routing.inside_clusters import InsideClusters
from routing_tf.layers.support.masks import causal_mask
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.tensors import length_of

# Cluster-strided heads of the release always have these, despite its hyperparameters.
CLUSTER_STRIDED_SETTINGS = {
    "share_query_key": False,
    "decay": 0.99,
    "commitment_weight": 1e-4,
}


register = keras.saving.register_keras_serializable("routing_tf")


class RankedClusters(InsideClusters):
    """A causal mask that compares ranks in two lists, of queries and of keys.

    So a query can see later keys, unless queries are keys.
    """

    def compares_ranks(self, tokens):
        return True


class _WithFlaws:
    """Heads of the release, without shifted keys and rotary positions."""

    has_flaws = True

    def __init__(self, *args, key_shift=0, rotary_positions=False, **kwargs):
        if rotary_positions:
            raise ValueError(
                "`rotary_positions` must be False in heads with flaws of the release. "
                f"Received: rotary_positions={rotary_positions}"
            )
        if key_shift:
            raise ValueError(
                "`key_shift` must be 0 in heads with flaws of the release: a query that"
                f" sees nothing would see later tokens. Received: key_shift={key_shift}"
            )
        super().__init__(*args, **kwargs)

    def prepared(self, inputs):
        if inputs.segments is not None:
            refuse_segments(self, "heads with flaws of the release have none")
        return super().prepared(inputs)


class _TrainedClusters(_WithFlaws):
    # It makes the results of a token too small: by 1 % for one cluster.
    count_offset = 1e-2

    def __init__(self, *args, exploring_queries=0, **kwargs):
        if exploring_queries:
            raise ValueError(
                "`exploring_queries` must be 0 in heads with flaws of the release. "
                f"Received: exploring_queries={exploring_queries}"
            )
        super().__init__(*args, **kwargs)

    def whole_sequence_rule(self, has_segments=False):
        return self.rule(RankedClusters)

    def memory_rule(self, has_segments=False):
        # Each cluster takes as many queries as keys, so later queries push out earlier
        # ones.
        return self.whole_sequence_rule()


@register
class TrainedRoutedHeads(_TrainedClusters, layers.RoutedHeads):
    """`RoutedHeads` as trained weights of the release know them.

    A causal mask compares ranks, queries compete for another sequence, and a token's
    results are divided by the number of its clusters plus 0.01.
    """


@register
class TrainedHashedHeads(_TrainedClusters, layers.HashedHeads):
    """`HashedHeads` as trained weights of the release know them.

    A bucket with fewer tokens than the window is filled with the first tokens of other
    buckets; a full one contains its first tokens, even under a causal mask.
    """

    @property
    def num_clusters(self):
        return self.num_buckets

    def causal_rule(self, routing_scope=None, has_segments=False):
        return self.whole_sequence_rule()

    # Whatever their buckets are.
    choose = ClusteredHeads.choose


@register
class TrainedClusterStridedHeads(_TrainedClusters, layers.ClusterStridedHeads):
    """`ClusterStridedHeads` as trained weights of the release know them.

    They choose members from the whole sequence, even under a causal mask.
    """

    def causal_rule(self, routing_scope=None, has_segments=False):
        return self.whole_sequence_rule()


@register
class TrainedLocalHeads(_WithFlaws, layers.LocalHeads):
    """`LocalHeads` as trained weights of the release know them.

    They count distances as if the query's block were the last one of its window, and
    also cut the padding of a memory into blocks.
    """

    shares_padding = True

    def offset(self, memory_block, block, window):
        return window - block


@register
class ReleaseDotProduct(layers.ScaledDotProduct):
    """Attention in which a query that may see nothing attends equally to all keys."""

    def call(
        self,
        query,
        key,
        value,
        attention_mask=None,
        bias=None,
        offset=0,
        distances=None,
        use_causal_mask=False,
        training=None,
    ):
        if use_causal_mask:
            causal = causal_mask(length_of(query, -2), length_of(key, -2))
            attention_mask = combine_masks(causal, attention_mask)
        return super().call(
            query, key, value, attention_mask, bias, offset, distances, False, training
        )

    def needs_logits(self, needs_sum, training):
        return "the release's flaws need the logits of each pair"

    def of_seeing(self, output, mask, *lengths):
        return output

    def masked(self, logits, mask, bias, causal_mask=None):
        hidden = large_negative(logits.dtype)
        if bias is not None:
            logits += ops.maximum(ops.cast(bias, logits.dtype), hidden / 2)
        return logits if mask is None else ops.where(mask, logits, hidden)


@register
class ReleaseKMeans(layers.OnlineKMeans):
    """Centroids with the updates and the loss of the release."""

    # With sums that start at the centroids, the first updates throw them far away.
    counts_initializer = "zeros"

    def count(self, assigned):
        # Summed across heads, by a wrong reshape.
        heads = assigned.shape[1]
        return ops.sum(ops.reshape(assigned, (-1, heads, self.num_clusters)), axis=0)

    def losses_of(self, streams, scores, nearest, masks, centroids):
        # Padding takes part in the mean, and keys that are queries count twice.
        masks = [None] * len(streams)
        sums, numbers = super().losses_of(streams, scores, nearest, masks, centroids)
        return [2 * x for x in sums] if len(streams) == 1 else sums, numbers


class _Exact(_WithFlaws):
    """Heads that take zero values for padding, as the release does.

    With `cache_padding_bias`, the padding of the first row is that of the whole batch.
    """

    dot_product_class = ReleaseDotProduct

    def __init__(self, *args, cache_padding_bias=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.cache_padding_bias = cache_padding_bias

    def prepared(self, inputs):
        inputs = super().prepared(inputs)
        if inputs.value is None:
            return inputs
        filled = ops.any(inputs.value[..., : self.value_dim] != 0, axis=-1)
        mask = combine_masks(filled, inputs.value_mask)
        return dataclasses.replace(inputs, key_mask=mask, value_mask=mask)

    def padding_mask(self, mask):
        return mask[:1] if self.cache_padding_bias else mask


class _ExactClusters(_Exact):
    """Clusters in which padding competes for places, with the score 0."""

    kmeans_class = ReleaseKMeans

    def scores(self, streams, masks, training=None, adds_losses=True):
        masks = [ops.any(stream != 0, axis=-1) for stream in streams]
        return super().scores(streams, masks, training, adds_losses)

    def routed_tokens(self, inputs, rule, training=False):
        tokens = super().routed_tokens(inputs, rule, training)
        return dataclasses.replace(tokens, query_mask=None, key_mask=None)


@register
class ExactRoutedHeads(_ExactClusters, TrainedRoutedHeads):
    """`RoutedHeads` as in the release."""


@register
class ExactHashedHeads(_ExactClusters, TrainedHashedHeads):
    """`HashedHeads` as in the release."""


@register
class ExactClusterStridedHeads(_ExactClusters, TrainedClusterStridedHeads):
    """`ClusterStridedHeads` as in the release."""


@register
class ExactLocalHeads(_Exact, TrainedLocalHeads):
    """`LocalHeads` as in the release."""


@register
class ExactStridedHeads(_Exact, layers.StridedHeads):
    """`StridedHeads` as in the release, without masks of padding and token biases.

    Instead, all queries of a block attend equally to all blocks if the block starts
    with padding in the first row.
    """

    def mask_and_bias(self, inputs):
        first = self.at_places(inputs.value[:1, :1])[:, :, :1]
        return ops.any(first[..., : self.value_dim] != 0, axis=-1)[..., None], None

    def cached_mask_and_bias(self, inputs):
        return None, None


_TRAINED = {
    layers.RoutedHeads: TrainedRoutedHeads,
    layers.HashedHeads: TrainedHashedHeads,
    layers.ClusterStridedHeads: TrainedClusterStridedHeads,
    layers.LocalHeads: TrainedLocalHeads,
}
_EXACT = {
    layers.RoutedHeads: ExactRoutedHeads,
    layers.HashedHeads: ExactHashedHeads,
    layers.ClusterStridedHeads: ExactClusterStridedHeads,
    layers.LocalHeads: ExactLocalHeads,
    layers.StridedHeads: ExactStridedHeads,
    layers.OnlineKMeans: ReleaseKMeans,
    layers.ScaledDotProduct: ReleaseDotProduct,
}


def class_at(level, cls):
    """Returns the class with the flaws of a level, and its further arguments.

    Classes of `routing_tf.layers` that the release does not have, or that have no flaws
    at the level, stand for themselves.
    """
    if level is None:
        return cls, {}
    if level == "trained":
        return _TRAINED.get(cls, cls), {}
    found = _EXACT.get(cls, cls)
    shares = level == "exact_shared_padding" and issubclass(found, _Exact)
    return found, {"cache_padding_bias": True} if shares else {}
