"""Vectors divided by the root of their mean square, times a learned scale."""

import keras
from keras import ops

EPSILON = 1e-6


def normalized(x, scale, factor=1.0):
    """Normalises the last axis, at least in float32; `factor` multiplies the result.

    Reference: Zhang, Sennrich (https://arxiv.org/abs/1910.07467).
    """
    exact = ops.cast(x, keras.backend.result_type(x.dtype, "float32"))
    mean = ops.mean(ops.square(exact), axis=-1, keepdims=True)
    unit = exact * ops.rsqrt(mean + EPSILON * factor**2) * factor
    return ops.cast(unit * ops.cast(scale, unit.dtype), x.dtype)
