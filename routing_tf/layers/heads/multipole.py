"""Multipole heads: near pairs and the best clusters exactly, all others by means."""

import dataclasses
import functools

import keras
from keras import ops

from routing_tf.layers.caches import pending_keys
from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.heads.head_group import refuse_segments
from routing_tf.layers.routing import multipole_cache
from routing_tf.layers.routing.last_members import LastMembers
from routing_tf.layers.routing.multipole import MultipolePass
from routing_tf.layers.routing.multipole import TwoSidedPass
from routing_tf.layers.routing.multipole import attend_next
from routing_tf.layers.routing.multipole import attend_to_memory
from routing_tf.layers.routing.multipole import reads_of_cache
from routing_tf.layers.routing.multipole import reads_of_pairs
from routing_tf.layers.routing.multipole_blocks import Pairs
from routing_tf.layers.routing.multipole_blocks import Queries
from routing_tf.layers.routing.multipole_blocks import Turn
from routing_tf.layers.routing.multipole_blocks import document_places
from routing_tf.layers.routing.online_kmeans import Clustering
from routing_tf.layers.routing.online_kmeans import normalize
from routing_tf.layers.routing.rule import RoutedTokens
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.head_inputs import read_next_values
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.masks import without_padding
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer

NORMALIZATIONS = (None, "layer")
CHOICES = ("mass", "centroid")
# Pairs are flushed in blocks of this many, unless fewer are near.
BLOCK_LENGTH = 64


