"""Lengths: integers if they are known, and scalar tensors if they are not.

On TensorFlow a function may be traced once for sequences of all lengths, as Keras does
with `fit` and `predict` from the second length on. The length of an axis is then a
tensor. What is written with these functions works on both, and on integers is computed
by NumPy while the layer is traced; on torch, whose tensors do not mix with NumPy's
arrays, by `keras.ops` in any case.
"""

import numpy as np
from keras import ops

from routing_tf.layers.support.backends import IS_TORCH


def length_of(x, axis):
    """Returns the length of an axis, an integer if it is known."""
    length = x.shape[axis]
    return ops.shape(x)[axis] if length is None else length


def is_known(*lengths):
    """Returns whether all lengths are integers."""
    return all(isinstance(length, (int, np.integer)) for length in lengths)


def library(*lengths):
    """Returns NumPy if all lengths are known and tensors take its arrays, or `ops`."""
    return np if is_known(*lengths) and not IS_TORCH else ops


def smaller(first, second):
    """Returns the smaller of two lengths."""
    return min(first, second) if is_known(first, second) else ops.minimum(first, second)


def larger(first, second):
    """Returns the larger of two lengths."""
    return max(first, second) if is_known(first, second) else ops.maximum(first, second)


def num_parts(length, size):
    """Returns how many parts of a size a length has; the last one may be shorter."""
    # Not `-(-length // size)`: division of integers in ONNX files rounds toward zero.
    return (length + size - 1) // size


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
    is_integer = isinstance(length, (int, np.integer)) and not IS_TORCH
    return (np if is_integer else ops).arange(length, dtype="int32")


def as_numbers(integers):
    """Returns integers that may stand beside `numbers`, `<int32>`."""
    integers = np.asarray(integers, "int32")
    return ops.convert_to_tensor(integers) if IS_TORCH else integers
