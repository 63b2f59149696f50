"""Operations on axes of tensors: their lengths, parts and blocks, entries and products.

On TensorFlow a function may be traced once for sequences of all lengths, as Keras does
with `fit` and `predict` from the second length on. The length of an axis is then a
tensor. What is written with these functions works on both, and on integers is computed
by NumPy while the layer is traced; on torch, whose tensors do not mix with NumPy's
arrays, by `keras.ops` in any case.

Letters: B batch, H heads, L length, D dim, G blocks along an axis, S positions (slots)
in a block.
"""

import itertools
import math

import keras
import numpy as np
from keras import ops

from routing_tf.layers.support.backends import IS_TORCH
from routing_tf.layers.support.backends import stated_gradient

RUNNING_SUM_BLOCK = 16


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
    """Returns one part of an axis, from place `start` up to `stop`, not included.

    Indexing finds the same part, but one thread of TensorFlow copies its gradient into
    zeros, and this takes longer than the attention around it.
    """
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


def gather_entries(mask, members, length):
    """Returns entries at positions `[B, H, ...]`, of `[B, H, L]` or broadcastable."""
    everywhere = ops.broadcast_to(mask, (*ops.shape(members)[:2], length))
    return entries_at(everywhere, members)


def entries_at(table, index):
    """Returns the entries of `table` `[B, H, L]` at `index` `[B, H, ...]`."""
    flat = ops.reshape(table, (-1,))
    found = ops.take(flat, flat_positions(index, ops.shape(table)[2]), axis=0)
    return ops.reshape(found, ops.shape(index))


def gather(x, members):
    """Returns rows of `[B, H, L, D]` at places `<int>[B, H, ...]`: `[B, H, ..., D]`."""
    _, _, length, dim = ops.shape(x)
    flat = ops.reshape(x, (-1, dim))
    # A flat index is many times faster on CPU than `take_along_axis`.
    rows = ops.take(flat, flat_positions(members, length), axis=0)
    return ops.reshape(rows, (*ops.shape(members), dim))


def permuted(x, sources, targets):
    """Returns rows of `[B, H, L, D]` in another order.

    Args:
        x: the rows.
        sources: `<int32>[B, 1, L]`, where the row of each place comes from.
        targets: likewise, where each row goes.
    """

    # Each row goes to one place, so the gradient need not add up.
    @stated_gradient
    def permute(x, sources, targets):
        def gradient(upstream):
            return gather(upstream, targets), None, None

        return gather(x, sources), gradient

    shape = ops.shape(x)[:3]
    return permute(x, *(ops.broadcast_to(y, shape) for y in (sources, targets)))


def gather_blocks(x, blocks):
    """Returns whole blocks of `[B, H, G, ...]` at places `<int>[B, H, ...]`.

    The result has the axes of `blocks` instead of B, H and G.
    """
    _, _, num_blocks, *rest = ops.shape(x)
    # A block is one row, so few long rows are copied.
    rows = ops.reshape(x, (*ops.shape(x)[:2], num_blocks, math.prod(rest)))
    return ops.reshape(gather(rows, blocks), (*ops.shape(blocks), *rest))


def replaced(x, members, rows, are_new=None):
    """Returns `[B, H, L, D]` with rows `[B, H, ..., D]` at places `<int>[B, H, ...]`.

    No place may occur twice in a head. Where `are_new`, `<bool>[B, H, ...]` or None, is
    False, the old row stays.
    """
    _, _, length, dim = ops.shape(x)
    places, flat = flat_positions(members, length), ops.reshape(x, (-1, dim))
    rows = ops.reshape(rows, (-1, dim))
    if are_new is not None:
        old = ops.take(flat, places, axis=0)
        rows = ops.where(ops.reshape(are_new, (-1, 1)), rows, old)
    flat = ops.scatter_update(flat, places[:, None], rows)
    return ops.reshape(flat, ops.shape(x))


def flat_positions(members, length):
    """Returns `members` as indices into the flattened `[B * H * L]` axis."""
    members = ops.convert_to_tensor(members)
    batch, heads, *rest = ops.shape(members)
    starts = ops.arange(batch * heads, dtype=members.dtype) * length
    starts = ops.reshape(starts, (batch, heads, *[1] * len(rest)))
    return ops.reshape(members + starts, (-1,))


def dense_take(table, ids):
    """Returns rows of a variable, with a dense gradient, see `dense`."""
    return ops.take(dense(table), ids, axis=0)


def dense(table):
    """Returns a variable as a tensor from which rows are taken.

    TensorFlow returns the gradient of a gather from a variable as slices, one for each
    repeated id. Optimizers that square slices before they add them up are silently
    wrong. Reading the variable first keeps the gradient dense.
    """
    return ops.convert_to_tensor(table) * 1.0


def largest(x, axis=None, keepdims=False):
    """Returns `ops.max` of numbers; of none, which it refuses, the least of all."""
    return _found(ops.max, x, axis, keepdims, _limits(x)[0])


def smallest(x, axis=None, keepdims=False):
    """Returns `ops.min` of numbers; of none, the greatest of all."""
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


def product(x, y, transpose_x=False, transpose_y=False):
    """Returns the products of matrices; their other axes are broadcast.

    TensorFlow 2.21 with oneDNN writes beyond its memory if `matmul` broadcasts a batch
    of matrices; `einsum` is right but slow. On JAX 0.10 it is the other way round: XLA
    on a CPU makes all columns the first one if the matrices are repeated before. `x` is
    `<float>[..., L, D]` and `y`, which has more than two axes, `<float>[..., D, K]`.
    """
    is_tensorflow = keras.backend.backend() == "tensorflow"
    while len(x.shape) < len(y.shape):
        x = x[None]
    while len(y.shape) < len(x.shape):
        y = y[None]
    if is_tensorflow and x.shape[:-2] != y.shape[:-2]:
        x, y = _repeated(x, y), _repeated(y, x)
    if is_tensorflow and x.dtype == y.dtype:
        # A graph would transpose in a separate operation, and keep the result.
        import tensorflow as tf

        return tf.matmul(x, y, transpose_a=transpose_x, transpose_b=transpose_y)
    x = ops.swapaxes(x, -1, -2) if transpose_x else x
    y = ops.swapaxes(y, -1, -2) if transpose_y else y
    return ops.matmul(x, y)


def _repeated(x, like):
    """Repeats matrices along axes whose length is 1, but not in `like`."""
    axes = range(len(x.shape) - 2)
    if all(x.shape[axis] != 1 or like.shape[axis] == 1 for axis in axes):
        return x
    others = ops.shape(like)
    sizes = [others[axis] if x.shape[axis] == 1 else 1 for axis in axes]
    # In a loop over a batch of unknown size, XLA has no gradient of `broadcast_to`.
    return x * ops.ones((*sizes, 1, 1), x.dtype)
