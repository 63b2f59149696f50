"""A memory of the last tokens: as many as a head can see, or all of them."""

import numpy as np
from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.decoding import rows


def make(group, batch_size, num_tokens):
    """Returns an empty cache.

    Args:
        group: a `HeadGroup` with `sees`.
        batch_size: number of sequences.
        num_tokens: number of tokens R that are remembered.
    """
    return {
        "rows": rows.empty_rows(group, batch_size, group.num_heads, num_tokens),
        "positions": ops.full((batch_size, num_tokens), -1, dtype="int32"),
    }


def fill(group, cache, inputs):
    """Returns the cache behind a sequence that starts at position 0."""
    _, heads, length, _ = inputs.value.shape
    num_tokens = cache["rows"].shape[2]
    new_rows = _rows(group, inputs)
    real = rows.split_rows(group, new_rows)[-1][:, 0]
    last = rows.last_token(real)[:, None]
    slots = np.arange(num_tokens, dtype="int32")
    positions = last - (last - slots) % num_tokens
    index = ops.clip(positions, 0, length - 1)[:, None]
    index = ops.broadcast_to(index, (ops.shape(index)[0], heads, num_tokens))
    positions = ops.where(positions < 0, -1, positions)
    return {
        **cache,
        "rows": membership.gather(new_rows, index),
        "positions": positions,
    }


def step(group, cache, index, inputs):
    """Attends with the token at position `index`; returns output and cache."""
    slot = index % cache["rows"].shape[2]
    new_rows = _rows(group, inputs)
    positions = ops.full((ops.shape(new_rows)[0], 1), 0, dtype="int32") + index
    cache = {
        **cache,
        "rows": ops.slice_update(cache["rows"], (0, 0, slot, 0), new_rows),
        "positions": ops.slice_update(cache["positions"], (0, slot), positions),
    }
    keys = cache["positions"][:, None]
    visible, distances = group.sees(index, keys, cache)
    visible = ops.logical_and(visible, ops.logical_and(keys >= 0, keys <= index))
    output = rows.attend_to_rows(group, inputs.query, cache["rows"], visible, distances)
    return output, cache


def _rows(group, inputs):
    mask, bias = group.remembered(inputs)
    return rows.make_rows(inputs.key, inputs.value, mask, bias)
