"""A memory of all tokens and of compressed blocks, for native sparse heads."""

import numpy as np
from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.decoding import rows
from routing_tf.zoo.parts.block_summaries import of_rows
from routing_tf.zoo.parts.block_summaries import to_rows


def make(group, batch_size, num_tokens):
    """Returns an empty cache with room for `num_tokens` tokens.

    A dict with the rows `[B, H, P, E]` of `"tokens"`, for each branch one after the
    other on the last axis unless they share them, and with `"summaries"`, the
    compressed keys and values and whether there is one, `[B, H, C, D]`.
    """
    num_blocks = -(-num_tokens // group.block_length)
    num_places = num_blocks * group.block_length
    num_summaries = num_places // group.compression_stride
    shape, dtype = (batch_size, group.num_heads), group.compute_dtype
    size = rows.row_size(group) * (1 if group.share_branches else 3)
    return {
        "tokens": ops.zeros((*shape, num_places, size), dtype),
        "summaries": ops.zeros(
            (*shape, num_summaries, group.key_dim + group.value_dim + 1), dtype
        ),
    }


def num_places(cache):
    """Returns how many tokens a cache has room for."""
    return cache["tokens"].shape[2]


def fill(group, cache, inputs):
    """Returns the cache behind a sequence that starts at position 0."""
    branches = group.branches(inputs)
    summaries = to_rows(group.summaries(branches["compressed"]))
    new = {"tokens": _tokens(group, branches), "summaries": summaries}
    return {name: _padded(x, cache[name].shape[2]) for name, x in new.items()}


def step(group, cache, index, inputs):
    """Attends with the token at position `index`; returns output and cache."""
    branches = group.branches(inputs)
    token = _tokens(group, branches)
    tokens = ops.slice_update(cache["tokens"], (0, 0, index, 0), token)
    of_branch = dict(zip(branches, _split(group, tokens), strict=True))
    summaries = _summarized(group, cache["summaries"], of_branch["compressed"], index)
    cache = {"tokens": tokens, "summaries": summaries}
    query, positions = inputs.query, ops.reshape(index, (1,))
    compressed, importance = group.read_summaries(
        query, of_rows(group, summaries), positions, training=False
    )
    chosen = group.choose(importance, positions)
    selected = _selected(group, of_branch["selected"], query, chosen, index)
    window = _window(group, of_branch["window"], query, index)
    return group.gated(inputs, (compressed, selected, window)), cache


def _tokens(group, branches):
    if group.share_branches:
        return rows.of_inputs(group, branches["window"])
    return ops.concatenate(
        [rows.of_inputs(group, own) for own in branches.values()], axis=-1
    )


def _split(group, tokens):
    """Returns the rows of each branch."""
    if group.share_branches:
        return [tokens] * 3
    return ops.split(tokens, 3, axis=-1)


def _padded(x, length):
    """Pads axis 2 with zeros up to a length."""
    return ops.pad(x, [(0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)])


def _summarized(group, summaries, tokens, index):
    """Returns the summaries with that of the block that ends at `index`, if any."""
    start = index + 1 - group.compression_length
    number = ops.maximum(start, 0) // group.compression_stride
    ends = ops.logical_and(start >= 0, start % group.compression_stride == 0)
    places = start + np.arange(group.compression_length, dtype="int32")
    places = ops.clip(places, 0, tokens.shape[2] - 1)
    key, value, _, real = rows.split_rows(group, ops.take(tokens, places, axis=2))
    mask = real[:, :1, None]
    new = to_rows(
        (
            group.key_compression(key[:, :, None], mask),
            group.value_compression(value[:, :, None], mask),
            ops.any(mask, axis=-1),
        )
    )
    number = ops.minimum(number, summaries.shape[2] - 1)
    old = ops.take(summaries, ops.reshape(number, (1,)), axis=2)
    return ops.slice_update(summaries, (0, 0, number, 0), ops.where(ends, new, old))


def _selected(group, tokens, query, chosen, index):
    """Attends to the own block up to `index`, and to those that are chosen."""
    size = group.block_length
    batch, heads, num_places, row = ops.shape(tokens)
    num_blocks = tokens.shape[2] // size
    block = ops.zeros((batch, heads, 1), "int32") + index // size
    if chosen is not None:
        block = ops.concatenate([block, chosen[:, :, 0]], axis=-1)
    blocks = ops.reshape(tokens, (batch, heads, num_blocks, size, row))
    read = membership.gather_blocks(blocks, ops.minimum(block, num_blocks - 1))
    places = block[..., None] * size + np.arange(size, dtype="int32")
    shape = (batch, heads, block.shape[2] * size)
    places = ops.reshape(places, shape)
    read = ops.reshape(read, (*shape, row))
    return rows.attend_to_rows(group, query, read, places <= index, places - index)


def _window(group, tokens, query, index):
    """Attends to the last tokens up to `index`."""
    window = min(group.attention_window, tokens.shape[2])
    places = index - np.arange(window - 1, -1, -1, dtype="int32")
    read = ops.take(tokens, ops.maximum(places, 0), axis=2)
    visible = (places >= 0)[None, None]
    return rows.attend_to_rows(
        group, query, read, visible, (places - index)[None, None]
    )
