"""Caches as arguments of layers."""

import dataclasses
from typing import Any

import keras

from routing_tf.layers.support.validation import checked_index


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
