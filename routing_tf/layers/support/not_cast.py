"""Caches as arguments of layers."""


class NotCast:
    """Hides a cache from Keras, which would cast its float tensors."""

    def __init__(self, cache, cache_index):
        self.cache = cache
        self.cache_index = cache_index

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
