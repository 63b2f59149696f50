"""Step-by-step attention of heads whose pattern depends on positions."""

import keras
from keras import ops

from routing_tf.layers.caches import recent_tokens
from routing_tf.layers.caches import rows
from routing_tf.layers.support.tensors import numbers


class Stepwise:
    """The part of a `HeadGroup` that attends after the tokens of a cache.

    A subclass implements `sees` and `cache_length`, or the methods that make and use
    caches. A cache is a dict of tensors with the batch on axis 0, see `layers.caches`,
    and `inputs` are `HeadInputs`. `max_length` is the number of tokens a sequence may
    have, and `positions` are their `Positions`; None (the default) for a sequence.
    """

    #: How many tokens `step` takes at once, which may be a property; None for any
    #: number. Longer calls go in pieces.
    tokens_per_step = None
    #: How many queries `read_memory` takes at once, likewise.
    queries_per_step = None

    def sees(self, query, keys, cache):
        """The pattern by positions: which keys queries see, and their distances.

        Args:
            query: `<int32>[queries, 1]`, positions of the queries.
            keys: `<int32>[batch, 1, 1, keys]`, positions of keys; under a causal mask a
                query sees none that is later.
            cache: as returned by `make_cache` or `make_memory`.

        Returns:
            `<bool>` and `<int32>`, broadcastable to `[batch, heads, queries, keys]`.
        """
        raise NotImplementedError

    def cache_length(self, max_length, positions=None):
        """Returns how many of the last positions a query may see."""
        return max_length

    def cached_mask_and_bias(self, inputs):
        """Returns the mask and the bias of the tokens in a cache."""
        return inputs.value_mask, inputs.token_bias

    def make_cache(self, batch_size, max_length, positions=None):
        """Makes an empty cache for steps of self-attention under a causal mask."""
        num_tokens = self.cache_length(max_length, positions)
        return recent_tokens.make(self, batch_size, num_tokens)

    def start(self, cache, inputs):
        """Attends in one parallel pass; returns the output and the cache after it."""
        output = self(inputs=inputs, training=False)
        return output, self.fill_cache(cache, inputs.in_last_segment())

    def fill_cache(self, cache, inputs):
        """Returns the cache after a sequence, given its `HeadInputs`."""
        return recent_tokens.fill(self, cache, inputs)

    def step(self, cache, index, inputs):
        """Attends with tokens from `index` on; returns the output and the new cache."""
        return recent_tokens.step(self, cache, index, inputs)

    def restart_cache(self, cache):
        """Returns a cache of steps as it was before the first token."""
        if "positions" in cache:
            return recent_tokens.restarted(cache)
        return keras.tree.map_structure(ops.zeros_like, cache)

    def max_positions(self, cache):
        """Returns how many positions a cache has room for; None for any number."""
        return cache["rows"].shape[2]

    def make_memory(self, inputs, max_length):
        """Makes the cache for steps of attention to another sequence."""
        return {"rows": rows.of_inputs(self, inputs)}

    def restart_memory(self, cache):
        """Returns a cache of `make_memory` as it was before the first query."""
        return cache

    def read_memory(self, cache, index, inputs):
        """Attends with tokens to another sequence; see `step`."""
        query = index + numbers(inputs.query.shape[2])[:, None]
        keys = numbers(cache["rows"].shape[2])[None, None, None]
        visible, distances = self.sees(query, keys, cache)
        output = rows.attend_to_rows(
            self, inputs.query, cache["rows"], visible, distances
        )
        return output, cache
