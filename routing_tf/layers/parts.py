"""Parts of one axis of a tensor.

Indexing finds the same parts; but on TensorFlow its gradient is copied into zeros by
one thread, and takes longer than the attention around it.
"""

import itertools

from keras import ops


def split(x, sizes, axis):
    """Returns the parts of an axis, as a list.

    Args:
        x: tensor.
        sizes: list of the sizes of the parts, from the front to the end of the axis.
        axis: the axis.
    """
    borders = list(itertools.accumulate(sizes))[:-1]
    return list(ops.split(x, borders, axis=axis)) if borders else [x]


def cut(x, start, stop, axis):
    """Returns one part of an axis, from `start` up to `stop`.

    Args:
        x: tensor.
        start: first place.
        stop: place behind the last one.
        axis: the axis, of known size.
    """
    size = x.shape[axis]
    if (start, stop) == (0, size):
        return x
    return split(x, [start, stop - start, size - stop], axis)[1]
