"""Sparse attention weights: alpha-entmax, which gives most keys no weight at all."""

import functools
import numbers

import keras
from keras import ops

from routing_tf import layers
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.zoo.thresholds import ThresholdHeads

__all__ = [
    "EntmaxClusterStridedHeads",
    "EntmaxDotProduct",
    "EntmaxFixedHeads",
    "EntmaxFullHeads",
    "EntmaxHashedHeads",
    "EntmaxHeads",
    "EntmaxLocalHeads",
    "EntmaxRandomHeads",
    "EntmaxRoutedHeads",
    "EntmaxStridedHeads",
    "EntmaxThresholdHeads",
]

# Newton's method removes the remaining error of the threshold.
NUM_BISECTIONS = 20
# Of `alpha - 1`: less is the softmax, as far as float32 can tell.
LEAST_EXCESS = 1e-3
# Keys further below the largest logit than half of this distance have no weight.
FURTHEST = -2 / LEAST_EXCESS


def check_entmax_alpha(name, alpha):
    """Returns a number for `entmax` as a float; `"learned"` stays."""
    if isinstance(alpha, str) and alpha == "learned":
        return alpha
    is_number = isinstance(alpha, numbers.Real) and not isinstance(alpha, bool)
    if not is_number or not 1 + LEAST_EXCESS <= alpha <= 2:
        raise ValueError(
            f'`{name}` must be "learned" or a number from {1 + LEAST_EXCESS} to 2. '
            f"Received: {name}={alpha!r}"
        )
    return float(alpha)


@keras.saving.register_keras_serializable("routing_tf")
class EntmaxDotProduct(layers.ScaledDotProduct):
    """Attention whose weights are those of alpha-entmax instead of the softmax.

    Most keys have no weight at all. First derivatives are exact; second ones only for
    `entmax_alpha=2`, because the slope of the threshold counts as a constant.

    Args:
        entmax_alpha: a number from 1.001 to 2 (1.5, the default, is usual, 2 is the
            sparsemax), or `"learned"`, which is 1 plus the sigmoid of a weight of each
            head that starts at 0.
        **kwargs: arguments of `ScaledDotProduct`.

    Call arguments and Returns: as in `ScaledDotProduct`, with heads on axis 1 if
    `entmax_alpha` is `"learned"`, and without `return_logsumexp`.

    Example:

    ```python
    import numpy as np
    from routing_tf import zoo

    x = np.random.normal(size=(2, 6, 8)).astype("float32")
    assert zoo.EntmaxDotProduct(entmax_alpha=2)(x, x, x).shape == (2, 6, 8)
    ```

    Reference: Peters, Niculae, Martins, "Sparse Sequence-to-Sequence Models"
    (https://arxiv.org/abs/1905.05702); Correia, Niculae, Martins, "Adaptively Sparse
    Transformers" (https://arxiv.org/abs/1909.00015).
    """

    entmax_alpha = Argument(check_entmax_alpha)

    def __init__(self, entmax_alpha=1.5, **kwargs):
        super().__init__(**kwargs)
        self.entmax_alpha = entmax_alpha

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        if self.entmax_alpha == "learned":
            self.alpha_scores = self.add_weight(
                name="alpha_scores",
                shape=(query_shape[1],),
                initializer="zeros",
                autocast=False,
            )

    def needs_logits(self, needs_sum, training):
        return super().needs_logits(needs_sum, training) or "entmax is not a softmax"

    def depends_on_place(self, training):
        # There is an alpha for each head.
        return self.entmax_alpha == "learned" or super().depends_on_place(training)

    def normalized(self, logits):
        if self.entmax_alpha != "learned":
            return entmax(logits, self.entmax_alpha)
        alpha = 1 + ops.sigmoid(ops.convert_to_tensor(self.alpha_scores))
        ones = [1] * (len(logits.shape) - 2)
        return entmax(logits, ops.reshape(alpha, (-1, *ones)))

    def normalized_and_sums(self, logits):
        raise ValueError(
            "`return_logsumexp` must be False with `entmax_alpha`, whose weights are "
            "not exponentials. Received: return_logsumexp=True with "
            f"entmax_alpha={self.entmax_alpha!r}"
        )


class EntmaxHeads:
    """A base that gives head groups the weights of alpha-entmax.

    `EntmaxFullHeads`, `EntmaxRoutedHeads` and the like are otherwise like the class
    that they are named after. A class of your own has this base before that of its
    heads, whose queries must weigh all that they see in one softmax.

    Args:
        *args: arguments of the heads.
        entmax_alpha: as in `EntmaxDotProduct`. Defaults to 1.5.
        **kwargs: further arguments of the heads.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers, zoo

    heads = zoo.EntmaxRoutedHeads(2, 4, attention_window=8, entmax_alpha="learned")
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16)), use_causal_mask=True).shape == (1, 32, 16)
    ```
    """

    def __init__(self, *args, entmax_alpha=1.5, **kwargs):
        self.dot_product_class = functools.partial(
            EntmaxDotProduct, entmax_alpha=entmax_alpha
        )
        super().__init__(*args, **kwargs)
        self.entmax_alpha = self.dot_product.entmax_alpha


@keras.saving.register_keras_serializable("routing_tf")
class EntmaxFullHeads(EntmaxHeads, layers.FullHeads):
    """`FullHeads` with alpha-entmax."""


@keras.saving.register_keras_serializable("routing_tf")
class EntmaxLocalHeads(EntmaxHeads, layers.LocalHeads):
    """`LocalHeads` with alpha-entmax."""


