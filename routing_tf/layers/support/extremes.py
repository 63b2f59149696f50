"""The largest and the smallest entry along an axis, also of empty batches.

`keras.ops` refuses tensors without entries, whatever the axis.
"""

import keras
import numpy as np
from keras import ops

from routing_tf.layers.support.backends import IS_TORCH


def largest(x, axis=None, keepdims=False):
    """Returns `ops.max` of numbers; of none the least number there is."""
    return _found(ops.max, x, axis, keepdims, _limits(x)[0])


def smallest(x, axis=None, keepdims=False):
    """Returns `ops.min` of numbers; of none the greatest number there is."""
    return _found(ops.min, x, axis, keepdims, _limits(x)[1])


def place_of_largest(x):
    """Returns where the largest entry of the last axis is, of equal ones the first."""
    if keras.backend.backend() == "tensorflow":
        # Keras looks for -0.0 by its bits, which ONNX, OpenVINO and LiteRT cannot.
        import tensorflow as tf

        return tf.argmax(x, axis=-1, output_type="int32")
    return ops.cast(ops.argmax(x, axis=-1), "int32")


def _found(function, x, axis, keepdims, initial):
    if not IS_TORCH:
        return function(x, axis=axis, keepdims=keepdims, initial=initial)
    # With `initial` it forgets the other axes.
    if 0 in x.shape:
        return ops.full_like(ops.sum(x, axis=axis, keepdims=keepdims), initial)
    return function(x, axis=axis, keepdims=keepdims)


def _limits(x):
    dtype = keras.backend.standardize_dtype(x.dtype)
    if "int" not in dtype:
        return -float("inf"), float("inf")
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)
