"""Entries and rows at places of an axis, found in a flattened axis.

Letters: B batch, H heads, L length, D dim.
"""

import math

from keras import ops

from routing_tf.layers.support.stated_gradients import stated_gradient


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
