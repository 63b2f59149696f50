"""Caches as arguments of layers."""

import dataclasses
from typing import Any

import keras

from routing_tf.layers.support.validation import is_integer


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NotCast:
    """Hides a cache from Keras, which would cast its float tensors."""

    cache: Any
    cache_index: Any

    @property
    def starts_anew(self):
        """Whether there is no token before: no index, or the integer 0."""
        index = self.cache_index
        return index is None or (is_integer(index) and index == 0)

    @classmethod
    def wrap(cls, arguments, inputs):
        """Returns keyword arguments with cache and index, if any, in one object.

        A Functional model does not see what is hidden, so its tensors are refused.
        """
        arguments = dict(arguments)
        cache, index = (arguments.pop(x, None) for x in ("cache", "cache_index"))
        if cache is None:
            return arguments
        for x in keras.tree.flatten((inputs, arguments, cache)):
            if isinstance(x, keras.KerasTensor):
                raise ValueError(
                    "A call with a `cache` cannot be part of a Functional model. Make "
                    "it in a function, or in the `call` of a model of your own. "
                    f"Received: {x}"
                )
        return {**arguments, "cache": cls.of(cache, index)}

    @classmethod
    def of(cls, cache, index):
        """Returns a cache and its index in one object, if there is one.

        `stateless_call` of Keras passes both on as they are.
        """
        return cache if isinstance(cache, cls) or cache is None else cls(cache, index)
