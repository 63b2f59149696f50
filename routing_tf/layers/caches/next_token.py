"""Caches as arguments of layers, and the positions at which the next token may stand.

These are a dict of `"least"`, the position after the last real token, and `"most"`, the
one after the last token, `<int32>[B]`. They differ where a call ended with padding,
which is not remembered: the next call may begin in its place.
"""

import dataclasses
from typing import Any

import keras
from keras import ops

from routing_tf.layers.caches.rows import last_token
from routing_tf.layers.support.validation import checked_index
from routing_tf.layers.support.validation import known_values


def first(batch_size):
    """Returns what an empty cache holds."""
    return {name: ops.zeros((batch_size,), "int32") for name in ("least", "most")}


def after(before, index, length, mask=None):
    """Returns what a cache holds after more tokens, from what it held `before`.

    `index` is the position of the first one; the mask `<bool>[B or 1, length]` is False
    for padding.
    """
    most = ops.zeros_like(before["most"]) + (index + length)
    if mask is None:
        return {"least": most, "most": most}
    last = ops.cast(last_token(ops.cast(mask, "bool")), "int32")
    least = ops.where(last >= 0, index + last + 1, before["least"])
    return {"least": least, "most": most}


def check(known, index, may_skip=False):
    """Refuses an integer as `cache_index` at which no next token can stand.

    Nothing is refused where the cache is traced. In rows that were fed fewer tokens
    than others, those that lack count as padding.

    Args:
        known: as returned by `after`.
        index: the integer.
        may_skip: whether positions may be left out, as those that pad blocks. Defaults
            to False.
    """
    values = known_values(ops.stack([known["least"], known["most"]]))
    if values is None or values.size == 0:
        return
    least, most = values.max(axis=1)
    if least <= index and (may_skip or index <= most):
        return
    fed = f"{most}" if least == most else f"{most}, of which {least} are no padding"
    raise ValueError(
        "`cache_index` must be the number of tokens that the cache was fed. Received: "
        f"cache_index={index} with a cache that was fed {fed}. To go back, use the "
        "cache that an earlier call returned, which still stands for its tokens; feed "
        "a prompt without its padding, or with a mask of its real tokens; pass 0 to "
        "start anew"
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NotCast:
    """Hides a cache from Keras, which would cast its float tensors.

    `cache_index` is what `checked_index` returns.
    """

    cache: Any
    cache_index: Any

    @property
    def starts_anew(self):
        """Whether there is no token before: the index is known to be 0."""
        return isinstance(self.cache_index, int) and self.cache_index == 0

    @classmethod
    def wrap(cls, arguments, inputs):
        """Returns keyword arguments with cache and index, if any, in one object."""
        arguments = dict(arguments)
        cache, index = (arguments.pop(x, None) for x in ("cache", "cache_index"))
        if cache is None:
            return arguments
        if not isinstance(cache, cls):
            refuse_symbolic("cache", (inputs, arguments, cache))
            cache = cls(cache, checked_index(index))
        return {**arguments, "cache": cache}

    @classmethod
    def of(cls, cache, index):
        """Returns a cache and its index in one object, which Keras does not change."""
        if isinstance(cache, cls) or cache is None:
            return cache
        return cls(cache, checked_index(index))


def refuse_symbolic(name, arguments):
    """Raises a `ValueError` if arguments of a call have tensors of a Functional model.

    Such a model does not see what is hidden from Keras.
    """
    for x in keras.tree.flatten(arguments):
        if isinstance(x, keras.KerasTensor):
            raise ValueError(
                f"A call with a `{name}` cannot be part of a Functional model. Make it "
                f"in a function, or in the `call` of a model of your own. Received: {x}"
            )
