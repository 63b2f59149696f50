"""Lengths: integers if they are known, and scalar tensors if they are not.

TensorFlow may trace a function once for sequences of all lengths, as Keras does in
`fit` and `predict` from the second length on. The length of an axis is then a tensor.
Code that uses these functions works on both; with integers, NumPy computes while the
layer is traced.
"""

import numpy as np
from keras import ops


def length_of(x, axis):
    """Returns the length of an axis, an integer if it is known."""
    length = x.shape[axis]
    return ops.shape(x)[axis] if length is None else length


def is_known(*lengths):
    """Whether all lengths are integers."""
    return all(isinstance(length, (int, np.integer)) for length in lengths)


def library(*lengths):
    """Returns NumPy if all lengths are known, and otherwise `keras.ops`."""
    return np if is_known(*lengths) else ops


def smaller(first, second):
    """Returns the smaller of two lengths."""
    if is_known(first, second):
        return min(first, second)
    return ops.minimum(first, second)


def larger(first, second):
    """Returns the larger of two lengths."""
    if is_known(first, second):
        return max(first, second)
    return ops.maximum(first, second)


def of_length(x, axis, length):
    """Asserts that an axis of `x` has this length, and returns `x`.

    A length that is unknown while tracing is checked when the function runs.
    """
    if x.shape[axis] is not None and is_known(length):
        return x
    # TensorFlow would optimize a reshape away.
    places = ops.stack([numbers(length), numbers(length_of(x, axis))])
    return ops.take(x, places[0], axis=axis)


def numbers(length):
    """Returns the numbers from 0 to `length` - 1, `<int32>[length]`."""
    return library(length).arange(length, dtype="int32")
