"""Clusters that choose all tokens above a threshold: strictly causal.

The threshold is a moving average that gives each cluster its share of the tokens.
"""

import dataclasses

import keras
from keras import ops

from routing_tf.layers.caches import rows
from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.routing import rings
from routing_tf.layers.routing.last_members import LastMembers
from routing_tf.layers.routing.online_kmeans import Clustering
from routing_tf.layers.routing.rule import Assignment
from routing_tf.layers.support import backends
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.parts_of_batches import update_or_hold
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import num_parts
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate

__all__ = ["MovingThresholds", "ThresholdHeads"]


@keras.saving.register_keras_serializable("routing_tf")
class ThresholdHeads(ClusteredHeads):
    """Heads that attend inside clusters of all tokens above a threshold.

    As in `RoutedHeads`, queries and keys are layer-normalised and scored against
    learned centroids. Each centroid takes the tokens that score at least as high as its
    threshold, which is a moving average from training (`MovingThresholds`). A token
    attends to the last `attention_window` members of each of its clusters, and its
    results are averaged; a token in no cluster gets zero. Strictly causal, and only for
    self-attention under a causal mask.

    State: that of `OnlineKMeans` and of `MovingThresholds`; both move when
    `training=True`. Padding moves no centroid and no threshold.

    Args:
        num_heads: number of heads in the group.
        num_clusters: number of centroids of each head.
        attention_window: number of members of a cluster that a token sees, in tokens.
        max_clusters_per_token: number of clusters that a token may sit in. If scores
            were independent, about 8 of 100 tokens would be in more than 2, the
            default.
        threshold_decay: share of the thresholds' old average kept at each training
            step, in [0, 1). Defaults to 0.99.
        **kwargs: arguments of `Clustering`, which say how centroids move, of
            `ClusteredHeads`, such as `share_query_key`, and of `HeadGroup`.

    Call arguments and Returns: as in `RoutedHeads`.

    Raises:
        ValueError: when called, if there is no causal mask or the value is another
            sequence.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.ThresholdHeads(2, num_clusters=4, attention_window=8)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16)), use_causal_mask=True).shape == (1, 32, 16)
    ```

    Reference: the paper of `MovingThresholds`, which uses them for feed-forward
    networks. Attention inside such clusters and the limit of clusters per token are
    this package's own.
    """

    remembers_key_heads = True

    max_clusters_per_token = Argument(check_positive_integer)
    threshold_decay = Argument(check_rate)

    def __init__(
        self,
        num_heads,
        num_clusters,
        attention_window,
        max_clusters_per_token=2,
        threshold_decay=0.99,
        **kwargs,
    ):
        clustering, kwargs = Clustering.taken_from(kwargs)
        super().__init__(num_heads, attention_window, **kwargs)
        self.add_centroids(num_clusters, clustering)
        self.max_clusters_per_token = max_clusters_per_token
        self.threshold_decay = threshold_decay
        self.thresholds = MovingThresholds(
            num_streams=1 + self.routes_queries,
            decay=threshold_decay,
            name="thresholds",
            dtype="float32",
        )

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        self.thresholds.build((None, self.num_key_heads, None, self.num_clusters))

    def scores(self, streams, masks, training=None, adds_losses=True):
        scores = list(super().scores(streams, masks, training, adds_losses))
        if adds_losses:
            return self.thresholds(scores, token_masks=masks, training=training)
        return self.thresholds.margins(scores)

    def causal_rule(self, routing_scope=None, has_segments=False):
        return self.rule(AboveThreshold)

    def attend(self, inputs, training=None):
        self._check_call(inputs)
        return super().attend(inputs, training=training)

    def make_memory(self, inputs, max_length):
        self._check_call(inputs)
        return super().make_memory(inputs, max_length)

    def _check_call(self, inputs):
        if inputs.is_cross_attention or not inputs.use_causal_mask:
            raise ValueError(
                f"`{type(self).__name__}` work in self-attention under a causal mask "
                f"only. Received: use_causal_mask={inputs.use_causal_mask}, "
                f"is_cross_attention={inputs.is_cross_attention}. Pass "
                "`use_causal_mask=True` and no `value`, or take `RoutedHeads` with "
                '`routing="expert_choice"`'
            )


