"""Parts of one axis of a tensor.

Indexing finds the same parts. On TensorFlow, though, one thread copies its gradient
into zeros, and this takes longer than the attention around it.
"""

import itertools

import keras
from keras import ops

from routing_tf.layers.support.lengths import is_known
from routing_tf.layers.support.lengths import length_of


def split_axis(x, sizes, axis):
    """Returns the parts of an axis, as a list; `sizes` add up to its length."""
    if len(sizes) < 2:
        return [x]
    if keras.backend.standardize_dtype(x.dtype) == "bool":
        # They have no gradient, and LiteRT does not split them.
        ends = list(itertools.accumulate(sizes))
        return [cut_axis(x, end - n, end, axis) for n, end in zip(sizes, ends)]
    # With borders Keras adds operations to the graph of TensorFlow.
    are_equal = len(set(sizes)) == 1
    borders = len(sizes) if are_equal else list(itertools.accumulate(sizes))[:-1]
    return list(ops.split(x, borders, axis=axis))


def is_broadcastable(own, shape):
    """Returns whether what has the shape `own` can be broadcast to another shape.

    An axis of unknown length fits another one of unknown length.
    """
    own = [1] * (len(shape) - len(own)) + list(own)
    return len(own) == len(shape) and all(
        length in (1, other) for length, other in zip(own, shape, strict=True)
    )


def cut_axis(x, start, stop, axis):
    """Returns one part of an axis, from place `start` up to `stop`, not included."""
    size = length_of(x, axis)
    if not is_known(start, stop, size):
        places = [slice(None)] * len(x.shape)
        places[axis] = slice(start, stop)
        return x[tuple(places)]
    if (start, stop) == (0, size):
        return x
    starts, sizes = [0] * len(x.shape), list(ops.shape(x))
    starts[axis], sizes[axis] = start, stop - start
    return ops.slice(x, starts, sizes)
