"""Cutting positions into blocks, and the window of memory around each block.

Letters: G blocks along an axis, S positions (slots) in a block.
"""

import numpy as np
from keras import ops

from routing_tf.layers.support.axes import cut_axis
from routing_tf.layers.support.lengths import is_known
from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.lengths import library
from routing_tf.layers.support.lengths import num_parts

RUNNING_SUM_BLOCK = 16


def pad_to_multiple(x, multiple, axis):
    """Returns `x` with zeros (False) appended along `axis` up to a multiple."""
    length = length_of(x, axis)
    missing = num_parts(length, multiple) * multiple - length
    if is_known(missing) and not missing:
        return x
    padding = [(0, 0)] * len(x.shape)
    padding[axis] = (0, missing)
    return ops.pad(x, padding)


def break_into_blocks(x, block_length, axis):
    """Splits `axis`, counted from the front, into padded `(blocks, block_length)`."""
    x = pad_to_multiple(x, block_length, axis)
    shape = ops.shape(x)
    blocks = shape[axis] // block_length
    return ops.reshape(x, (*shape[:axis], blocks, block_length, *shape[axis + 1 :]))


def memory_windows(blocks, before, after, axis):
    """Joins each block with its neighbours to the window its queries may see.

    From `[..., G, ..., G, S, ...]`, whose first axis of blocks is `axis`, to
    `[..., G, ..., G, window, ...]`, zero (False) outside the positions. A window has
    `before + 1 + after` blocks along each axis, in raster order of their places.

    Reference: `break_into_memory_blocks_nd` of the release.
    """
    slots = axis + len(before)
    for i in reversed(range(len(before))):
        num_blocks = length_of(blocks, axis + i)
        padding = [(0, 0)] * len(blocks.shape)
        padding[axis + i] = (before[i], after[i])
        padded = ops.pad(blocks, padding)
        shifted = [
            cut_axis(padded, shift, shift + num_blocks, axis + i)
            for shift in range(before[i] + 1 + after[i])
        ]
        blocks = ops.concatenate(shifted, axis=slots)
    return blocks


def put_back_blocks(blocks, length, axis):
    """Undoes `break_into_blocks`: joins `(blocks, block_length)` and cuts to length."""
    shape = ops.shape(blocks)
    joined = shape[axis] * shape[axis + 1]
    x = ops.reshape(blocks, (*shape[:axis], joined, *shape[axis + 2 :]))
    return cut_axis(x, 0, length, axis)


def running_sum(x):
    """Returns the cumulative sum over the last axis of `<float32>[..., length]`.

    Computed in blocks by matrix products: `ops.cumsum` takes three times as long on a
    CPU.
    """
    length, size = length_of(x, -1), RUNNING_SUM_BLOCK
    x = break_into_blocks(x, size, axis=len(x.shape) - 1)
    num_blocks = length_of(x, -2)
    inside = ops.matmul(x, np.triu(np.ones((size, size), "float32")))
    lib = library(num_blocks)
    earlier = lib.triu(lib.ones((num_blocks, num_blocks), "float32"), k=1)
    inside = inside + ops.matmul(inside[..., -1], earlier)[..., None]
    return put_back_blocks(inside, length, axis=len(x.shape) - 2)


def running_total(x, axis):
    """Returns the cumulative sum over an axis, in order, of rows that are long.

    No later row has a part in it, not even in its rounding. `ops.cumsum` takes three
    times as long on a CPU.
    """
    length = length_of(x, axis)
    blocks = break_into_blocks(x, RUNNING_SUM_BLOCK, axis)
    parts = list(ops.unstack(blocks, axis=axis + 1))
    for i in range(1, len(parts)):
        parts[i] = parts[i - 1] + parts[i]
    before = [(int(i == axis), 0) for i in range(len(x.shape))]
    earlier = ops.pad(ops.cumsum(parts[-1], axis=axis), before)
    earlier = cut_axis(earlier, 0, length_of(blocks, axis), axis)
    inside = ops.stack(parts, axis=axis + 1) + ops.expand_dims(earlier, axis + 1)
    return put_back_blocks(inside, length, axis)


def shift_right(x):
    """Shifts `[batch, length, ...]`, in blocked order, right by one after a 0."""
    padded = ops.pad(x, [(0, 0), (1, 0)] + [(0, 0)] * (len(x.shape) - 2))
    return cut_axis(padded, 0, length_of(x, 1), axis=1)