@keras.saving.register_keras_serializable("routing_tf")
class EntmaxStridedHeads(EntmaxHeads, layers.StridedHeads):
    """`StridedHeads` with alpha-entmax."""


@keras.saving.register_keras_serializable("routing_tf")
class EntmaxFixedHeads(EntmaxHeads, layers.FixedHeads):
    """`FixedHeads` with alpha-entmax."""


@keras.saving.register_keras_serializable("routing_tf")
class EntmaxRoutedHeads(EntmaxHeads, layers.RoutedHeads):
    """`RoutedHeads` with alpha-entmax.

    `clusters_per_query` must be 1: weights in several clusters cannot be joined.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.clusters_per_query > 1:
            raise ValueError(
                "`clusters_per_query` must be 1 with `entmax_alpha`, because its "
                "weights in several clusters cannot be joined. Received: "
                f"clusters_per_query={self.clusters_per_query} with "
                f"entmax_alpha={self.entmax_alpha!r}"
            )


@keras.saving.register_keras_serializable("routing_tf")
class EntmaxHashedHeads(EntmaxHeads, layers.HashedHeads):
    """`HashedHeads` with alpha-entmax."""


@keras.saving.register_keras_serializable("routing_tf")
class EntmaxClusterStridedHeads(EntmaxHeads, layers.ClusterStridedHeads):
    """`ClusterStridedHeads` with alpha-entmax."""


@keras.saving.register_keras_serializable("routing_tf")
class EntmaxRandomHeads(EntmaxHeads, layers.RandomHeads):
    """`RandomHeads` with alpha-entmax."""


@keras.saving.register_keras_serializable("routing_tf")
class EntmaxThresholdHeads(EntmaxHeads, ThresholdHeads):
    """`ThresholdHeads` with alpha-entmax."""


_WITH_ENTMAX = {
    layers.FullHeads: EntmaxFullHeads,
    layers.LocalHeads: EntmaxLocalHeads,
    layers.StridedHeads: EntmaxStridedHeads,
    layers.FixedHeads: EntmaxFixedHeads,
    layers.RoutedHeads: EntmaxRoutedHeads,
    layers.HashedHeads: EntmaxHashedHeads,
    layers.ClusterStridedHeads: EntmaxClusterStridedHeads,
    layers.RandomHeads: EntmaxRandomHeads,
    ThresholdHeads: EntmaxThresholdHeads,
}


def with_entmax(heads):
    """Returns the class that has alpha-entmax where a class of heads has the softmax.

    Raises a `ValueError` if there is none.
    """
    if isinstance(heads, type) and issubclass(heads, EntmaxHeads):
        return heads
    if heads not in _WITH_ENTMAX:
        raise ValueError(
            f"`entmax_alpha` must be None for `{heads.__name__}`: `zoo` has no class "
            "of these heads with alpha-entmax. Leave it out, or use other heads"
        )
    return _WITH_ENTMAX[heads]


def entmax(logits, alpha):
    """Returns weights `max((alpha - 1) * logits - t, 0) ** (1 / (alpha - 1))`.

    The threshold `t` makes them sum to 1. With `alpha` 2 this is the sparsemax, and
    with `alpha` near 1 almost the softmax. Gradients are those of the exact threshold,
    and exactly zero for keys without weight. `alpha` is above 1 and at most 2, a number
    or `<float32>`, broadcastable to the logits.

    Reference: as in `EntmaxDotProduct`, the first one's definition 2 and proposition 1,
    and the second one's section 3.
    """
    excess = ops.maximum(ops.cast(alpha, "float32") - 1, LEAST_EXCESS)
    exact = ops.cast(logits, "float32")
    # A constant does not change the weights, so it needs no gradient.
    largest = ops.stop_gradient(tensors.largest(exact, axis=-1, keepdims=True))
    # Hidden keys may be infinitely far below, and alpha would have no gradient.
    scores = excess * ops.maximum(exact - largest, FURTHEST)
    power = 1 / excess
    fixed_scores, fixed_power = ops.stop_gradient(scores), ops.stop_gradient(power)
    threshold = _bisected(fixed_scores, fixed_power)
    threshold = _newton(threshold, fixed_scores, fixed_power)
    # One more step, whose derivative is that of the solution.
    threshold = _newton(ops.stop_gradient(threshold), scores, power)
    return ops.cast(_powers(scores - threshold, power), logits.dtype)


def _bisected(scores, power):
    """Returns a threshold just below the right one, between -1 and 0."""

    def halve(step, bounds):
        low, width = bounds
        width = width / 2
        total = ops.sum(_powers(scores - low - width, power), axis=-1, keepdims=True)
        return ops.where(total >= 1, low + width, low), width

    low = ops.full_like(scores[..., :1], -1.0)
    width = ops.ones((), "float32")
    return ops.fori_loop(0, NUM_BISECTIONS, halve, (low, width))[0]


def _newton(threshold, scores, power):
    """One step of Newton's method, which stays below: weights are convex."""
    above = scores - threshold
    total = ops.sum(_powers(above, power), axis=-1, keepdims=True)
    slope = ops.sum(power * _powers(above, power - 1), axis=-1, keepdims=True)
    return threshold + (total - 1) / ops.stop_gradient(slope)


def _powers(above, power):
    """Powers of logits above the threshold, and zero below, with finite gradients."""
    is_above = above > 0
    powers = ops.power(ops.where(is_above, above, 1), power)
    return ops.where(is_above, powers, 0)
