"""The largest and the smallest entries along an axis, of batches without a row too.

`keras.ops` refuses to take one of them of a tensor without entries, whatever the axis.
"""

import keras
import numpy as np
from keras import ops

from routing_tf.layers.backends import takes_first_of_equals


def largest(x, axis=None, keepdims=False):
    """Returns `ops.max` of numbers; of none the least number there is."""
    return ops.max(x, axis=axis, keepdims=keepdims, initial=_limits(x)[0])


def smallest(x, axis=None, keepdims=False):
    """Returns `ops.min` of numbers; of none the greatest number there is."""
    return ops.min(x, axis=axis, keepdims=keepdims, initial=_limits(x)[1])


def top_k(x, k, sorted=True):
    """Returns what `ops.top_k` does; of equal entries the first ones, in order."""
    if takes_first_of_equals():
        return ops.top_k(x, k, sorted=sorted)
    places = ops.argsort(-x, axis=-1)[..., :k]
    return ops.take_along_axis(x, places, axis=-1), places


def _limits(x):
    dtype = keras.backend.standardize_dtype(x.dtype)
    if "int" not in dtype:
        return -float("inf"), float("inf")
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)
