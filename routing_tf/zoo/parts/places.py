"""Places of an axis: those that were chosen, as a mask, and those of several parts."""

from keras import ops

from routing_tf.layers.support import backends
from routing_tf.layers.support.lengths import length_of


def is_among(places, length):
    """Returns which places of an axis are among those that were chosen.

    Args:
        places: `<int>[..., K]`, places on an axis, or `length` for none.
        length: length of the axis, an integer or a tensor.

    Returns:
        `<bool>[..., length]`.
    """
    *shape, count = ops.shape(places)
    places = ops.reshape(ops.cast(places, "int32"), (-1, count))
    num_rows = ops.shape(places)[0]
    row = ops.arange(num_rows, dtype="int32")[:, None] + ops.zeros_like(places)
    # Two numbers for each place, because one may exceed 32-bit integers.
    index = ops.reshape(ops.stack([row, places], axis=-1), (-1, 2))
    ones = ops.ones_like(index[:, 0], dtype="float32")
    found = backends.scatter(index, ones, (num_rows, length + 1))
    return ops.reshape(found[:, :length] > 0, (*shape, length))


def side_by_side(parts, leading):
    """Joins what is broadcastable to `[*leading, slots]` along the last axis."""
    parts = [ops.broadcast_to(x, (*leading, length_of(x, -1))) for x in parts]
    return ops.concatenate(parts, axis=-1)
