"""Clustered attention: similar queries attend together."""

import keras
import numpy as np
from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers.softmax.softmax_attention import softmax
from routing_tf.layers.support import backends
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.tensors import running_sum
from routing_tf.layers.support.tensors import smaller
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.chosen_blocks import is_among
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share

__all__ = ["ClusteredQueryHeads"]

OF_ALL_QUERIES = "clusters are found among all queries of a sequence, later ones too"


@keras.saving.register_keras_serializable("routing_tf")
class ClusteredQueryHeads(HeadGroup):
    """Heads that attend once for each cluster of similar queries.

    Queries are hashed to `num_bits` signs of random projections, and k-means with
    Hamming distances finds clusters among these in each sequence and head. The mean of
    the queries of a cluster attends to all keys for them (clustered attention). With
    `num_keys`, each query then weighs the keys with the largest weights of its cluster
    itself, and these share the weight that the cluster gave them (improved clustered
    attention). Work is that of `num_clusters` queries, and of `num_keys` keys for each
    query; memory is linear in the length. Clusters have no gradient.

    Unlike the centroids of `OnlineKMeans`, which are learned from all batches, these
    clusters belong to one sequence. Later queries move them and change what earlier
    queries see, so the rule has no causal form here; the causal form in the authors'
    code masks later keys, but later tokens influence clusters and their keys. The
    authors draw projections and first centroids at random in each call; here
    projections are drawn once, and the first centroids are evenly spaced queries.

    Args:
        num_heads: number of heads in the group.
        num_clusters: number of clusters. Defaults to 100.
        num_keys: number of keys of each cluster that queries weigh themselves; None for
            clustered attention without this improvement. Defaults to 32.
        num_bits: number of random projections. Defaults to 32.
        num_iterations: number of iterations of k-means. Defaults to 10.
        hash_bias: whether projections have random offsets, so that Hamming distances
            compare vectors and not only directions. Defaults to True.
        seed: integer seed of the projections. Defaults to 0.
        **kwargs: arguments of `HeadGroup`, without `max_relative_position`,
            `key_shift` and `rotary_positions`.

    Call arguments and Returns: as in `HeadGroup`.

    Raises:
        ValueError: if an argument has no meaning; when called, with a causal mask; from
            `make_cache`, always.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.ClusteredQueryHeads(2, num_clusters=3, num_keys=4)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16))).shape == (1, 10, 16)
    ```

    Reference: Vyas, Katharopoulos, Fleuret, "Fast Transformers with Clustered
    Attention" (https://arxiv.org/abs/2007.04825), section 3, equations 4 to 11. Tested
    only against NumPy code of this repository.
    """

    num_clusters = Argument(check_positive_integer)
    num_keys = Argument(check_optional_integer)
    num_bits = Argument(check_positive_integer)
    num_iterations = Argument(check_positive_integer)
    hash_bias = Argument(check_flag)
    seed = Argument(check_non_negative_integer)

    def __init__(
        self,
        num_heads,
        num_clusters=100,
        num_keys=32,
        num_bits=32,
        num_iterations=10,
        hash_bias=True,
        seed=0,
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        refusals.refuse_arguments(
            self, "the queries of a cluster attend as one", "max_relative_position"
        )
        refusals.refuse_arguments(self, OF_ALL_QUERIES, "key_shift", "rotary_positions")
        self.num_clusters = num_clusters
        self.num_keys = num_keys
        self.num_bits = num_bits
        self.num_iterations = num_iterations
        self.hash_bias = hash_bias
        self.seed = seed

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        self.projections = self.add_weight(
            name="projections",
            shape=(self.num_heads, self.key_dim + bool(self.hash_bias), self.num_bits),
            initializer=self._draw,
            dtype="float32",
            trainable=False,
            autocast=False,
        )

    def prepared(self, inputs):
        refusals.refuse_causal_mask(inputs, OF_ALL_QUERIES)
        return super().prepared(inputs)

    def attend(self, inputs, training=None):
        real = known_mask(inputs.query, inputs.query_mask)
        cluster = self.clusters(inputs.query, real)
        members = _members_of(cluster, real, self.num_clusters)
        weights = self._weights_of_clusters(inputs, members)
        if self.num_keys is None:
            return tensors.gather(self._sums(weights, inputs, training), cluster)
        length = length_of(inputs.value, 2)
        shares, keys = backends.top_k(weights, smaller(self.num_keys, length))
        rest = ops.where(is_among(keys, length), 0.0, weights)
        sums = tensors.gather(self._sums(rest, inputs, training), cluster)
        share = ops.sum(tensors.gather(shares, cluster), axis=-1)
        keys = tensors.gather(keys, cluster)
        return sums + self._read_keys(inputs, keys, share, training)

    def clusters(self, query, real):
        """Returns the cluster of each query, `<int32>[batch, heads, length]`.

        `real` `<bool>[batch, 1, length]` is False for padding.
        """
        projections = ops.convert_to_tensor(self.projections)
        # Offsets apply to queries that are not scaled.
        query = ops.cast(query, "float32") * self.key_dim**0.5
        products = product(query, projections[:, : self.key_dim])
        if self.hash_bias:
            products = products + projections[:, self.key_dim :]
        bits = ops.where(products > 0, 1.0, -1.0)
        return _cluster_bits(bits, real, self.num_clusters, self.num_iterations)

    def make_cache(self, batch_size, max_length, positions=None):
        refusals.refuse_cache(self, OF_ALL_QUERIES)

    def make_memory(self, inputs, max_length):
        refusals.refuse_cache(self, OF_ALL_QUERIES)

    def _weights_of_clusters(self, inputs, members):
        """Returns the weights of means of queries `<float32>[B, H, clusters, keys]`."""
        query, key = (ops.cast(x, "float32") for x in (inputs.query, inputs.key))
        count = ops.maximum(ops.sum(members, axis=-2), 1.0)[..., None]
        members = ops.swapaxes(members, -1, -2)
        if inputs.query_mask is not None:
            # Even a large number at padding must not influence the mean.
            query = ops.where(inputs.query_mask[..., None], query, 0.0)
        means = ops.matmul(members, query) / count
        logits = ops.matmul(means, ops.swapaxes(key, -1, -2))
        mask, bias = (
            None if x is None else x[:, :, None]
            for x in (inputs.value_mask, inputs.token_bias)
        )
        return self._softmax(logits, mask, bias)

    def _softmax(self, logits, mask, bias):
        """Weighs keys; `mask` and `bias` are broadcastable to them, or None."""
        weights = softmax(self.dot_product.masked(logits, mask, bias))
        return weights if mask is None else ops.where(mask, weights, 0.0)

    def _sums(self, weights, inputs, training):
        """Returns sums of values, of each cluster."""
        weights = ops.cast(weights, inputs.value.dtype)
        weights = self.dot_product.dropout_layer(weights, training=training)
        return ops.matmul(weights, inputs.value)

    def _read_keys(self, inputs, places, share, training):
        """Lets each query weigh the keys at its `places`, which share a weight.

        These are `<int32>[B, H, length, keys]`, the share is `<float32>[B, H, length]`.
        """
        key, value = (tensors.gather(x, places) for x in (inputs.key, inputs.value))
        logits = ops.matmul(key, inputs.query[..., None])[..., 0]
        memory_length = length_of(inputs.value, 2)
        mask, bias = (
            None if x is None else tensors.gather_entries(x, places, memory_length)
            for x in (inputs.value_mask, inputs.token_bias)
        )
        weights = self._softmax(ops.cast(logits, "float32"), mask, bias)
        weights = ops.cast(weights * share[..., None], value.dtype)
        weights = self.dot_product.dropout_layer(weights, training=training)
        return ops.matmul(weights[..., None, :], value)[..., 0, :]

    def _draw(self, shape, dtype=None):
        """Draws the random projections of all heads."""
        projections = np.random.default_rng(self.seed).normal(size=shape)
        return ops.convert_to_tensor(projections.astype("float32"))


def _cluster_bits(bits, real, num_clusters, num_iterations):
    """Finds clusters `<int32>[B, H, L]` of bits, 1 and -1, by k-means.

    Distances are those of Hamming. The first centroids are evenly spaced real tokens. A
    bit of a centroid is that of most members, -1 in a tie. A cluster without members
    keeps its centroid; of equal distances, the first cluster counts.
    """
    centroids = _first_centroids(bits, real, num_clusters)
    for _ in range(num_iterations):
        cluster = _nearest(bits, centroids)
        members = _members_of(cluster, real, num_clusters)
        sums = ops.matmul(ops.swapaxes(members, -1, -2), bits)
        has_members = ops.any(members > 0, axis=-2)[..., None]
        moved = ops.where(sums > 0, 1.0, -1.0)
        centroids = ops.where(has_members, moved, centroids)
    return _nearest(bits, centroids)


def _members_of(cluster, real, num_clusters):
    """Returns 1 where a real token is in a cluster, `<float32>[B, H, L, K]`."""
    members = backends.one_hot(cluster, num_clusters, dtype="float32")
    return members * ops.cast(real, "float32")[..., None]


def _nearest(bits, centroids):
    # Twice the Hamming distance is the number of bits minus this.
    products = ops.matmul(bits, ops.swapaxes(centroids, -1, -2))
    return tensors.place_of_largest(products)


def _first_centroids(bits, real, num_clusters):
    count = running_sum(ops.cast(real, "float32"))
    rank = ops.where(real, ops.cast(count, "int32") - 1, -1)
    total = ops.sum(ops.cast(real, "int32"), axis=-1, keepdims=True)
    chosen = numbers(num_clusters) * total // num_clusters
    picks = ops.cast(chosen[..., None] == rank[..., None, :], "float32")
    return product(picks, bits)


def _settings(sizes):
    # A query sees the best keys of its cluster, and all keys as its cluster does.
    return {
        "num_clusters": sizes.num_clusters,
        "num_keys": share(sizes, 2),
        "seed": sizes.index,
    }


PATTERNS = {
    "clustered_queries": Pattern(
        ClusteredQueryHeads,
        _settings,
        has_relative_positions=False,
        of_decoders=False,
        refuses=("entmax_alpha", "key_shift", "rotary_positions"),
    )
}
