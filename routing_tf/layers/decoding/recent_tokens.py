"""A cache of the last tokens: as many as a head can see, or all of them."""

import numpy as np
from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.decoding import rows
from routing_tf.layers.key_shift import to_remember


def make(group, batch_size, num_tokens):
    """Returns an empty cache for `num_tokens` tokens of a group that defines `sees`."""
    return {
        "rows": rows.empty_rows(group, batch_size, group.num_key_heads, num_tokens),
        "positions": ops.full((batch_size, num_tokens), -1, dtype="int32"),
    }


def fill(group, cache, inputs):
    """Returns the cache after a sequence that starts at position 0."""
    _, heads, length, _ = inputs.value.shape
    num_tokens = cache["rows"].shape[2]
    new_rows = offers = rows.of_inputs(group, inputs)
    if group.key_shift:
        offers = rows.of_inputs(group, to_remember(inputs))
    real = rows.split_rows(group, new_rows)[-1][:, 0]
    last = rows.last_token(real)[:, None]
    slots = np.arange(num_tokens, dtype="int32")
    positions = last - (last - slots) % num_tokens
    index = ops.clip(positions, 0, length - 1)[:, None]
    index = ops.broadcast_to(index, (ops.shape(index)[0], heads, num_tokens))
    positions = ops.where(positions < 0, -1, positions)
    if group.key_shift:
        # No value may follow the key of padding.
        is_real = ops.take_along_axis(real, index[:, 0], axis=1)
        positions = ops.where(is_real, positions, -1)
    return {
        **cache,
        "rows": membership.gather(offers, index),
        "positions": positions,
    }


def step(group, cache, index, inputs):
    """Attends with the token at position `index`; returns output and cache."""
    slot = index % cache["rows"].shape[2]
    new_rows = rows.of_inputs(group, inputs)
    positions = ops.full((ops.shape(new_rows)[0], 1), 0, dtype="int32") + index
    if group.key_shift:
        cache = _complete(group, cache, index, new_rows)
        # What follows padding finds no key.
        real = rows.split_rows(group, new_rows)[-1][:, 0]
        positions = ops.where(real, positions, -1)
        new_rows = rows.open_rows(group, new_rows)
    cache = {
        **cache,
        "rows": ops.slice_update(cache["rows"], (0, 0, slot, 0), new_rows),
        "positions": ops.slice_update(cache["positions"], (0, slot), positions),
    }
    keys = cache["positions"][:, None]
    if group.key_shift:
        # The place of the value that is read; an empty place has no successor.
        keys = ops.where(keys < 0, keys, keys + 1)
    visible, distances = group.sees(index, keys, cache)
    visible = ops.logical_and(visible, ops.logical_and(keys >= 0, keys <= index))
    output = rows.attend_to_rows(group, inputs.query, cache["rows"], visible, distances)
    return output, cache


def _complete(group, cache, index, new_rows):
    """Returns the cache with the value that follows the token before `index`."""
    num_tokens = cache["rows"].shape[2]
    slot = (index - 1) % num_tokens
    row = ops.take(cache["rows"], slot[None], axis=2)
    follows = ops.take(cache["positions"], slot[None], axis=1) == index - 1
    follows = ops.logical_and(follows, index > 0)[:, None]
    row = rows.complete_rows(group, row, new_rows, follows)
    return {**cache, "rows": ops.slice_update(cache["rows"], (0, 0, slot, 0), row)}
