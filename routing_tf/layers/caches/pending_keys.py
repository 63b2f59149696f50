"""Keys that wait for the value that follows them, with `key_shift=1`.

The newest key has no value yet. A cache holds this key apart, with the position of its
token, and the next token offers it with its own value. All else in a cache is complete.

Letters: B batch, H heads, T tokens of a call, D dim, K clusters.
"""

import dataclasses

from keras import ops

from routing_tf.layers.caches.rows import last_token
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.tensors import numbers

# The first token does not follow it either.
NO_POSITION = -2


def none(batch_size, **keys):
    """Returns what a cache holds first; `keys` `[B, H, 1, ...]` are like later ones."""
    position = ops.full((batch_size,), NO_POSITION, dtype="int32")
    return {**keys, "position": position}


def forgotten(cache):
    """Returns a cache without the key that it holds as `"pending"`, if any."""
    if "pending" not in cache:
        return cache
    position = ops.full_like(cache["pending"]["position"], NO_POSITION)
    return {**cache, "pending": {**cache["pending"], "position": position}}


def offer(pending, index, mask, **keys):
    """Moves the keys of tokens one position later, after the one that is held.

    Args:
        pending: as returned by `none` or this function.
        index: position of the first token.
        mask: `<bool>[B, 1, T]`, False for padding; None for no padding. What stands
            after the last real token of a row offers nothing, and may be room.
        **keys: `[B, H, T, ...]`, what belongs to a key, by the names of `none`.

    Returns:
        `keys` of the tokens before; which of them are there, `<bool>[B, 1, T]`; which
        of them the token follows at once, likewise; and what is held after the tokens.
    """
    is_real = known_mask(next(iter(keys.values())), mask)
    last = last_token(is_real)
    before = pending["position"][:, None, None]
    moved = {n: _one_later(pending[n], x) for n, x in keys.items()}
    is_there = _one_later(before >= 0, is_real)
    is_there = ops.logical_and(is_there, numbers(is_real.shape[2]) <= last[..., None])
    follows = _one_later(before == index - 1, is_real)
    place = ops.maximum(last, 0)
    has_real = last >= 0
    # Without a mask, nothing to choose from: TensorFlow 2.21 loses a loop around a step
    # where it finds out by itself that a choice between such keys is none.
    old = dict.fromkeys(keys) if mask is None else pending
    held = {n: _held(x, place, has_real, old[n]) for n, x in keys.items()}
    position = ops.where(has_real[:, 0], index + last[:, 0], pending["position"])
    return moved, is_there, follows, {**held, "position": position}


def offer_inputs(pending, index, inputs):
    """Does for `HeadInputs` what `offer` does for tensors; returns `pending`, too."""
    moved, _, follows, pending = offer(pending, index, inputs.key_mask, key=inputs.key)
    value_mask = combine_masks(follows, inputs.value_mask)
    inputs = dataclasses.replace(inputs, key=moved["key"], value_mask=value_mask)
    return inputs, pending


def offer_tokens(pending, index, tokens):
    """Does `offer_inputs` with `RoutedTokens`: each value goes with the key before it.

    `pending` has the names `"key"` and `"entries"`, those of its `Assignment`. The mask
    of keys is then True where there is one, and that of values where it may be read.
    """
    inputs, of_keys = tokens.inputs, tokens.of_keys
    key = ops.cast(tokens.key, pending["key"].dtype)
    moved, is_there, follows, pending = offer(
        pending, index, tokens.key_mask, key=key, entries=of_keys.entries
    )
    value_mask = combine_masks(follows, inputs.value_mask)
    tokens = dataclasses.replace(
        tokens,
        key=moved["key"],
        of_keys=of_keys.with_entries(moved["entries"]),
        key_mask=is_there,
        inputs=dataclasses.replace(inputs, value_mask=value_mask),
    )
    return tokens, pending


def _one_later(first, x):
    """Returns `first`, `[B, H, 1, ...]`, and all but the last token of `x`."""
    if x.shape[2] == 1:
        return first
    return ops.concatenate([first, x[:, :, :-1]], axis=2)


def _held(x, place, is_new, old):
    """Returns `[B, H, 1, ...]` at places `[B, 1]`, or `old` where none is new."""
    if x.shape[2] > 1:
        index = ops.broadcast_to(place[..., None], (*ops.shape(x)[:2], 1))
        x = tensors.gather(x, index)
    return x if old is None else ops.where(is_new[..., None, None], x, old)
