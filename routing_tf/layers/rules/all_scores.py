"""Clusters that choose again, for each query, among all tokens up to it."""

import dataclasses

from keras import ops

from routing_tf.layers import key_heads
from routing_tf.layers.decoding import rows
from routing_tf.layers.masks import without_padding
from routing_tf.layers.rules.prefixes import Prefixes


class AllScores(Prefixes):
    """Prefixes in which any token may become a member later; caches contain all."""

    def make_cache(self, batch_size, max_length):
        names = {"key": self.group.num_key_heads}
        if not self.group.share_query_key:
            names["query"] = self.group.num_heads
        keys = (batch_size, self.group.num_key_heads, max_length)
        cache = {"rows": rows.empty_rows(self.group, *keys)}
        for name, heads in names.items():
            real = (batch_size, heads, max_length)
            scores = (*real, self.group.num_clusters)
            cache[f"{name}_scores"] = ops.zeros(scores, "float32")
            cache[f"{name}_mask"] = ops.zeros(real, "bool")
        return cache

    def restart(self, cache):
        names = [name for name in ("key_mask", "query_mask") if name in cache]
        return {**cache, **{name: ops.zeros_like(cache[name]) for name in names}}

    def fill_cache(self, cache, tokens):
        return _update(cache, 0, tokens, rows.make_offers(self.group, tokens))

    def step(self, cache, index, tokens):
        row = rows.make_offers(self.group, tokens)
        if self.group.key_shift:
            cache = {**cache, "rows": self._complete(cache["rows"], index, tokens)}
        cache = _update(cache, index, tokens, row)
        remembered_rows, key_scores, key_mask = (
            key_heads.for_queries(cache[name], tokens.query.shape[1])
            for name in ("rows", "key_scores", "key_mask")
        )
        key, value, bias, real = rows.split_rows(self.group, remembered_rows)
        query = ops.cast(tokens.query, self.group.compute_dtype)
        remembered = dataclasses.replace(
            tokens,
            key=key,
            query_scores=cache.get("query_scores", key_scores),
            key_scores=key_scores,
            query_mask=cache.get("query_mask", key_mask),
            key_mask=key_mask,
            inputs=dataclasses.replace(
                tokens.inputs,
                value=value,
                value_mask=real,
                token_bias=bias,
                segments=None,
            ),
        )
        output = self.attend_block(remembered, index, query, training=False)
        return without_padding(output, tokens.inputs.query_mask), cache

    def _complete(self, cached_rows, index, tokens):
        """Returns the rows with the value that follows the token before `index`."""
        # The first token completes no row: its own row overwrites this one.
        before = ops.maximum(index - 1, 0)
        row = ops.take(cached_rows, before[None], axis=2)
        follows = ops.ones_like(row[..., 0], "bool")
        row = rows.complete_rows(self.group, row, rows.of_tokens(tokens), follows)
        return ops.slice_update(cached_rows, (0, 0, before, 0), row)


def _update(cache, index, tokens, row):
    """Returns the cache with the rows, scores and masks of tokens from `index` on."""
    new = {"rows": row}
    for name in ("key", "query") if "query_scores" in cache else ("key",):
        scores, mask = (getattr(tokens, f"{name}_{x}") for x in ("scores", "mask"))
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
