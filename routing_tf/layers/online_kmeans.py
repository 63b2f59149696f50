"""Centroids that follow the tokens assigned to them."""

import random

import keras
from keras import ops

from routing_tf.layers.compatibility import Compatibility
from routing_tf.layers.replicas import sum_over_replicas
from routing_tf.layers.validation import check_choice
from routing_tf.layers.validation import check_positive_integer

LAYER_NORM_EPSILON = 1e-6
UPDATE_RULES = ("ema", "paper")


def normalize(tokens):
    """Layer-normalises the last axis, without scale or bias, in float32.

    Reference: `layer_norm(scaling=False)` of the release.
    """
    tokens = ops.cast(tokens, "float32")
    mean = ops.mean(tokens, axis=-1, keepdims=True)
    variance = ops.mean(ops.square(tokens - mean), axis=-1, keepdims=True)
    return (tokens - mean) * ops.rsqrt(variance + LAYER_NORM_EPSILON)


@keras.saving.register_keras_serializable("routing_tf")
class OnlineKMeans(keras.layers.Layer):
    """Scores tokens against centroids and, in training, moves the centroids.

    Each head has its own centroids. A token is assigned to the centroid with the
    largest dot product; the commitment loss draws tokens to their centroids, and the
    centroids follow an exponential moving average of their tokens.

    State (float32, never cast, never in gradients when `ema=True`): `centroids`
    `(heads, clusters, dim)`, and with the rule `"ema"` also `counts`
    `(heads, clusters)` and `sums` `(heads, clusters, dim)`. It is written only when
    `training=True` and the layer is trainable, from statistics that are summed over
    all replicas: under `tf.distribute` on TensorFlow by an all-reduce, on JAX because
    the layer sees the global batch. A call writes at once: a function that
    `keras.remat` runs again would move the centroids twice, so leave the layer out
    of it.

    Args:
        num_clusters: number of centroids of each head.
        decay: share of the old average kept at each training step, in [0, 1]. Defaults
            to 0.999.
        commitment_weight: factor of the commitment loss, at least 0. Defaults to 1e-4.
        ema: True (the default): moving averages. False: no averages; the codebook loss
            trains the centroids by gradient.
        update_rule: `"ema"` (the default): sums and counts are averaged and divided,
            with Laplace smoothing (the release). `"paper"`: `c <- decay * c +
            (1 - decay) / 2 * (sum of queries + sum of keys)`, as Algorithm 1, line 31,
            has it.
        smoothing_epsilon: pseudo-count of the Laplace smoothing, in tokens. Defaults
            to 1e-5.
        compatibility: flaws of the release to reproduce, as a `Compatibility` or a
            dict of its fields; None (the default) for no flaws.
        **kwargs: arguments of `keras.layers.Layer`, such as `name`.

    Call arguments:
        tokens: `<float>[batch, heads, length, dim]`, normalised (`normalize`); or a
            tuple of one or two such tensors, queries and keys. Both are scored
            before the centroids move, then move them one after the other.
        token_mask: `<bool>`, broadcastable to `[batch, heads, length]`, True for real
            tokens; None for no padding; a tuple where `tokens` is one.
        training: whether the centroids move.

    Returns:
        Scores `<float32>[batch, heads, length, num_clusters]`, or a tuple of them.

    Raises:
        ValueError: if `num_clusters` is not a positive integer, `decay` is not in
            [0, 1], `commitment_weight` is negative, `update_rule` is unknown or is
            `"paper"` with `ema=False`, or `compatibility` is of another kind or has an
            unknown field.

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import OnlineKMeans

    kmeans = OnlineKMeans(num_clusters=4)
    tokens = np.random.normal(size=(2, 3, 10, 6)).astype("float32")
    assert kmeans(tokens, training=True).shape == (2, 3, 10, 4)
    ```

    Reference: paper, section 4.1; `online_kmeans` of the release.
    """

    def __init__(
        self,
        num_clusters,
        decay=0.999,
        commitment_weight=1e-4,
        ema=True,
        update_rule="ema",
        smoothing_epsilon=1e-5,
        compatibility=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive_integer("num_clusters", num_clusters)
        check_choice("update_rule", update_rule, UPDATE_RULES)
        if not 0 <= decay <= 1:
            raise ValueError(
                f"`decay` must be in the range [0, 1]. Received: decay={decay}"
            )
        if not ema and update_rule != "ema":
            raise ValueError(
                "`update_rule` is the rule of the moving averages and needs "
                f"`ema=True`. Received: update_rule={update_rule!r}, ema={ema}"
            )
        if commitment_weight < 0:
            raise ValueError(
                "`commitment_weight` must not be negative. "
                f"Received: commitment_weight={commitment_weight}"
            )
        self.num_clusters = num_clusters
        self.decay = decay
        self.commitment_weight = commitment_weight
        self.ema = ema
        self.update_rule = update_rule
        self.smoothing_epsilon = smoothing_epsilon
        self.compatibility = Compatibility.of(compatibility)

    def build(self, tokens_shape):
        if isinstance(tokens_shape[0], (list, tuple)):
            tokens_shape = tokens_shape[0]
        _, heads, _, dim = tokens_shape
        shape = (heads, self.num_clusters, dim)
        # One seed for both: the sums start at the centroids.
        seed = random.randint(1, 2**31 - 1)

        def initial_centroids(shape, dtype=None):
            return normalize(keras.random.normal(shape, seed=seed))

        def add_state(name, shape, initializer, trainable=False):
            return self.add_weight(
                name=name,
                shape=shape,
                initializer=initializer,
                dtype="float32",
                trainable=trainable,
                autocast=False,
            )

        self.centroids = add_state(
            "centroids", shape, initial_centroids, trainable=not self.ema
        )
        if self.ema and self.update_rule == "ema":
            start = "zeros" if self.compatibility.counts_start_at_zero else "ones"
            self.counts = add_state("counts", shape[:2], start)
            self.sums = add_state("sums", shape, initial_centroids)

    def call(self, tokens, token_mask=None, training=None):
        single = not isinstance(tokens, (list, tuple))
        streams, masks = ([tokens], [token_mask]) if single else (tokens, token_mask)
        masks = masks or [None] * len(streams)
        streams = [ops.cast(stream, "float32") for stream in streams]
        centroids = ops.convert_to_tensor(self.centroids)
        scores = [self._scores(stream, centroids) for stream in streams]
        nearest = [
            ops.one_hot(ops.argmax(s, axis=-1), self.num_clusters, dtype="float32")
            for s in scores
        ]
        loss = sum(
            self._loss(*stream, centroids)
            for stream in zip(streams, nearest, masks, strict=True)
        )
        if self.compatibility.commitment_counted_twice and len(streams) == 1:
            loss *= 2
        self.add_loss(loss)
        if training and self.trainable and self.ema:
            self._update(streams, nearest, masks)
        return scores[0] if single else tuple(scores)

    def scores(self, tokens):
        """Returns the scores of tokens, without adding a loss or moving state.

        Args:
            tokens: as in a call.
        """
        centroids = ops.convert_to_tensor(self.centroids)
        return self._scores(ops.cast(tokens, "float32"), centroids)

    def _scores(self, tokens, centroids):
        return ops.einsum("bhld,hkd->bhlk", tokens, ops.stop_gradient(centroids))

    def _loss(self, tokens, nearest, mask, centroids):
        own = ops.einsum("bhlk,hkd->bhld", nearest, centroids)
        loss = self.commitment_weight * self._mean(
            ops.square(tokens - ops.stop_gradient(own)), mask
        )
        if not self.ema:
            loss += self._mean(ops.square(ops.stop_gradient(tokens) - own), mask)
        return loss

    def _mean(self, squares, mask):
        if mask is None or self.compatibility.padding_is_routed:
            return ops.mean(squares)
        weights = ops.cast(mask, squares.dtype)[..., None] * ops.ones_like(squares)
        return ops.sum(squares * weights) / ops.maximum(ops.sum(weights), 1.0)

    def _update(self, streams, nearest, masks):
        statistics = []
        for tokens, assigned, mask in zip(streams, nearest, masks, strict=True):
            if mask is not None:
                assigned = assigned * ops.cast(mask, assigned.dtype)[..., None]
            statistics += [
                self._count(assigned),
                ops.einsum("bhlk,bhld->hkd", assigned, tokens),
            ]
        statistics = [ops.stop_gradient(statistic) for statistic in statistics]
        statistics = sum_over_replicas(statistics)
        counts, sums = statistics[0::2], statistics[1::2]
        if self.update_rule == "paper":
            self._move_as_in_the_paper(sums)
        else:
            for count, total in zip(counts, sums, strict=True):
                self._move_averages(count, total)

    def _count(self, assigned):
        if self.compatibility.mixed_head_counts:
            heads = assigned.shape[1]
            return ops.sum(
                ops.reshape(assigned, (-1, heads, self.num_clusters)), axis=0
            )
        return ops.sum(assigned, axis=(0, 2))

    def _move_averages(self, count, total):
        keep = self.decay
        counts = keep * ops.convert_to_tensor(self.counts) + (1 - keep) * count
        sums = keep * ops.convert_to_tensor(self.sums) + (1 - keep) * total
        self.counts.assign(counts)
        self.sums.assign(sums)
        epsilon = self.smoothing_epsilon
        tokens = ops.sum(counts, axis=-1, keepdims=True)
        smoothed = (counts + epsilon) / (tokens + self.num_clusters * epsilon) * tokens
        # Before the first token there is nothing to divide by; the release divides
        # by zero there only if a whole batch is padding.
        empty = ops.cast(tokens == 0, sums.dtype)
        moved = sums / (smoothed + empty)[..., None]
        old = ops.convert_to_tensor(self.centroids)
        self.centroids.assign(ops.where(empty[..., None] > 0, old, moved))

    def _move_as_in_the_paper(self, sums):
        # With shared queries and keys the one set of tokens stands for both halves.
        total = sums[0] + sums[-1]
        self.centroids.assign(
            self.decay * ops.convert_to_tensor(self.centroids)
            + (1 - self.decay) / 2 * total
        )

    def get_config(self):
        return {
            **super().get_config(),
            "num_clusters": self.num_clusters,
            "decay": self.decay,
            "commitment_weight": self.commitment_weight,
            "ema": self.ema,
            "update_rule": self.update_rule,
            "smoothing_epsilon": self.smoothing_epsilon,
            "compatibility": self.compatibility.to_dict(),
        }

    def compute_output_shape(self, tokens_shape):
        if isinstance(tokens_shape[0], (list, tuple)):
            return tuple((*shape[:-1], self.num_clusters) for shape in tokens_shape)
        return (*tokens_shape[:-1], self.num_clusters)
