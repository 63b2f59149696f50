"""Sums over keys of features times values, the basis of linear attention.

The weight of a key is the product of two vectors of features, its own and that of the
query, so sums over keys serve all queries. Each key may also have a scale, the
logarithm of another factor. Sums are relative to the largest scale among their keys, as
in a softmax, so they neither overflow nor depend on later keys.

Letters: B batch, H heads, L length, F features, E columns of values, N chunks.
"""

from keras import ops

from routing_tf.layers.support import extremes
from routing_tf.layers.support.blocks import break_into_blocks
from routing_tf.layers.support.blocks import put_back_blocks
from routing_tf.layers.support.lengths import is_known
from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.lengths import numbers
from routing_tf.layers.support.lengths import smaller
from routing_tf.layers.support.products import product

# The scale of a key that nobody sees, and of no key at all. A key that a bias hides has
# half of it, and counts as long as nothing else is visible.
NOTHING = -1e30
# One matrix product adds up this many sums; further products add up groups of them.
GROUP_SIZE = 16


def sums_of_keys(key, value, scale=None):
    """Returns sums over keys `<float32>[B, H, F, E]`, and their scale or None.

    `scale` is `<float32>[B, 1 or H, L]`; None for zeros.
    """
    largest = None
    if scale is not None:
        largest = ops.stop_gradient(extremes.largest(scale, axis=-1))
        value = value * ops.exp(scale - largest[..., None])[..., None]
    return ops.matmul(ops.swapaxes(key, -1, -2), value), largest


def joined_sums(sums, largest, more, more_largest):
    """Joins two results of `sums_of_keys`, which have scales.

    Sums are `[B, H, F, E]`, their largest scales `[B, H]`.
    """
    both = ops.maximum(largest, more_largest)
    sums = sums * ops.exp(largest - both)[..., None, None]
    more = more * ops.exp(more_largest - both)[..., None, None]
    return sums + more, both


def running_sums(query, key, value, scale, chunk_length):
    """Returns for each query the sums over the keys up to its own place.

    Computed in chunks: weights of pairs inside a chunk, and sums of earlier chunks.
    Later keys change no bit of a result.

    Args:
        query: `<float32>[B, H, L, F]`, features of queries.
        key: as in `sums_of_keys`.
        value: as in `sums_of_keys`.
        scale: as in `sums_of_keys`.
        chunk_length: number of places in a chunk.

    Returns:
        `<float32>[B, H, L, E]`, relative to the largest scale up to each place.
    """
    length = length_of(query, 2)
    chunk_length = smaller(chunk_length, length)
    query, key, value, scale = (
        None if x is None else break_into_blocks(x, chunk_length, axis=2)
        for x in (query, key, value, scale)
    )
    places = numbers(chunk_length)
    earlier = places <= places[:, None]
    weights = ops.matmul(query, ops.swapaxes(key, -1, -2))
    if scale is None:
        before, _ = _before(*sums_of_keys(key, value))
        sums = ops.matmul(ops.where(earlier, weights, 0.0), value)
        sums = sums + ops.matmul(query, before)
    else:
        before, largest_before = _before(*sums_of_keys(key, value, scale))
        largest = running_largest(scale)
        largest = ops.maximum(largest, largest_before[..., None])
        largest = ops.stop_gradient(largest)
        # What is masked here has no gradient, and cannot overflow.
        pairs = ops.where(earlier, scale[..., None, :] - largest[..., None], NOTHING)
        sums = ops.matmul(weights * ops.exp(pairs), value)
        factor = ops.exp(largest_before[..., None] - largest)
        sums = sums + factor[..., None] * ops.matmul(query, before)
    return put_back_blocks(sums, length, axis=2)


def running_largest(scale):
    """Returns the largest one of scales `[..., L]` up to each place, for a few."""
    places = numbers(length_of(scale, -1))
    pairs = ops.where(places <= places[:, None], scale[..., None, :], NOTHING)
    return extremes.largest(pairs, axis=-1)


def _before(sums, largest):
    """Returns the sums over all chunks before each one, with their largest scales.

    From `[B, H, N, F, E]` and `[B, 1 or H, N]`, or None, to the same shapes.
    """
    batch, heads, chunks, features, columns = ops.shape(sums)
    flat = ops.reshape(sums, (batch, heads, chunks, features * columns))
    flat, largest = _flat_before(flat, largest)
    return ops.reshape(flat, (batch, heads, chunks, features, columns)), largest


def _flat_before(sums, largest):
    """The same as `_before`, for `[B, H, N, F * E]`."""
    chunks = length_of(sums, 2)
    if not is_known(chunks) or chunks <= GROUP_SIZE:
        return _before_in_group(sums, largest)
    grouped = break_into_blocks(sums, GROUP_SIZE, axis=2)
    if largest is None:
        outside, _ = _flat_before(ops.sum(grouped, axis=3), None)
        inside, _ = _before_in_group(grouped, None)
        inside = inside + outside[..., None, :]
        return put_back_blocks(inside, chunks, axis=2), None
    group_largest = break_into_blocks(largest, GROUP_SIZE, axis=2)
    inside, largest_inside = _before_in_group(grouped, group_largest)
    whole = extremes.largest(group_largest, axis=-1)
    factors = ops.exp(group_largest - whole[..., None])
    totals = ops.sum(grouped * factors[..., None], axis=3)
    outside, largest_outside = (x[:, :, :, None] for x in _flat_before(totals, whole))
    both = ops.maximum(largest_inside, largest_outside)
    inside = inside * ops.exp(largest_inside - both)[..., None]
    inside = inside + ops.exp(largest_outside - both)[..., None] * outside
    return (
        put_back_blocks(inside, chunks, axis=2),
        put_back_blocks(both, chunks, axis=2),
    )


def _before_in_group(sums, largest):
    """The same as `_before`, for `[..., N, F * E]` and few chunks."""
    places = numbers(length_of(sums, -2))
    is_before = places < places[:, None]
    if largest is None:
        return ops.matmul(ops.cast(is_before, sums.dtype), sums), None
    pairs = ops.where(is_before, largest[..., None, :], NOTHING)
    largest = extremes.largest(pairs, axis=-1)
    pairs = ops.where(is_before, pairs - largest[..., None], NOTHING)
    return product(ops.exp(pairs), sums), largest
