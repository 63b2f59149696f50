"""A memory of the last members of each cluster: for heads in which tokens choose."""

import numpy as np
from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.decoding import rows
from routing_tf.layers.masks import combine_masks
from routing_tf.layers.masks import without_padding
from routing_tf.layers.membership import entries_at
from routing_tf.layers.rules.last_members import real_tokens


def make(group, batch_size, max_length):
    """Returns an empty cache, whose size does not grow with long contexts.

    Args:
        group: the `ClusteredHeads`.
        batch_size: number of sequences.
        max_length: number of tokens a sequence may have; it does not matter.
    """
    # The token itself is the window's last one.
    num_rows = max(group.attention_window - 1, 1)
    shape = (batch_size, group.num_heads)
    return {
        "rows": rows.empty_rows(group, *shape, group.num_choices, num_rows),
        "counts": ops.zeros((*shape, group.num_choices), "int32"),
        "newest": {
            "row": rows.empty_rows(group, *shape),
            "cluster": ops.zeros(shape, "int32"),
            "position": ops.full(shape, -1, dtype="int32"),
        },
    }


def fill(group, cache, tokens):
    """Returns the cache behind a sequence that starts at position 0."""
    num_clusters, num_rows = cache["rows"].shape[2:4]
    batch, heads, length, _ = ops.shape(tokens.value)
    new_rows = rows.make_rows(
        tokens.key, tokens.value, tokens.inputs.value_mask, tokens.inputs.token_bias
    )
    clusters = ops.cast(ops.argmax(tokens.key_scores, axis=-1), "int32")
    real = _real(tokens, (batch, heads, length))
    last = rows.last_token(real)
    positions = np.arange(length, dtype="int32")
    older = ops.logical_and(real, positions != last[..., None])
    # Sorted by cluster and position; what is not older comes last.
    sorted_clusters = ops.where(older, clusters, num_clusters)
    by_cluster = ops.sort(sorted_clusters * length + positions, axis=-1) % length
    one_hot = ops.one_hot(sorted_clusters, num_clusters, dtype="int32")
    counts = ops.sum(one_hot, axis=2)
    first = ops.cumsum(counts, axis=-1) - counts
    ranks = _ranks(counts, num_rows)
    index = ops.clip(first[..., None] + ranks, 0, length - 1)
    newest = ops.maximum(last, 0)[..., None]
    return {
        **cache,
        "rows": membership.gather(new_rows, entries_at(by_cluster, index)),
        "counts": counts,
        "newest": {
            "row": membership.gather(new_rows, newest)[..., 0, :],
            "cluster": entries_at(clusters, newest)[..., 0],
            "position": last,
        },
    }


def step(group, cache, index, tokens):
    """Attends with the token at position `index`; returns output and cache."""
    cache = _remember_newest(cache, index)
    shape = ops.shape(cache["counts"])[:2]
    cluster = ops.cast(ops.argmax(tokens.key_scores[:, :, 0], axis=-1), "int32")
    row = rows.make_rows(
        tokens.key, tokens.value, tokens.inputs.value_mask, tokens.inputs.token_bias
    )
    _, _, num_clusters, num_rows, size = cache["rows"].shape
    flat = ops.reshape(cache["rows"], (*shape, num_clusters, num_rows * size))
    members = membership.gather(flat, cluster[..., None])
    members = ops.reshape(members, (*shape, num_rows, size))
    count = entries_at(cache["counts"], cluster[..., None])
    ranks = _ranks(count[..., 0], num_rows)
    distances = ranks - count
    near = ops.logical_and(ranks >= 0, distances > -group.attention_window)
    output = rows.attend_to_rows(
        group,
        ops.cast(tokens.query, group.compute_dtype),
        ops.concatenate([members, row], axis=2),
        ops.concatenate([near, ops.ones_like(near[..., :1])], axis=-1),
        ops.concatenate([distances, ops.zeros_like(distances[..., :1])], axis=-1),
    )
    real = _real(tokens, (*shape, 1))[..., 0]
    newest = {
        "row": row[:, :, 0],
        "cluster": cluster,
        "position": ops.where(real, index, -1),
    }
    output = without_padding(output, real_tokens(tokens.inputs))
    return output, {**cache, "newest": newest}


def _remember_newest(cache, index):
    """Puts the newest token among the others, unless it is to be replaced."""
    newest, counts = cache["newest"], cache["counts"]
    batch, heads, num_clusters, num_rows, size = ops.shape(cache["rows"])
    is_older = ops.logical_and(newest["position"] >= 0, newest["position"] < index)
    place = entries_at(counts, newest["cluster"][..., None])[..., 0] % num_rows
    place = newest["cluster"] * num_rows + place
    flat = ops.reshape(cache["rows"], (batch, heads, num_clusters * num_rows, size))
    old = membership.gather(flat, place[..., None])[..., 0, :]
    row = ops.where(is_older[..., None], newest["row"], old)
    place = membership.flat_positions(place[..., None], num_clusters * num_rows)
    flat = ops.scatter_update(
        ops.reshape(flat, (-1, size)), place[:, None], ops.reshape(row, (-1, size))
    )
    added = ops.one_hot(newest["cluster"], num_clusters, dtype="int32")
    return {
        **cache,
        "rows": ops.reshape(flat, ops.shape(cache["rows"])),
        "counts": counts + added * ops.cast(is_older, "int32")[..., None],
    }


def _ranks(counts, num_rows):
    """Ranks of the members in the places of a cluster; negative in empty ones.

    From `[...]` to `[..., num_rows]`: the member of rank r is at r modulo `num_rows`.
    """
    newest = counts[..., None] - 1
    places = np.arange(num_rows, dtype="int32")
    return newest - (newest - places) % num_rows


def _real(tokens, shape):
    mask = combine_masks(tokens.key_mask, real_tokens(tokens.inputs))
    return ops.ones(shape, "bool") if mask is None else ops.broadcast_to(mask, shape)
