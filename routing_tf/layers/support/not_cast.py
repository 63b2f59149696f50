"""Caches as arguments of layers."""

import dataclasses
from typing import Any

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
    def wrap(cls, arguments):
        """Returns keyword arguments with cache and index, if any, in one object."""
        arguments = dict(arguments)
        cache = arguments.pop("cache", None)
        return {**arguments, "cache": cls.of(cache, arguments.pop("cache_index", None))}

    @classmethod
    def of(cls, cache, index):
        """Returns a cache and its index in one object, if there is one.

        `stateless_call` of Keras passes both on as they are.
        """
        return cache if isinstance(cache, cls) or cache is None else cls(cache, index)
