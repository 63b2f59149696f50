"""A memory of all tokens in blocks, with the sum of the keys of each block.

A row of keys holds a key and whether it is that of a token; a row of values a value,
its bias and whether it is that of a token. With shifted keys a key stands one row later
than its own value, with the value that is read with it.
"""

import numpy as np
from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.decoding import rows
from routing_tf.zoo.parts import chosen_blocks


def make(group, batch_size, num_tokens, block_length):
    """Returns an empty cache with room for `num_tokens` tokens.

    A dict of `keys` `[B, H, G, S, D + 1]` and `values` `[B, H, G, S, E + 2]`, of `sums`
    `<float32>[B, H, G, D]` and of `counts` `<float32>[B, H, G]`.
    """
    # With shifted keys the newest one waits for the value that follows it.
    num_blocks = -(-(num_tokens + group.key_shift) // block_length)
    shape = (batch_size, group.num_heads, num_blocks)
    sizes = {"keys": group.key_dim + 1, "values": group.value_dim + 2}
    cache = {
        name: ops.zeros((*shape, block_length, size), group.compute_dtype)
        for name, size in sizes.items()
    }
    return {
        **cache,
        "sums": ops.zeros((*shape, group.key_dim), "float32"),
        "counts": ops.zeros(shape, "float32"),
    }


def num_places(cache):
    """Returns the number of rows of a cache."""
    return cache["keys"].shape[2] * cache["keys"].shape[3]


def fill(group, cache, inputs):
    """Returns the cache behind a sequence that starts at position 0."""
    keys, values = _rows(group, inputs)
    filled = {
        "keys": _in_blocks(keys, cache["keys"], group.key_shift),
        "values": _in_blocks(values, cache["values"], 0),
    }
    sums, counts = _sums(group, filled["keys"], filled["values"])
    return {**filled, "sums": sums, "counts": counts}


def remember(group, cache, index, inputs):
    """Returns the cache with the token at position `index`, which it may replace."""
    new = dict(zip(("keys", "values"), _rows(group, inputs), strict=True))
    size = cache["keys"].shape[3]
    own = index // size
    cache = dict(cache)
    for name, place in (("keys", index + group.key_shift), ("values", index)):
        cache[name] = ops.slice_update(
            cache[name], (0, 0, place // size, place % size, 0), new[name][:, :, None]
        )
    keys, values = (ops.take(cache[n], own[None], axis=2) for n in ("keys", "values"))
    # Later places may hold tokens of before a start, or the key of this one.
    is_there = own * size + np.arange(size, dtype="int32") <= index
    sums, counts = _sums(group, keys, values, is_there)
    return {
        **cache,
        "sums": ops.slice_update(cache["sums"], (0, 0, own, 0), sums),
        "counts": ops.slice_update(cache["counts"], (0, 0, own), counts),
    }


def attend(group, cache, index, query, blocks, last=None):
    """Attends with the query at position `index` to some blocks.

    `blocks` are `<int32>[B, H, K]`, one behind the last one for none. Positions behind
    `last` are not seen; None for a memory, all of which is.
    """
    num_blocks, size = cache["keys"].shape[2:4]
    batch, heads, count = ops.shape(blocks)
    block = ops.minimum(blocks, num_blocks - 1)
    keys, values = (_read(cache[name], block) for name in ("keys", "values"))
    key, is_key = keys[..., :-1], keys[..., -1:]
    read = ops.concatenate([key, values[..., :-1], values[..., -1:] * is_key], axis=-1)
    places = block[..., None] * size + np.arange(size, dtype="int32")
    visible = ops.broadcast_to((blocks < num_blocks)[..., None], ops.shape(places))
    if last is not None:
        visible = ops.logical_and(visible, places <= last)
    shape = (batch, heads, count * size)
    return rows.attend_to_rows(
        group,
        query,
        read,
        ops.reshape(visible, shape),
        ops.reshape(places - index, shape),
    )


def scores(cache, query):
    """Returns the products of a query with the mean keys, `<float32>[B, H, G]`.

    And which blocks hold a token, `<bool>` likewise.
    """
    means = chosen_blocks.key_means(cache["sums"], cache["counts"])
    query = ops.cast(query, "float32")
    return ops.einsum("bhld,bhgd->bhg", query, means), cache["counts"] > 0


def _rows(group, inputs):
    """Returns keys and values, each with what is known of it behind it."""
    new = rows.of_inputs(group, inputs)
    mask = ops.ones_like(new[..., :1])
    if inputs.key_mask is not None:
        mask = mask * ops.cast(inputs.key_mask, mask.dtype)[..., None]
    key, rest = new[..., : group.key_dim], new[..., group.key_dim :]
    return ops.concatenate([key, mask], axis=-1), rest


def _in_blocks(x, like, first):
    """Puts `[B, H, L, D]` into empty blocks of the shape of `like`, from a place on."""
    batch, heads, num_blocks, size, dim = like.shape
    length = x.shape[2]
    after = num_blocks * size - length - first
    x = ops.pad(x, [(0, 0), (0, 0), (first, after), (0, 0)])
    return ops.reshape(x, (ops.shape(x)[0], heads, num_blocks, size, dim))


def _sums(group, keys, values, is_there=None):
    mask = ops.logical_and(keys[..., -1] > 0, values[..., -1] > 0)
    if is_there is not None:
        mask = ops.logical_and(mask, is_there)
    return chosen_blocks.key_sums(keys[..., :-1], mask)


def _read(x, blocks):
    """From `[B, H, G, S, D]` to `[B, H, K * S, D]`, given the blocks `[B, H, K]`."""
    read = membership.gather_blocks(x, blocks)
    batch, heads, count, size, dim = ops.shape(read)
    return ops.reshape(read, (batch, heads, count * size, dim))