@keras.saving.register_keras_serializable("routing_tf")
class MovingThresholds(ConfiguredLayer):
    """Compares scores with a moving threshold of each cluster.

    The threshold of a cluster is a moving average of the score that the best
    `ceil(n / num_clusters)` of n tokens reach, so the tokens above it are one of
    `num_clusters` even shares. In each training step, this score is taken from every
    sequence and averaged over the batch, weighted with the number of real tokens. It is
    a sum over sequences, so parts of a batch and replicas can be added up; the paper
    takes it from all tokens of a batch at once.

    State (float32, never cast, never in gradients): `thresholds`
    `(streams, heads, clusters)`, and `counts` `(streams, heads)`, the moving average of
    the number of tokens. Both start at 0, and the first training step sets the
    thresholds. They are written only if `training=True` and the layer is trainable,
    like the state of `OnlineKMeans`, after the comparison.

    Args:
        num_streams: number of tensors of scores, 2 for separate queries and keys.
            Defaults to 1.
        decay: share of the old average kept at each training step, in [0, 1). Defaults
            to 0.99.
        **kwargs: those of `keras.layers.Layer`, such as `name`.

    Call arguments:
        scores: list of `<float32>[batch, heads, length, clusters]`.
        token_masks: list of `<bool>`, broadcastable to `[batch, heads, length]`, True
            for real tokens, or of None.
        training: whether the thresholds move.

    Returns:
        List of the scores minus the thresholds, at least 0 for scores that reach them.

    Example:

    ```python
    import numpy as np
    from routing_tf.zoo import MovingThresholds

    scores = np.random.normal(size=(2, 3, 10, 4)).astype("float32")
    (margins,) = MovingThresholds()([scores], training=True)
    assert margins.shape == (2, 3, 10, 4)
    ```

    Reference: Sun et al., "Expert Threshold Routing for Autoregressive Language
    Modeling with Dynamic Computation Allocation and Load Balancing"
    (https://arxiv.org/abs/2603.11535), equation 6 and algorithm 1.
    """

    num_streams = Argument(check_positive_integer)
    decay = Argument(check_rate)

    def __init__(self, num_streams=1, decay=0.99, **kwargs):
        super().__init__(**kwargs)
        self.num_streams = num_streams
        self.decay = decay

    def build(self, scores_shape):
        if isinstance(scores_shape[0], (list, tuple)):
            scores_shape = scores_shape[0]
        _, heads, _, clusters = scores_shape
        shape = (self.num_streams, heads, clusters)
        self.thresholds = self._add_state("thresholds", shape)
        self.counts = self._add_state("counts", shape[:2])

    def _add_state(self, name, shape):
        return self.add_weight(
            name=name,
            shape=shape,
            initializer="zeros",
            dtype="float32",
            trainable=False,
            autocast=False,
        )

    def call(self, scores, token_masks=None, training=None):
        masks = token_masks or [None] * len(scores)
        margins = self.margins(scores)
        if training and self.trainable:
            reached = [_reached(*stream) for stream in zip(scores, masks, strict=True)]
            update_or_hold(self, [ops.stack(x) for x in zip(*reached, strict=True)])
        return margins

    def margins(self, scores):
        """Returns the scores minus the thresholds, which do not move."""
        thresholds = ops.convert_to_tensor(self.thresholds)
        return [own - thresholds[i][:, None] for i, own in enumerate(scores)]

    def move(self, statistics):
        """Moves the thresholds one step; see `OnlineKMeans.move`.

        Args:
            statistics: list of the sums of the scores that shares of the tokens reach,
                each times the number of tokens, and of the sums of these numbers.
        """
        sums, tokens = statistics
        new = (1 - self.decay) * tokens
        counts = self.decay * ops.convert_to_tensor(self.counts) + new
        # A step of only padding changes nothing.
        rate = new / ops.maximum(counts, 1e-30)
        means = sums / ops.maximum(tokens, 1.0)[..., None]
        old = ops.convert_to_tensor(self.thresholds)
        self.thresholds.assign(old + rate[..., None] * (means - old))
        self.counts.assign(counts)

    def compute_output_spec(self, scores, *args, **kwargs):
        return [keras.KerasTensor(x.shape, dtype="float32") for x in scores]


