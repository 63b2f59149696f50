"""A cache of the last tokens: as many as a head can see, or all of them."""

from keras import ops

from routing_tf.layers.caches import pending_keys
from routing_tf.layers.caches import rows
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.tensors import numbers


def make(group, batch_size, num_tokens):
    """Returns an empty cache for `num_tokens` tokens of a group that has `sees`."""
    shape = batch_size, group.num_key_heads
    cache = {
        "rows": rows.empty_rows(group, *shape, num_tokens),
        "positions": ops.full((batch_size, num_tokens), -1, dtype="int32"),
    }
    if group.key_shift:
        key = ops.zeros((*shape, 1, group.key_dim), group.compute_dtype)
        cache["pending"] = pending_keys.none(batch_size, key=key)
    return cache


def restarted(cache):
    """Returns a cache as it was before the first token."""
    positions = ops.full_like(cache["positions"], -1)
    return {**pending_keys.forgotten(cache), "positions": positions}


def fill(group, cache, inputs):
    """Returns the cache after a sequence that starts at position 0."""
    cache, new_rows, real = _offered(group, restarted(cache), 0, inputs)
    return _remembered(cache, 0, new_rows, real)


def step(group, cache, index, inputs):
    """Attends with tokens from position `index` on; returns output and cache."""
    cache, new_rows, real = _offered(group, cache, index, inputs)
    number = inputs.query.shape[2]
    query = index + numbers(number)
    if group.max_positions(cache) is not None:
        seen = cache = _written(cache, index, new_rows, query)
    elif number == 1:
        seen = cache = _replaced(cache, index, new_rows, real)
    else:
        # The last ones would push out what the first ones see.
        old, cache = cache, _remembered(cache, index, new_rows, real)
        positions = ops.broadcast_to(query, (ops.shape(new_rows)[0], number))
        seen = {
            **cache,
            "rows": ops.concatenate([old["rows"], new_rows], axis=2),
            "positions": ops.concatenate([old["positions"], positions], axis=1),
        }
    query, keys = query[:, None], seen["positions"][:, None, None]
    visible, distances = group.sees(query, keys, seen)
    visible = ops.logical_and(visible, ops.logical_and(keys >= 0, keys <= query))
    output = rows.attend_to_rows(group, inputs.query, seen["rows"], visible, distances)
    return output, cache


def _offered(group, cache, index, inputs):
    """Returns the cache, rows of tokens with the keys that they offer, and their mask.

    The mask, `<bool>[B, T]`, is False for padding.
    """
    mask, _ = group.cached_mask_and_bias(inputs)
    real = known_mask(inputs.value, mask)[:, 0]
    if group.key_shift:
        inputs, pending = pending_keys.offer_inputs(cache["pending"], index, inputs)
        cache = {**cache, "pending": pending}
    return cache, rows.of_inputs(group, inputs), real


def _written(cache, index, new_rows, positions):
    """Returns the cache with tokens, of which it has room for all."""
    slot = index % cache["rows"].shape[2]
    positions = ops.broadcast_to(positions, (ops.shape(new_rows)[0], new_rows.shape[2]))
    return {
        **cache,
        "rows": ops.slice_update(cache["rows"], (0, 0, slot, 0), new_rows),
        "positions": ops.slice_update(cache["positions"], (0, slot), positions),
    }


def _replaced(cache, index, new_rows, real):
    """Returns the cache with a token in the place of the oldest one.

    Padding takes no place: it may be room, and the oldest token be seen again.
    """
    place = ops.reshape(index % cache["rows"].shape[2], (1,))
    old, position = (
        ops.take(cache[name], place, axis=axis)
        for name, axis in (("rows", 2), ("positions", 1))
    )
    new_rows = ops.where(real[:, None, :, None], new_rows, old)
    return _written(cache, index, new_rows, ops.where(real, index, position))


def _remembered(cache, index, new_rows, real):
    """Returns the cache with the last tokens up to the last real one of each row."""
    _, heads, num_tokens, _ = cache["rows"].shape
    last = index + rows.last_token(real)[:, None]
    slots = numbers(num_tokens)
    positions = last - (last - slots) % num_tokens
    is_new = positions >= index
    places = ops.clip(positions - index, 0, new_rows.shape[2] - 1)[:, None]
    places = ops.broadcast_to(places, (ops.shape(places)[0], heads, num_tokens))
    new_rows = tensors.gather(new_rows, places)
    return {
        **cache,
        "rows": ops.where(is_new[:, None, :, None], new_rows, cache["rows"]),
        "positions": ops.where(is_new, positions, cache["positions"]),
    }
