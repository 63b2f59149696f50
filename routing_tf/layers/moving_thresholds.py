"""Thresholds that give each cluster its share of the tokens, on average."""

import keras
from keras import ops

from routing_tf.layers.held_updates import update_or_hold
from routing_tf.layers.lengths import length_of
from routing_tf.layers.masks import large_negative
from routing_tf.layers.serialization import ConfiguredLayer
from routing_tf.layers.validation import check_positive_integer
from routing_tf.layers.validation import check_rate


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

    Raises:
        ValueError: if `num_streams` is not a positive integer or `decay` not in [0, 1).

    Example:

    ```python
    import numpy as np
    from routing_tf.layers.moving_thresholds import MovingThresholds

    scores = np.random.normal(size=(2, 3, 10, 4)).astype("float32")
    (margins,) = MovingThresholds()([scores], training=True)
    assert margins.shape == (2, 3, 10, 4)
    ```

    Reference: Sun et al., "Expert Threshold Routing for Autoregressive Language
    Modeling with Dynamic Computation Allocation and Load Balancing"
    (https://arxiv.org/abs/2603.11535), equation 6 and algorithm 1.
    """

    def __init__(self, num_streams=1, decay=0.99, **kwargs):
        super().__init__(**kwargs)
        check_rate("decay", decay)
        self.num_streams = check_positive_integer("num_streams", num_streams)
        self.decay = decay

    def build(self, scores_shape):
        if isinstance(scores_shape[0], (list, tuple)):
            scores_shape = scores_shape[0]
        _, heads, _, clusters = scores_shape
        shape = (self.num_streams, heads, clusters)
        for name, own_shape in (("thresholds", shape), ("counts", shape[:2])):
            weight = self.add_weight(
                name=name,
                shape=own_shape,
                initializer="zeros",
                dtype="float32",
                trainable=False,
                autocast=False,
            )
            setattr(self, name, weight)

    def call(self, scores, token_masks=None, training=None):
        masks = token_masks or [None] * len(scores)
        margins = self.margins(scores)
        if training and self.trainable:
            reached = [_reached(*stream) for stream in zip(scores, masks, strict=True)]
            update_or_hold(self, [ops.stack(x) for x in zip(*reached, strict=True)])
        return margins

    def margins(self, scores):
        """Returns the scores minus the thresholds, without moving the thresholds.

        Args:
            scores: as in a call.
        """
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
    best, _ = ops.top_k(ops.swapaxes(scores, 2, 3), -(-length // clusters))
    last = ops.maximum(-(-tokens // clusters) - 1, 0)
    last = ops.broadcast_to(last[..., None, None], (batch, heads, clusters, 1))
    reached = ops.take_along_axis(best, last, axis=-1)[..., 0]
    tokens = ops.cast(tokens, "float32")
    return ops.sum(reached * tokens[..., None], axis=0), ops.sum(tokens, axis=0)