@keras.saving.register_keras_serializable("routing_tf")
class MultipoleHeads(ClusteredHeads):
    """Heads that see everything: near pairs and the best clusters exactly.

    One softmax weighs the first and the most recent pairs of keys and values, the last
    members of the clusters that are best for the query, and of each cluster the mean of
    all its pairs that are not read. The cost is linear in the length, a cache has a
    constant size, and a query feels also clusters that it does not read, through their
    means. With `normalization=None` the logits are those of full attention, so the
    weights of a model that was trained with it can be used:

    - Near are the first `num_sinks` pairs of a document, and the most recent ones:
      at least `num_recent`, and up to `num_recent + block_length - 1`, because pairs
      stop being near in blocks.
    - A pair that is no longer near is in the cluster of its key. The mass of a cluster
      is the number of its pairs times the exponential of their mean logit. A query
      reads the last pairs of the `clusters_per_query` clusters of the greatest mass, in
      this order: `attention_window` at most, of each at most `members_per_cluster`.
    - All other pairs of a cluster are one more entry of the softmax: their mean value,
      with the weight of their mean logit for each.

    The output equals that of `FullHeads` while all pairs are near, and with
    `clusters_per_query=num_clusters` and `attention_window` at least `num_clusters`
    times the length. It is strictly causal in self-attention under a causal mask.
    Without the mask, near are `num_recent // 2` pairs on each side; in attention to
    another sequence only the first pairs.

    State: that of `OnlineKMeans`, which moves when `training=True`. Padding is in no
    cluster. A document starts at its first real token.

    Args:
        num_heads: number of heads in the group.
        num_clusters: number of centroids of each head of keys.
        attention_window: number of pairs that a query reads of the clusters that it
            chooses, in tokens.
        clusters_per_query: number of clusters that a query reads, at most
            `num_clusters` and `attention_window`. Defaults to 4.
        num_recent: number of recent pairs that are always seen. Defaults to 128.
        num_sinks: number of first pairs that are always seen. Defaults to 4.
        block_length: number of pairs that stop being near at once, at most `num_recent`
            unless that is 0; blocks of 16 or more are faster. None (the default) for
            64, or `num_recent` if that is less, or 1 if that is 0.
        summaries: whether pairs that are not read are seen through means (the default),
            or dropped.
        keeps_all: whether chosen clusters are read whole, whatever `attention_window`
            is. A cache then grows with the length. Defaults to False.
        share_query_key: whether the projection of the queries also makes the keys.
            Defaults to False.
        normalization: None (the default): queries and keys as they are projected,
            logits times `key_dim**-0.5`; or `"layer"`: layer-normalised, with logits
            that are not scaled, as in `RoutedHeads`.
        far_distance: a distance at which rotary positions compare all pairs that are
            not near, means, and first pairs that are further away, for contexts that
            are longer than those of the training; None (the default) for true
            distances.
        sink_logits: whether each head has a learned logit that takes a share of the
            softmax and has no value, as in GPT-OSS. Defaults to False.
        members_per_cluster: number of pairs that a query reads of one cluster, at most
            `attention_window`. With more than an equal share, busy clusters of great
            mass are read further back, and the last ones get what is left. None (the
            default) for an equal share, `attention_window // clusters_per_query`.
        choice: which clusters are best for a query: `"mass"` (the default), those of
            the greatest mass; or `"centroid"`, those with the highest scores, as in
            token choice. With shared queries and keys the first one is then the
            cluster of its own key, and heads that are trained from scratch learn
            faster.
        **kwargs: arguments of `Clustering`, which say how centroids move;
            `exploring_queries` of `ClusteredHeads`; and arguments of `HeadGroup`,
            without relative positions.

    Call arguments and Returns: as in `HeadGroup`.

    Raises:
        ValueError: if `far_distance` comes without rotary positions, or `keeps_all`
            with dropout.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.MultipoleHeads(
        2, num_clusters=4, attention_window=8, num_recent=8, key_shift=1
    )
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16)), use_causal_mask=True).shape == (1, 32, 16)
    ```

    Reference: this package's own. Its parts come from Multipole Attention
    (https://arxiv.org/abs/2506.13059), without training, and Transformer-VQ
    (https://arxiv.org/abs/2309.16354).
    """

    has_one_softmax = False
    remembers_key_heads = True
    # Any number: many tokens are computed in parallel.
    tokens_per_step = None

    clusters_per_query = Argument(check_positive_integer)
    num_recent = Argument(check_non_negative_integer)
    num_sinks = Argument(check_non_negative_integer)
    block_length = Argument(check_optional_integer)
    summaries = Argument(check_flag)
    keeps_all = Argument(check_flag)
    normalization = Argument(check_choice, NORMALIZATIONS)
    far_distance = Argument(check_optional_integer)
    sink_logits = Argument(check_flag)
    members_per_cluster = Argument(check_optional_integer)
    choice = Argument(check_choice, CHOICES)

    def __init__(
        self,
        num_heads,
        num_clusters,
        attention_window,
        clusters_per_query=4,
        num_recent=128,
        num_sinks=4,
        block_length=None,
        summaries=True,
        keeps_all=False,
        share_query_key=False,
        normalization=None,
        far_distance=None,
        sink_logits=False,
        members_per_cluster=None,
        choice="mass",
        **kwargs,
    ):
        clustering, kwargs = Clustering.taken_from(kwargs)
        super().__init__(
            num_heads, attention_window, share_query_key=share_query_key, **kwargs
        )
        self.add_centroids(num_clusters, clustering)
        self.clusters_per_query = clusters_per_query
        self.num_recent = num_recent
        self.num_sinks = num_sinks
        self.block_length = block_length
        self.summaries = summaries
        self.keeps_all = keeps_all
        self.normalization = normalization
        self.far_distance = far_distance
        self.sink_logits = sink_logits
        self.members_per_cluster = members_per_cluster
        self.choice = choice
        self._check_together()

    def _check_together(self):
        """Refuses arguments that do not go together."""
        number = self.clusters_per_query
        if number > min(self.num_clusters, self.attention_window):
            raise ValueError(
                "`clusters_per_query` must be at most `num_clusters` and "
                f"`attention_window`. Received: clusters_per_query={number} with "
                f"num_clusters={self.num_clusters} and "
                f"attention_window={self.attention_window}"
            )
        if (self.members_per_cluster or 0) > self.attention_window:
            raise ValueError(
                "`members_per_cluster` must be at most `attention_window`. Received: "
                f"members_per_cluster={self.members_per_cluster} with "
                f"attention_window={self.attention_window}"
            )
        if self.num_recent and (self.block_length or 0) > self.num_recent:
            raise ValueError(
                "`block_length` must be at most `num_recent`, unless that is 0. "
                f"Received: block_length={self.block_length} with "
                f"num_recent={self.num_recent}"
            )
        if self.far_distance is not None and not self.rotary_positions:
            raise ValueError(
                "`far_distance` must be None without `rotary_positions` or `rotary`: "
                "logits do not depend on distances then. Received: "
                f"far_distance={self.far_distance}"
            )
        if self.keeps_all and self.dropout:
            raise ValueError(
                "`dropout` must be 0 with `keeps_all=True`: the weights of whole "
                f"clusters are not kept. Received: dropout={self.dropout}"
            )
        if self.query_cluster != "query":
            raise ValueError(
                '`query_cluster` must be "query" for MultipoleHeads: queries choose '
                f"among means. Received: query_cluster={self.query_cluster!r}"
            )
        if self.max_relative_position is not None:
            raise ValueError(
                "`max_relative_position` must be None for MultipoleHeads: means "
                "of keys have no position. Received: "
                f"max_relative_position={self.max_relative_position}. Use "
                "`rotary_positions=True`"
            )

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        if self.sink_logits:
            self.logits_of_sinks = self.add_weight(
                name="sink_logits",
                shape=(self.num_heads,),
                initializer="zeros",
                autocast=False,
            )

    @property
    def flushed_block(self):
        """Number of pairs that stop being near at once."""
        if self.block_length is not None:
            return self.block_length
        return max(1, min(self.num_recent, BLOCK_LENGTH))

    def borders(self, places):
        """Returns the first place that is near, of queries at places `<int32>`."""
        size = self.flushed_block
        return ops.maximum(places + 1 - self.num_recent, 0) // size * size

    @property
    def cluster_window(self):
        """Number of pairs that a query reads of each chosen cluster, at most."""
        share = self.attention_window // self.clusters_per_query
        return self.members_per_cluster or share

    def num_read(self, counts):
        """Returns how many of the pairs of chosen clusters are read, `<int32>`.

        Both are `[..., clusters_per_query]`, in the order of the choice.
        """
        if self.keeps_all:
            return counts
        most = ops.minimum(counts, self.cluster_window)
        if self.cluster_window * self.clusters_per_query <= self.attention_window:
            return most
        before = ops.cumsum(most, axis=-1) - most
        return ops.clip(self.attention_window - before, 0, most)

    def capped(self, logits):
        """Returns logits within the soft cap, if there is one."""
        return (
            logits if self.logit_soft_cap is None else self.dot_product.capped(logits)
        )

    def sinks_of_rows(self, number):
        """Returns the sink logits of rows, `<float32>[1, key heads, 1, number]`."""
        sinks = ops.convert_to_tensor(self.logits_of_sinks)
        sinks = ops.reshape(ops.cast(sinks, "float32"), (self.num_key_heads, -1))
        return ops.tile(sinks, (1, number // sinks.shape[1]))[None, :, None]

    def attend(self, inputs, training=None):
        queries, keys = self.compared(inputs, training)
        output = self._attend(inputs, queries, keys, training)
        real = inputs.query_mask if inputs.is_cross_attention else inputs.real_tokens()
        output = ops.cast(without_padding(output, real), self.compute_dtype)
        if training and self.exploring_queries and not inputs.is_cross_attention:
            return self._explored(output, inputs, queries, keys, training)
        return output

    def _explored(self, output, inputs, queries, keys, training):
        # Values stand at their keys there.
        inputs = read_next_values(inputs) if self.key_shift else inputs
        inputs = self.for_queries(dataclasses.replace(inputs, key=keys["key"]))
        tokens = RoutedTokens(queries[0], inputs.key, *[None] * 4, inputs, False, False)
        return self.explored(output, tokens, inputs, training)

    def _attend(self, inputs, queries, keys, training=None):
        key_mask, value_mask = inputs.key_mask, inputs.value_mask
        length, real = length_of(inputs.value, 2), combine_masks(key_mask, value_mask)
        places, starts = document_places(length, real, inputs.segments)
        if self.key_shift:
            own = dataclasses.replace(inputs, key=keys["key"])
            value_mask = head_inputs.offer_previous_keys(own).value_mask
            keys = {name: head_inputs.one_later(x) for name, x in keys.items()}
            key_mask = None
        mask = combine_masks(key_mask, value_mask)
        segments = None if inputs.segments is None else inputs.segments.value
        offered = places if mask is None else ops.where(mask, places, -1)
        pairs = self._pairs(inputs, keys, offered, segments)
        if inputs.is_cross_attention:
            if segments is not None:
                refuse_segments(self, "means of another sequence cross their borders")
            return self._attend_to_memory(queries, pairs, starts, training)
        queries = Queries(*queries, places, segments=segments, starts=starts)
        kind = MultipolePass if inputs.use_causal_mask else TwoSidedPass
        if segments is not None:
            return kind(self, queries, pairs).attend(training)
        if real is None:
            return kind(self, queries, pairs, is_whole=True).attend(training)
        turn = Turn(starts, length)
        queries, pairs = turn.of_queries(queries), turn.of_pairs(pairs)
        return turn.back(kind(self, queries, pairs, is_whole=True).attend(training))

    def _attend_to_memory(self, queries, pairs, starts, training):
        clusters = pairs.far_clusters(self)
        table = multipole_cache.table_of(pairs, clusters, self.num_clusters)
        reads_of = functools.partial(reads_of_pairs, self, pairs, clusters)
        first = pairs.first(starts, self.num_sinks)
        query, _, scores = queries
        return attend_to_memory(self, query, scores, first, table, reads_of, training)

    def _pairs(self, inputs, keys, places, segments=None):
        bias = inputs.token_bias
        return Pairs(
            keys["key"],
            keys.get("far_key", keys["key"]),
            inputs.value,
            keys["clusters"][..., 0],
            places,
            None if bias is None else ops.cast(bias, "float32"),
            segments,
        )

    def compared(self, inputs, training=None):
        """Returns queries, as they see near pairs and far ones, and what pairs have.

        The former are followed by `scores_of`. The latter is a dict of
        `[batch, key heads, length, ...]`: keys, keys as seen from far unless they are
        the same, and clusters. Training moves the centroids.
        """
        query, key = self.vectors(inputs)
        is_key = self.share_query_key and not inputs.is_cross_attention
        scores = self.scores_of(key if is_key else query)
        (assigned,) = self.assign(
            [normalize(key)], [inputs.key_mask], training, inputs.adds_losses
        )
        keys = {"key": key, "clusters": assigned.numbers[..., None]}
        if not self.rotary_positions:
            return (query, query, scores), keys
        keys["key"], turned = self.rotated(key, inputs), self.rotated(query, inputs)
        if self.far_distance is None:
            return (turned, turned, scores), keys
        distance, zero = (
            ops.full((1, 1, 1), x, "int32") for x in (self.far_distance, 0)
        )
        keys["far_key"] = self.turned(key, positions=zero)
        return (turned, self.turned(query, positions=distance), scores), keys

    def scores_of(self, query):
        """Returns scores of clusters, `<float32>[B, H, L, K]`; None where mass counts.

        The centroids do not move.
        """
        if self.choice == "mass":
            return None
        rows = head_inputs.in_one_sequence(normalize(query), self.num_key_heads)
        return head_inputs.in_heads(self.kmeans.scores(rows), query)

    def vectors(self, inputs):
        """Returns queries and keys as they are compared, not yet turned."""
        query, key = inputs.query, inputs.key
        if self.share_query_key:
            # They are scaled as queries are.
            key = (query if key is None else key) * self.key_dim**0.5
        if self.normalization == "layer":
            query, key = normalize(query), normalize(key)
            return super().normalized(query, key) if self.qk_norm else (query, key)
        return HeadGroup.normalized(self, query, key) if self.qk_norm else (query, key)

    def shifted(self, inputs):
        # Pairs stand at their values; `attend` moves keys and clusters.
        return inputs

    def causal_rule(self, routing_scope=None, has_segments=False):
        # It says in which clusters tokens are. How they attend, `attend` says.
        return self.rule(LastMembers)

    def make_cache(self, batch_size, max_length, positions=None):
        return multipole_cache.make(self, batch_size, max_length)

    def restart_cache(self, cache):
        return multipole_cache.restarted(cache)

    def max_positions(self, cache):
        return cache["rows"].shape[2] if self.keeps_all else None

    def start(self, cache, inputs):
        queries, keys = self.compared(inputs)
        output = self._attend(inputs, queries, keys)
        last = inputs.in_last_segment()
        cache, pairs, masks = self._offered(self.restart_cache(cache), 0, last, keys)
        output = inputs.without_padding(output)
        cache = multipole_cache.absorbed(self, cache, 0, pairs, *masks)
        return ops.cast(output, self.compute_dtype), cache

    def step(self, cache, index, inputs):
        queries, keys = self.compared(inputs)
        before = cache
        cache, pairs, masks = self._offered(cache, index, inputs, keys)
        cache = multipole_cache.absorbed(self, cache, index, pairs, *masks)
        if inputs.query.shape[2] == 1:
            output = attend_next(self, cache, index, *queries)
        else:
            front = multipole_cache.Front(self, before, cache)
            places = index + numbers(inputs.query.shape[2]) - front.starts
            offered, _ = masks
            offered = ops.where(offered, places, -1)
            pairs = dataclasses.replace(pairs, places=offered)
            queries = Queries(*queries, places, starts=0)
            output = MultipolePass(self, queries, pairs, front=front).attend()
        output = inputs.without_padding(output)
        return ops.cast(output, self.compute_dtype), cache

    def _offered(self, cache, index, inputs, keys):
        """Returns the cache with the newest key, `Pairs`, and two masks.

        These say which tokens are pairs, and which are real.
        """
        mask = combine_masks(inputs.key_mask, inputs.value_mask)
        offered = real = known_mask(inputs.value, mask)
        if self.key_shift:
            keys, _, follows, pending = pending_keys.offer(
                cache["pending"], index, inputs.key_mask, **keys
            )
            cache = {**cache, "pending": pending}
            offered = combine_masks(
                known_mask(inputs.value, inputs.value_mask), follows
            )
        return cache, self._pairs(inputs, keys, None), (offered, real)

    def make_memory(self, inputs, max_length):
        _, keys = self.compared(dataclasses.replace(inputs, query=inputs.key))
        mask = combine_masks(inputs.key_mask, inputs.value_mask)
        length = length_of(inputs.value, 2)
        places, starts = document_places(length, mask, None)
        places = places if mask is None else ops.where(mask, places, -1)
        pairs = self._pairs(inputs, keys, places)
        return multipole_cache.of_memory(self, pairs, starts)

    def restart_memory(self, cache):
        return cache

    def read_memory(self, cache, index, inputs):
        key = inputs.query[:, : self.num_key_heads]
        query, _ = self.vectors(dataclasses.replace(inputs, key=key))
        first = multipole_cache.pairs_of(self, cache["first"])
        reads_of = functools.partial(reads_of_cache, self, cache)
        table = multipole_cache.table(cache)
        scores = self.scores_of(query)
        output = attend_to_memory(self, query, scores, first, table, reads_of)
        output = without_padding(output, inputs.query_mask)
        return ops.cast(output, self.compute_dtype), cache
