"""Another sequence that heads attend to, arranged once for all steps.

`read` functions attend with the query at a position and return output and cache.
"""

import numpy as np
from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.decoding import rows
from routing_tf.layers.masks import without_padding


def make(group, inputs):
    """Returns the cache of heads that find their keys by position."""
    mask, bias = group.remembered(inputs)
    return {"rows": rows.make_rows(inputs.key, inputs.value, mask, bias)}


def read(group, cache, index, inputs):
    """Attends with the query at position `index`."""
    keys = np.arange(cache["rows"].shape[2], dtype="int32")[None, None]
    visible, distances = group.sees(index, keys, cache)
    output = rows.attend_to_rows(group, inputs.query, cache["rows"], visible, distances)
    return output, cache


def restart(cache):
    """Returns the cache before the first query."""
    if "counts" not in cache:
        return cache
    position = cache["newest"]["position"]
    newest = {**cache["newest"], "position": ops.full_like(position, -1)}
    return {**cache, "counts": ops.zeros_like(cache["counts"]), "newest": newest}


def make_clusters(group, tokens):
    """Returns the cache of clustered heads: the members of each cluster.

    Args:
        group: the `ClusteredHeads`.
        tokens: `RoutedTokens` of the memory.
    """
    inputs = tokens.inputs
    members, belongs = group.choose(tokens.key_scores, tokens.key_mask)
    memory = rows.make_rows(
        tokens.key, tokens.value, inputs.value_mask, inputs.token_bias
    )
    memory = membership.gather(memory, members)
    if belongs is not None:
        real = memory[..., -1:] * ops.cast(belongs, memory.dtype)[..., None]
        memory = ops.concatenate([memory[..., :-1], real], axis=-1)
    shape = ops.shape(members)[:3]
    return {
        "rows": memory,
        "counts": ops.zeros(shape, "int32"),
        "newest": {
            "cluster": ops.zeros(shape[:2], "int32"),
            "position": ops.full(shape[:2], -1, dtype="int32"),
        },
    }


def read_clusters(group, cache, index, tokens):
    """Attends with the query at position `index` to the members of its best cluster."""
    newest, counts = cache["newest"], cache["counts"]
    num_clusters = counts.shape[-1]
    is_older = ops.logical_and(newest["position"] >= 0, newest["position"] < index)
    added = ops.one_hot(newest["cluster"], num_clusters, dtype="int32")
    counts = counts + added * ops.cast(is_older, "int32")[..., None]
    cluster = ops.cast(ops.argmax(tokens.query_scores[:, :, 0], axis=-1), "int32")
    batch, heads = ops.shape(counts)[:2]
    window, size = cache["rows"].shape[3:]
    flat = ops.reshape(cache["rows"], (batch, heads, num_clusters, window * size))
    members = membership.gather(flat, cluster[..., None])
    rank = membership.entries_at(counts, cluster[..., None])
    output = rows.attend_to_rows(
        group,
        ops.cast(tokens.query, group.compute_dtype),
        ops.reshape(members, (batch, heads, window, size)),
        None,
        np.arange(window, dtype="int32") - rank,
    )
    mask = tokens.inputs.query_mask
    position = ops.zeros_like(newest["position"]) + index
    if mask is not None:
        position = ops.where(mask[..., 0], position, -1)
    newest = {"cluster": cluster, "position": position}
    cache = {**cache, "counts": counts, "newest": newest}
    return without_padding(output, mask), cache
