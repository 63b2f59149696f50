"""A memory of all tokens and their scores: where any of them may become a member."""

import dataclasses

from keras import ops

from routing_tf.layers.decoding import rows
from routing_tf.layers.masks import without_padding
from routing_tf.layers.rules import prefixes


def make(group, batch_size, max_length):
    """Returns an empty cache.

    Args:
        group: `ClusterStridedHeads`.
        batch_size: number of sequences.
        max_length: number of tokens a sequence may have.
    """
    heads = group.num_heads
    scores = (batch_size, heads, max_length, group.num_clusters)
    real = (batch_size, heads, max_length)
    cache = {
        "rows": rows.empty_rows(group, batch_size, heads, max_length),
        "key_scores": ops.zeros(scores, "float32"),
        "key_mask": ops.zeros(real, "bool"),
    }
    if not group.share_query_key:
        cache |= {
            "query_scores": ops.zeros(scores, "float32"),
            "query_mask": ops.zeros(real, "bool"),
        }
    return cache


def fill(group, cache, tokens):
    """Returns the cache behind a sequence that starts at position 0."""
    return _update(cache, 0, tokens, rows.make_offers(group, tokens))


def step(group, cache, index, tokens):
    """Attends with the token at position `index`; returns output and cache."""
    row = rows.make_offers(group, tokens)
    if group.key_shift:
        cache = {**cache, "rows": _complete(group, cache["rows"], index, tokens)}
    cache = _update(cache, index, tokens, row)
    key, value, bias, real = rows.split_rows(group, cache["rows"])
    query = ops.cast(tokens.query, group.compute_dtype)
    remembered = dataclasses.replace(
        tokens,
        query=key if group.share_query_key else query,
        key=key,
        query_scores=cache.get("query_scores", cache["key_scores"]),
        key_scores=cache["key_scores"],
        query_mask=cache.get("query_mask", cache["key_mask"]),
        key_mask=cache["key_mask"],
        inputs=dataclasses.replace(
            tokens.inputs, value=value, value_mask=real, token_bias=bias
        ),
    )
    output = prefixes.attend_block(group, remembered, index, query, training=False)
    return without_padding(output, tokens.inputs.query_mask), cache


def _complete(group, cached_rows, index, tokens):
    """Returns the rows with the value that follows the token before `index`."""
    inputs = tokens.inputs
    new = rows.make_rows(tokens.key, tokens.value, inputs.value_mask, inputs.token_bias)
    # The first token completes none: its own row is put over it.
    before = ops.maximum(index - 1, 0)
    row = ops.take(cached_rows, before[None], axis=2)
    row = rows.complete_rows(group, row, new, ops.ones_like(row[..., 0], "bool"))
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
