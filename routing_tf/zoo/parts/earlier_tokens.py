"""A cache of the last few tokens, for a convolution over a token and those before it.

A dict of `"tokens"` `<float>[B, N, E]` and their `"positions"` `<int32>[B, N]`, -1
where there is none; as in a ring, the token at position p is in the slot p % N.
"""

from keras import ops

from routing_tf.layers.caches.rows import last_token
from routing_tf.layers.support import gathering
from routing_tf.layers.support.lengths import numbers


def make(batch_size, num_tokens, size, dtype):
    """Returns an empty cache."""
    return {
        "tokens": ops.zeros((batch_size, num_tokens, size), dtype),
        "positions": ops.full((batch_size, num_tokens), -1, dtype="int32"),
    }


def read(cache, index):
    """Returns the tokens before position `index`, `[B, N, E]`; zeros for no token."""
    number = cache["positions"].shape[1]
    positions = index - number + numbers(number)
    slots = positions % number
    is_there = ops.take(cache["positions"], slots, axis=1) == positions
    tokens = ops.take(cache["tokens"], slots, axis=1)
    return ops.where(is_there[..., None], tokens, ops.zeros_like(tokens))


def remember(cache, index, tokens, real=None):
    """Returns the cache with tokens up to the last real one of each row.

    Args:
        cache: that of the tokens before.
        index: position of the first token, an integer or a tensor.
        tokens: `[B, L, E]`, with zeros at padding; L must be known.
        real: `<bool>[B, L]`, or `[1, L]`, False for padding; None (the default) for
            none.
    """
    batch, number = ops.shape(cache["positions"])
    length, slots = tokens.shape[1], numbers(number)
    last = index + (length - 1 if real is None else last_token(real)[:, None])
    positions = last - (last - slots) % number
    positions = ops.broadcast_to(positions, (batch, number))
    is_new = positions >= index
    places = ops.clip(positions - index, 0, length - 1)
    new = gathering.gather(tokens[:, None], places[:, None])[:, 0]
    return {
        "tokens": ops.where(is_new[..., None], new, cache["tokens"]),
        "positions": ops.where(is_new, positions, cache["positions"]),
    }
