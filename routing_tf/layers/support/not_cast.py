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
        index = arguments.pop("cache_index", None)
        if isinstance(cache, cls) or cache is None:
            return {**arguments, "cache": cache}
        return {**arguments, "cache": cls(cache, index)}