def _reached(scores, mask):
    """Sums up which scores the best share of each sequence reaches.

    Returns `<float32>[H, K]`, weighted with the numbers of tokens, and the numbers
    `[H]`.
    """
    batch, heads, _, clusters = ops.shape(scores)
    length, scores = length_of(scores, 2), ops.stop_gradient(scores)
    real = ops.ones((1, 1, length), "bool") if mask is None else mask
    real = ops.broadcast_to(real, (batch, heads, length))
    tokens = ops.sum(ops.cast(real, "int32"), axis=-1)
    scores = ops.where(real[..., None], scores, large_negative("float32"))
    best, _ = ops.top_k(ops.swapaxes(scores, 2, 3), num_parts(length, clusters))
    last = ops.maximum(num_parts(tokens, clusters) - 1, 0)
    last = ops.broadcast_to(last[..., None, None], (batch, heads, clusters, 1))
    reached = ops.take_along_axis(best, last, axis=-1)[..., 0]
    tokens = ops.cast(tokens, "float32")
    return ops.sum(reached * tokens[..., None], axis=0), ops.sum(tokens, axis=0)


class AboveThreshold(LastMembers):
    """Attention to the last members of all clusters whose thresholds a token reaches.

    Scores are differences from the thresholds. A token is a member of the clusters in
    which its score is not negative, of at most M = `group.max_clusters_per_token`
    clusters, those with its highest scores. Its results are averaged, as in expert
    choice; a token in no cluster gets zero. Other tokens have no influence on this, so
    no cluster overflows.

    A pass is that of `LastMembers` with M copies of each token, one after the other,
    each in another cluster. Copies that are not needed are in one more cluster and do
    not count. The work is M times that of token choice. A cache contains the last
    members of each cluster.
    """

    remembers_scores = True

    def __init__(self, group):
        super().__init__(group)
        #: Number of clusters that a token can be in.
        self.num_copies = min(group.max_clusters_per_token, group.num_clusters)

    def members(self, scores):
        is_member, clusters = self._best(scores)
        chosen = backends.one_hot(clusters, scores.shape[-1], dtype="bool")
        return ops.any(ops.logical_and(chosen, is_member[..., None]), axis=-2)

    def attend(self, tokens, training=None):
        asks, read = is_member, clusters = self._best(tokens.of_queries.scores)
        if not tokens.shares_clusters:
            is_member, clusters = self._best(tokens.of_keys.scores)
        copies = self._copies(tokens, (read, asks), (clusters, is_member))
        output = super().attend(copies, training=training)
        shape = (*ops.shape(asks), output.shape[-1])
        return self.mean_over_clusters(ops.reshape(output, shape), asks, axis=-2)

    def window_in(self, x):
        # These are copies of tokens.
        if x.shape[2] is None:
            return self.window
        return min(self.window, x.shape[2] // self.num_copies)

    def num_keys(self, clusters, read, num_clusters):
        # Copies of a token are not earlier than each other.
        batch, heads, length = ops.shape(clusters)
        shape = (batch, heads, length // self.num_copies, self.num_copies)
        chosen = backends.one_hot(clusters, num_clusters, dtype="int32")
        chosen = ops.sum(ops.reshape(chosen, (*shape, num_clusters)), axis=3)
        earlier, read = ops.cumsum(chosen, axis=2) - chosen, ops.reshape(read, shape)
        return [
            ops.reshape(ops.take_along_axis(x, read, axis=-1), (batch, heads, length))
            for x in (earlier, chosen)
        ]

    def _best(self, scores):
        """Returns which of the best clusters are reached, and these, best first."""
        best, clusters = backends.top_k(scores, self.num_copies)
        return best >= 0, ops.cast(clusters, "int32")

    def _copies(self, tokens, of_queries, of_keys):
        """Returns `RoutedTokens` in which each token has a copy for each cluster."""
        number = self.num_copies

        def repeated(x):
            return None if x is None else ops.repeat(x, number, axis=2)

        def assigned(clusters, is_member):
            own = ops.where(is_member, clusters, self.num_clusters)
            batch, heads, length, _ = ops.shape(own)
            own = ops.reshape(own, (batch, heads, length * number, 1))
            return Assignment(own, self.num_clusters + 1, False)

        segments = tokens.inputs.segments
        names = ("value", "query_mask", "key_mask", "value_mask", "token_bias")
        inputs = dataclasses.replace(
            tokens.inputs,
            segments=segments and _repeated_segments(segments, number),
            **{n: repeated(getattr(tokens.inputs, n)) for n in names},
        )
        query = repeated(tokens.query)
        return dataclasses.replace(
            tokens,
            query=query,
            key=query if tokens.shares_vectors else repeated(tokens.key),
            of_queries=assigned(*of_queries),
            of_keys=assigned(*of_keys),
            query_mask=repeated(tokens.query_mask),
            key_mask=repeated(tokens.key_mask),
            inputs=inputs,
        )

    def fill_cache(self, cache, tokens):
        cache, tokens = self._offered(self.restart(cache), 0, tokens)
        is_member, clusters = self._joined(tokens)
        return rings.joined(cache, clusters, is_member, rows=rows.of_tokens(tokens))

    def step(self, cache, index, tokens):
        inputs = tokens.inputs
        cache, tokens = self._offered(cache, index, tokens)
        asks, read = (
            # where the cluster of the key serves its queries
            head_inputs.for_queries(x, tokens.query.shape[1])
            for x in self._best(tokens.of_queries.scores)
        )
        is_member, clusters = self._joined(tokens)
        joins = backends.one_hot(clusters, self.num_clusters, dtype="int32")
        joins = ops.sum(joins * ops.cast(is_member, "int32")[..., None], axis=3)
        members = rings.NextMembers(
            cache,
            joins,
            read,
            cache["rows"].shape[3],
            self.window,
            self.key_shift,
        )
        new_rows = rows.of_tokens(tokens)
        query = ops.cast(tokens.query, self.compute_dtype)
        output = rows.attend_to_rows(
            self,
            ops.repeat(query, self.num_copies, axis=2)[:, :, :, None],
            _apart(members.rows(cache["rows"], new_rows)),
            _apart(members.visible)[..., None, :],
            _apart(members.distances)[..., None, :],
        )
        output = ops.reshape(output, (*ops.shape(asks), output.shape[-1]))
        output = self.mean_over_clusters(output, asks, axis=-2)
        cache = rings.joined(cache, clusters, is_member, rows=new_rows)
        return inputs.without_padding(output), cache

    def _joined(self, tokens):
        """Returns what `_best` does for keys, of which padding is no member."""
        is_member, clusters = self._best(tokens.of_keys.scores)
        if tokens.key_mask is not None:
            is_member = ops.logical_and(is_member, tokens.key_mask[..., None])
        return is_member, clusters


def _apart(x):
    """From `[B, H, T, M, ...]` to `[B, H, T * M, ...]`: each read on its own."""
    batch, heads, length, number, *rest = ops.shape(x)
    return ops.reshape(x, (batch, heads, length * number, *rest))


def _repeated_segments(segments, number):
    """Returns the segments of copies of each token, side by side."""
    names = [field.name for field in dataclasses.fields(segments)]
    copies = {
        name: ops.repeat(getattr(segments, name), number, axis=2) for name in names
    }
    for name in ("query_starts", "value_starts"):
        copies[name] = copies[name] * number
    return dataclasses.replace(segments, **copies)
