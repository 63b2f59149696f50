"""Sparse attention weights: alpha-entmax, which gives most keys no weight at all."""

from keras import ops

from routing_tf.layers import extremes

# Newton's method removes the remaining error of the threshold.
NUM_BISECTIONS = 20
# Of `alpha - 1`: less is the softmax, as far as float32 can tell.
LEAST_EXCESS = 1e-3
# Keys further below the largest logit than half of this distance have no weight.
FURTHEST = -2 / LEAST_EXCESS


def entmax(logits, alpha):
    """Returns weights `max((alpha - 1) * logits - t, 0) ** (1 / (alpha - 1))`.

    The threshold `t` makes them sum to 1. With `alpha` 2 this is the sparsemax, and
    with `alpha` near 1 almost the softmax. Gradients with respect to the logits and to
    `alpha` are those of the exact threshold, and exactly zero for keys without weight.

    Args:
        logits: `<float>[..., keys]`.
        alpha: number above 1 and at most 2, or `<float32>`, broadcastable to the
            logits.

    Returns:
        `<float>[..., keys]`, in the dtype of the logits; computed in float32.

    Reference: Peters, Niculae, Martins, "Sparse Sequence-to-Sequence Models"
    (https://arxiv.org/abs/1905.05702), definition 2 and proposition 1; Correia,
    Niculae, Martins, "Adaptively Sparse Transformers"
    (https://arxiv.org/abs/1909.00015), section 3.
    """
    excess = ops.maximum(ops.cast(alpha, "float32") - 1, LEAST_EXCESS)
    exact = ops.cast(logits, "float32")
    # A constant does not change the weights, so it needs no gradient.
    largest = ops.stop_gradient(extremes.largest(exact, axis=-1, keepdims=True))
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
