"""Clusters that choose again, for each query, among all tokens up to it."""

import dataclasses

from keras import ops

from routing_tf.layers.caches import rows
from routing_tf.layers.routing.prefixes import Prefixes
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support.head_inputs import read_next_values
from routing_tf.layers.support.masks import without_padding


class AllScores(Prefixes):
    """Prefixes whose members are evenly spread over the order of scores.

    Any token may become a member later, so caches contain all.
    """

    def num_candidates(self, length):
        return length

    def is_member(self, ranks, num_tokens):
        stride = ops.maximum(num_tokens // self.window, 1)
        return ops.logical_and(ranks % stride == 0, ranks < stride * self.window)

    def make_cache(self, batch_size, max_length):
        names = {"key": self.num_key_heads}
        if not self.shares_vectors:
            names["query"] = self.num_heads
        keys = (batch_size, self.num_key_heads, max_length)
        cache = {"rows": rows.empty_rows(self, *keys)}
        for name, heads in names.items():
            real = (batch_size, heads, max_length)
            scores = (*real, self.num_clusters)
            cache[f"{name}_scores"] = ops.zeros(scores, "float32")
            cache[f"{name}_mask"] = ops.zeros(real, "bool")
        return cache

    def restart(self, cache):
        names = [name for name in ("key_mask", "query_mask") if name in cache]
        return {**cache, **{name: ops.zeros_like(cache[name]) for name in names}}

    @property
    def tokens_per_step(self):
        # As many go at once as in one pass.
        return self.block_size

    def fill_cache(self, cache, tokens):
        return _update(cache, 0, tokens)

    def step(self, cache, index, tokens):
        cache = _update(cache, index, tokens)
        remembered_rows, key_scores, key_mask = (
            head_inputs.for_queries(cache[name], tokens.query.shape[1])
            for name in ("rows", "key_scores", "key_mask")
        )
        key, value, bias, real = rows.split_rows(self, remembered_rows)
        query = ops.cast(tokens.query, self.compute_dtype)
        inputs = dataclasses.replace(
            tokens.inputs,
            value=value,
            key_mask=key_mask,
            value_mask=real,
            token_bias=bias,
            segments=None,
        )
        remembered = dataclasses.replace(
            tokens,
            key=key,
            of_queries=tokens.of_queries.with_entries(
                cache.get("query_scores", key_scores)
            ),
            of_keys=tokens.of_keys.with_entries(key_scores),
            query_mask=cache.get("query_mask", key_mask),
            key_mask=key_mask,
            inputs=read_next_values(inputs) if self.key_shift else inputs,
        )
        output = self.attend_block(remembered, index, query, training=False)
        return without_padding(output, tokens.inputs.query_mask), cache


def _update(cache, index, tokens):
    """Returns the cache with the rows, scores and masks of tokens from `index` on."""
    new = {"rows": rows.of_tokens(tokens)}
    found = {"key": (tokens.of_keys.scores, tokens.key_mask)}
    if "query_scores" in cache:
        found["query"] = tokens.of_queries.scores, tokens.query_mask
    for name, (scores, mask) in found.items():
        shape = ops.shape(scores)[:3]
        new[f"{name}_scores"] = scores
        new[f"{name}_mask"] = (
            ops.ones(shape, "bool") if mask is None else ops.broadcast_to(mask, shape)
        )
    return {
        name: ops.slice_update(
            cache[name], (0, 0, index) + (0,) * (len(x.shape) - 3), x
        )
        for name, x in new.items()
    }
