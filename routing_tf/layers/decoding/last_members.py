"""A memory of the last members of each cluster: for heads in which tokens choose."""

import numpy as np
from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.decoding import rows
from routing_tf.layers.masks import combine_masks
from routing_tf.layers.masks import without_padding
from routing_tf.layers.membership import entries_at
from routing_tf.layers.rules.routed_tokens import real_tokens


def make(group, batch_size, max_length):
    """Returns an empty cache, whose size does not grow with long contexts.

    Args:
        group: the `ClusteredHeads`.
        batch_size: number of sequences.
        max_length: number of tokens a sequence may have; it does not matter.
    """
    # Where a token always sees itself, it is the window's last one.
    sees_itself = not group.key_shift and not group.routes_queries
    num_rows = max(group.attention_window - sees_itself, 1)
    shape = (batch_size, group.num_heads)
    cache = {}
    if group.key_shift:
        # The row that was completed last, and the position of its key.
        cache["open"] = {
            "place": ops.zeros(shape, "int32"),
            "position": ops.full(shape, -1, dtype="int32"),
        }
    return {
        **cache,
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
    new_rows = rows.make_offers(group, tokens)
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
    if "open" in cache:
        before = ops.maximum(newest - 1, 0)
        cluster = entries_at(clusters, before)
        rank = entries_at(counts, cluster) - 1
        is_open = ops.logical_and(entries_at(older, before), newest > 0)
        cache = {
            **cache,
            "open": {
                "place": (cluster * num_rows + rank % num_rows)[..., 0],
                "position": ops.where(is_open, before, -1)[..., 0],
            },
        }
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
    inputs = tokens.inputs
    row = rows.make_rows(tokens.key, tokens.value, inputs.value_mask, inputs.token_bias)
    cache = _remember_newest(group, cache, index, row[:, :, 0])
    shape = ops.shape(cache["counts"])[:2]
    read, cluster = (
        ops.cast(ops.argmax(scores[:, :, 0], axis=-1), "int32")
        for scores in (tokens.query_scores, tokens.key_scores)
    )
    # Whether the token is the last member of the cluster that it reads.
    sees_itself = ops.logical_and(read == cluster, not group.key_shift)[..., None]
    members, near, distances = _last_members(group, cache, read, sees_itself)
    if not group.key_shift:
        members = ops.concatenate([members, row], axis=2)
        near = ops.concatenate([near, sees_itself], axis=-1)
        own = ops.zeros_like(distances[..., :1])
        distances = ops.concatenate([distances, own], axis=-1)
    query = ops.cast(tokens.query, group.compute_dtype)
    output = rows.attend_to_rows(group, query, members, near, distances)
    real = _real(tokens, (*shape, 1))[..., 0]
    newest = {
        "row": row[:, :, 0],
        "cluster": cluster,
        "position": ops.where(real, index, -1),
    }
    output = without_padding(output, real_tokens(inputs))
    return output, {**cache, "newest": newest}


def _last_members(group, cache, cluster, sees_itself):
    """Returns what is remembered of a cluster.

    Args:
        group: the `ClusteredHeads`.
        cache: with the token before.
        cluster: `<int32>[B, H]`.
        sees_itself: `<bool>[B, H, 1]`, whether the token is one of the members.

    Returns:
        Rows `[B, H, R, E]`, which of them the token sees `<bool>[B, H, R]`, and their
        relative positions `<int32>[B, H, R]`.
    """
    batch, heads, num_clusters, num_rows, size = ops.shape(cache["rows"])
    flat = ops.reshape(cache["rows"], (batch, heads, num_clusters, num_rows * size))
    members = membership.gather(flat, cluster[..., None])
    members = ops.reshape(members, (batch, heads, num_rows, size))
    count = entries_at(cache["counts"], cluster[..., None])
    ranks = _ranks(count[..., 0], num_rows)
    distances = ranks - count
    furthest = group.attention_window - ops.cast(sees_itself, "int32")
    near = ops.logical_and(ranks >= 0, distances >= -furthest)
    return members, near, distances


def _remember_newest(group, cache, index, row):
    """Puts the newest token among the others, unless it is to be replaced.

    With shifted keys its value is that of the token `row` at `index`.
    """
    newest, counts = cache["newest"], cache["counts"]
    batch, heads, num_clusters, num_rows, size = ops.shape(cache["rows"])
    is_older = ops.logical_and(newest["position"] >= 0, newest["position"] < index)
    place = entries_at(counts, newest["cluster"][..., None])[..., 0] % num_rows
    place = newest["cluster"] * num_rows + place
    new = newest["row"]
    if group.key_shift:
        new = rows.open_rows(group, new)
        place = ops.where(is_older, place, cache["open"]["place"])
        position = ops.where(is_older, newest["position"], cache["open"]["position"])
        cache = {**cache, "open": {"place": place, "position": position}}
    flat = ops.reshape(cache["rows"], (batch, heads, num_clusters * num_rows, size))
    old = membership.gather(flat, place[..., None])[..., 0, :]
    new = ops.where(is_older[..., None], new, old)
    if group.key_shift:
        follows = ops.logical_and(position >= 0, position == index - 1)
        new = rows.complete_rows(group, new, row, follows)
    place = membership.flat_positions(place[..., None], num_clusters * num_rows)
    flat = ops.scatter_update(
        ops.reshape(flat, (-1, size)), place[:, None], ops.reshape(new, (-1, size))
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
    """Tells which keys are no padding; their queries may be all the same."""
    mask = combine_masks(tokens.key_mask, tokens.inputs.key_mask)
    return ops.ones(shape, "bool") if mask is None else ops.broadcast_to(mask, shape)
