"""A memory of the last tokens, and of summaries of all blocks before them."""

import numpy as np
from keras import ops

from routing_tf.layers.decoding import recent_tokens
from routing_tf.layers.decoding import rows


def make(group, batch_size, num_tokens):
    """Returns an empty cache with room for `num_tokens` tokens.

    A dict with the rows of the last tokens, their `"positions"`, and `"summaries"`, see
    `to_rows`.
    """
    num_blocks = -(-num_tokens // group.block_length)
    num_places = num_blocks * group.block_length
    window = min(group.attention_window or 1, num_places)
    shape = (batch_size, group.num_heads, num_blocks * group.num_summaries)
    size = group.key_dim + group.value_dim + 1
    return {
        **recent_tokens.make(group, batch_size, max(window, group.block_length)),
        "summaries": ops.zeros((*shape, size), group.compute_dtype),
    }


def fill(group, cache, inputs):
    """Returns the cache behind a sequence that starts at position 0."""
    summaries, size = to_rows(group.summaries(inputs)), cache["summaries"].shape[2]
    missing = size - summaries.shape[2]
    summaries = ops.pad(summaries, [(0, 0), (0, 0), (0, missing), (0, 0)])
    return {**recent_tokens.fill(group, cache, inputs), "summaries": summaries}


def step(group, cache, index, inputs):
    """Attends with the token at position `index`; returns output and cache."""
    cache = _remembered(group, cache, index, inputs)
    summaries = of_rows(group, cache["summaries"])
    position = ops.reshape(index, (1,))
    parts = [group.read_summaries(inputs.query, summaries, position)]
    if group.attention_window is not None:
        parts.append(_read_window(group, cache, index, inputs.query))
    return group.joined(parts), cache


def to_rows(summaries):
    """Joins keys, values and which are of real tokens to `<float>[B, H, S, E]`."""
    key, value, real = summaries
    real = ops.broadcast_to(real, ops.shape(key)[:-1])
    return ops.concatenate([key, value, ops.cast(real, key.dtype)[..., None]], axis=-1)


def of_rows(group, x):
    """Undoes `to_rows`."""
    return x[..., : group.key_dim], x[..., group.key_dim : -1], x[:, :1, :, -1] > 0


def _remembered(group, cache, index, inputs):
    """Returns the cache with the newest token, and the block that it ends, if any."""
    slot = index % cache["rows"].shape[2]
    new = rows.of_inputs(group, inputs)
    position = ops.zeros((ops.shape(new)[0], 1), "int32") + index
    tokens = ops.slice_update(cache["rows"], (0, 0, slot, 0), new)
    positions = ops.slice_update(cache["positions"], (0, slot), position)
    return {
        "rows": tokens,
        "positions": positions,
        "summaries": _summarized(group, cache["summaries"], tokens, positions, index),
    }


def _summarized(group, summaries, tokens, positions, index):
    length, number = group.block_length, group.num_summaries
    places = index + np.arange(1 - length, 1, dtype="int32")
    slots = places % tokens.shape[2]
    key, value, bias, real = rows.split_rows(group, ops.take(tokens, slots, axis=2))
    is_there = ops.take(positions, slots, axis=1) == places
    real = ops.logical_and(real[:, :1], is_there[:, None])[:, :, None]
    new = group.summarized(key[:, :, None], value[:, :, None], real, bias[:, :, None])
    has_real = ops.repeat(ops.any(real, axis=-1), number, axis=-1)
    new = to_rows((*(x[:, :, 0] for x in new), has_real))
    first = ops.minimum(index // length * number, summaries.shape[2] - number)
    old = ops.take(summaries, first + np.arange(number, dtype="int32"), axis=2)
    new = ops.where((index + 1) % length == 0, new, old)
    return ops.slice_update(summaries, (0, 0, first, 0), new)


def _read_window(group, cache, index, query):
    key, value, bias, real = rows.split_rows(group, cache["rows"])
    key, value = group.near(key, value)
    keys = cache["positions"][:, None]
    visible = ops.logical_and(keys > index - group.attention_window, keys <= index)
    visible = ops.logical_and(ops.logical_and(visible, keys >= 0), real)
    return group.dot_product(
        query,
        key,
        value,
        attention_mask=visible[..., None, :],
        bias=bias[..., None, :],
        distances=(keys - index)[..., None, :],
        return_logsumexp=True,
        training=False,
    )
