"""Windows of the blocks of a memory that local heads cut up to its last real token."""

from keras import ops

from routing_tf.layers.caches.rows import last_token
from routing_tf.layers.support import tensors
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import num_parts
from routing_tf.layers.support.tensors import numbers


def places_of_windows(mask, length, num_blocks, block, share, flange):
    """Returns places `<int32>[B, 1, blocks, window]` in a memory, and which exist.

    The blocks leave out padding after the last real token of the mask `<bool>[B, 1,
    L]`. A memory of the query's `length` has the query's blocks. A window has `share`
    slots of each block, and `flange` blocks on each side.
    """
    count = ops.expand_dims(last_token(mask) + 1, (-1, -2))
    own = ops.maximum(num_parts(count, num_blocks), 1)
    own = ops.where(count == length, block, own)
    distance = numbers((2 * flange + 1) * share) - flange * share
    is_near = ops.logical_and(distance >= -flange * own, distance < (flange + 1) * own)
    places = numbers(num_blocks)[:, None] * own + distance
    return places, ops.logical_and(is_near, places >= 0)


def gather_windows(places, is_place, x):
    """Returns `[batch, heads, memory length, ...]` at places, zero where there is none.

    The result has blocks and slots instead of the length.
    """
    memory_length = length_of(x, 2)
    is_place = ops.logical_and(is_place, places < memory_length)
    places = ops.clip(places, 0, memory_length - 1)
    batch, heads = ops.shape(places)[0], ops.shape(x)[1]
    x = ops.broadcast_to(x, (batch, *ops.shape(x)[1:])) if x.shape[0] == 1 else x
    places = ops.broadcast_to(places, (ops.shape(x)[0], heads, *ops.shape(places)[2:]))
    if len(x.shape) == 3:
        found = tensors.entries_at(x, places)
    else:
        found, is_place = tensors.gather(x, places), is_place[..., None]
    return ops.where(is_place, found, ops.zeros_like(found))
