"""The largest and the smallest entry along an axis, also of empty batches.

`keras.ops` refuses tensors without entries, whatever the axis.
"""

import keras
import numpy as np
from keras import ops


def largest(x, axis=None, keepdims=False):
    """Returns `ops.max` of numbers; the smallest possible number if there are none."""
    return ops.max(x, axis=axis, keepdims=keepdims, initial=_limits(x)[0])


def smallest(x, axis=None, keepdims=False):
    """Returns `ops.min` of numbers; the largest possible number if there are none."""
    return ops.min(x, axis=axis, keepdims=keepdims, initial=_limits(x)[1])


def _limits(x):
    dtype = keras.backend.standardize_dtype(x.dtype)
    if "int" not in dtype:
        return -float("inf"), float("inf")
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)
