"""The cache of multipole heads, whose size does not depend on the length.

It has the first pairs of a document, the most recent ones, and of each cluster the last
pairs that stopped being recent, and the sums over all of these. Padding at the end of a
row is not remembered.

Letters: B batch, G key heads, T tokens of a call, S first pairs, R recent pairs, X
recent pairs and those of a call, K clusters, W pairs of a cluster, E size of a row.
"""

import dataclasses

from keras import ops

from routing_tf.layers.caches import pending_keys
from routing_tf.layers.caches import rows
from routing_tf.layers.routing import rings
from routing_tf.layers.routing import whole_clusters
from routing_tf.layers.routing.cluster_reads import Members
from routing_tf.layers.routing.far_field import Table
from routing_tf.layers.routing.multipole_blocks import Pairs
from routing_tf.layers.support import backends
from routing_tf.layers.support import tensors
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product

#: Names of the sums over all pairs that stopped being recent, by cluster.
SUMS = ("key_sums", "value_sums", "bias_sums")
# What changes where pairs are flushed.
FLUSHED = ("counts", *SUMS)


def make(group, batch_size, max_length):
    """Returns an empty cache of `MultipoleHeads` for a number of sequences."""
    heads, dtype, dim = group.num_key_heads, group.compute_dtype, group.key_dim
    num_keys = 1 if group.far_distance is None else 2
    shape = (batch_size, heads)
    size = rows.row_size(group)
    num_recent = max(group.num_recent + group.flushed_block - 1, 1)
    cache = {
        "start": ops.full((batch_size,), -1, dtype="int32"),
        "end": ops.zeros((batch_size,), "int32"),
        "recent": ops.zeros((*shape, num_recent, size + (num_keys - 1) * dim), dtype),
        "recent_clusters": ops.zeros((*shape, num_recent), "int32"),
        "counts": ops.zeros((*shape, group.num_clusters), "int32"),
    }
    if group.keeps_all:
        cache |= whole_clusters.make(group, shape, max_length)
    else:
        window = group.num_clusters, group.cluster_window
        cache["rows"] = rows.empty_rows(group, *shape, *window)
    sizes = (dim, group.value_dim, 1)
    for name, number in zip(SUMS, sizes):
        sums = (*shape, group.num_clusters, number)
        cache[name] = ops.zeros(sums, "float32")
    if group.num_sinks:
        number = group.num_sinks
        cache["first"] = ops.zeros((*shape, number, size + (num_keys - 1) * dim), dtype)
    if group.key_shift:
        names = ("key", "far_key")[:num_keys]
        keys = {name: ops.zeros((*shape, 1, dim), dtype) for name in names}
        clusters = ops.zeros((*shape, 1, 1), "int32")
        cache["pending"] = pending_keys.none(batch_size, **keys, clusters=clusters)
    return cache


def restarted(cache):
    """Returns a cache as it was before the first token."""
    empty = {
        name: ops.zeros_like(cache[name])
        for name in ("end", "recent", "counts", *SUMS, "first")
        if name in cache
    }
    empty["start"] = ops.full_like(cache["start"], -1)
    if "clusters" in cache:
        # Rows stay, in no cluster.
        none = cache["counts"].shape[2]
        empty["clusters"] = ops.full_like(cache["clusters"], none)
    return {**pending_keys.forgotten(cache), **empty}


def rows_of(group, pairs, offered):
    """Returns the rows of `Pairs`, `[B, G, T, E]`; `offered` is False for no pair."""
    key = pairs.key
    if group.far_distance is not None:
        key = ops.concatenate([key, pairs.far_key], axis=-1)
    dtype = group.compute_dtype
    key, value = ops.cast(key, dtype), ops.cast(pairs.value, dtype)
    return rows.make_rows(key, value, offered, pairs.bias)


def pairs_of(group, x, clusters=None):
    """Undoes `rows_of`: `Pairs`, whose places are 0, and -1 for what is no pair."""
    dim, first = group.key_dim, group.key_dim * (1 if group.far_distance is None else 2)
    return Pairs(
        x[..., :dim],
        x[..., first - dim : first],
        x[..., first:-2],
        clusters,
        ops.cast(x[..., -1] > 0, "int32") - 1,
        ops.cast(x[..., -2], "float32"),
    )


def absorbed(group, cache, index, pairs, offered, real):
    """Returns the cache after the tokens of a call.

    Args:
        group: the `MultipoleHeads`.
        cache: as returned by `make` or this function.
        index: position of the first token.
        pairs: `Pairs` of the tokens, `[B, G, T, ...]`.
        offered: `<bool>`, broadcastable to `[B, G, T]`, which of them are pairs.
        real: `<bool>[B, 1, T]`, False for padding.
    """
    new = rows_of(group, pairs, offered)
    number = length_of(new, 2)
    start, end = _ends(cache, index, real)
    x = ops.concatenate([cache["recent"], new], axis=2)
    clusters = ops.concatenate([cache["recent_clusters"], pairs.clusters], axis=2)
    positions = _positions(cache, index, number)
    places = (positions - start[:, None])[:, None]
    first = ops.maximum(_border(group, cache["start"], cache["end"]), group.num_sinks)
    flushed = ops.logical_and(
        places >= first[:, None, None],
        places < _border(group, start, end)[:, None, None],
    )
    flushed = ops.logical_and(flushed, x[..., -1] > 0)
    names = ("rows", *FLUSHED)
    if group.keeps_all:
        far = far_rows(group, new, pairs.clusters)
        cache = {**cache, **whole_clusters.written(cache, index, far, pairs.clusters)}
        names = ("rows", "token_clusters", *whole_clusters.ORDER, *FLUSHED)
    parts = {name: cache[name] for name in names}

    def flush_them():
        found = flush(group, parts, x, clusters, flushed)
        if not group.keeps_all:
            return found
        is_in = _is_flushed(group, cache, start, end)
        return {**found, **whole_clusters.ordered(group, parts, is_in)}

    # Most tokens flush nothing.
    parts = (
        ops.cond(ops.any(flushed), flush_them, lambda: parts)
        if number == 1
        else flush_them()
    )
    recent = _recent(cache, index, x, clusters, end)
    if group.num_sinks:
        recent["first"] = _first(cache, index, new, start)
    return {**cache, **parts, **recent, "start": start, "end": end}


def _ends(cache, index, real):
    """Returns the first real position and that after the last, `<int32>[B]` each."""
    has_real = ops.any(real[:, 0], axis=-1)
    first = index + ops.cast(ops.argmax(ops.cast(real[:, 0], "int32"), -1), "int32")
    start = ops.where(cache["start"] >= 0, cache["start"], first)
    start = ops.where(has_real, start, cache["start"])
    last = index + rows.last_token(real[:, 0]) + 1
    return start, ops.where(has_real, last, cache["end"])


def _border(group, start, end):
    """Returns the first place that is not flushed after `end`, `<int32>[B]`."""
    return ops.where(start >= 0, group.borders(end - 1 - start), 0)


def _positions(cache, index, number):
    """Returns the positions of the recent tokens and those of a call, `[B, X]`."""
    num_recent = cache["recent"].shape[2]
    recent = cache["end"][:, None] - num_recent + numbers(num_recent)
    new = ops.broadcast_to(index + numbers(number), (ops.shape(recent)[0], number))
    return ops.concatenate([recent, new], axis=1)


def flush(group, parts, x, clusters, flushed):
    """Adds pairs to their clusters.

    Args:
        group: the `MultipoleHeads`.
        parts: dict of what a cache has of clusters.
        x: `<float>[B, G, X, E]`, as `rows_of` returns it.
        clusters: `<int32>[B, G, X]`.
        flushed: `<bool>[B, G, X]`, which pairs are added.
    """
    pairs = pairs_of(group, x, clusters)
    joins = ops.where(flushed, clusters, group.num_clusters)
    joins = backends.one_hot(joins, group.num_clusters, dtype="float32")
    sums = {
        name: parts[name] + product(joins, x, transpose_x=True)
        for name, x in zip(SUMS, pairs.parts())
    }
    if group.keeps_all:
        counts = ops.cast(ops.sum(joins, axis=2), "int32") + parts["counts"]
        return {**parts, **sums, "counts": counts}
    rest = {name: parts[name] for name in ("rows", "counts")}
    clusters, flushed = clusters[..., None], flushed[..., None]
    new = far_rows(group, x, clusters)
    return {**rings.joined(rest, clusters, flushed, rows=new), **sums}


def far_rows(group, x, clusters):
    """From rows as `rows_of` returns them to those of pairs as seen from far."""
    pairs = pairs_of(group, x, clusters)
    return rows.make_rows(pairs.far_key, pairs.value, pairs.places >= 0, pairs.bias)


def _is_flushed(group, cache, start, end):
    """Returns which places of `whole_clusters` are flushed, `<bool>[B, G, X]`."""
    places = numbers(cache["rows"].shape[2]) - start[:, None]
    is_in = ops.logical_and(
        places >= group.num_sinks, places < _border(group, start, end)[:, None]
    )
    return ops.logical_and(is_in[:, None], cache["rows"][..., -1] > 0)


def table(cache):
    """Returns the `Table` of all pairs that a cache has flushed, with 1 for N."""
    keys, values, biases = (cache[name][:, :, None] for name in SUMS)
    counts = ops.cast(cache["counts"], "float32")[:, :, None]
    return Table(keys, values, counts, biases[..., 0])


def table_of(pairs, clusters, num_clusters):
    """Returns the `Table` of `Pairs` in clusters `<int32>[B, G, X]`, with 1 for N."""
    joins = backends.one_hot(clusters, num_clusters, dtype="float32")[:, :, None]
    sums = [product(joins, x[:, :, None], transpose_x=True) for x in pairs.parts()]
    keys, values, *biases = sums
    return Table(keys, values, ops.sum(joins, -2), *(x[..., 0] for x in biases))


def _recent(cache, index, x, clusters, end):
    """Returns the last pairs up to `end`, in order."""
    num_recent, before = cache["recent"].shape[2], cache["end"][:, None]
    positions = end[:, None] - num_recent + numbers(num_recent)
    is_new = positions >= index
    place = ops.where(
        is_new, positions - index + num_recent, positions - before + num_recent
    )
    is_there = ops.logical_or(is_new, positions < before)
    place = ops.clip(place, 0, length_of(x, 2) - 1)[:, None]
    place = ops.broadcast_to(place, ops.shape(cache["recent_clusters"]))
    found = tensors.gather(x, place)
    return {
        "recent": ops.where(is_there[:, None, :, None], found, ops.zeros_like(found)),
        "recent_clusters": tensors.entries_at(clusters, place),
    }


def _first(cache, index, new, start):
    """Returns the first pairs of documents, `[B, G, S, E]`."""
    old, number = cache["first"], length_of(new, 2)
    place = start[:, None] + numbers(old.shape[2]) - index
    is_new = ops.logical_and(place >= 0, place < number)
    is_new = ops.logical_and(is_new, start[:, None] >= 0)
    place = ops.clip(place, 0, number - 1)[:, None]
    place = ops.broadcast_to(place, ops.shape(old)[:3])
    return ops.where(is_new[:, None, :, None], tensors.gather(new, place), old)


class Front:
    """What a cache holds, as a pass over the tokens of a call needs it.

    Args:
        group: the `MultipoleHeads`.
        cache: before the call.
        after: the cache after the call.

    Attributes:
        table: the `Table` of all pairs that the cache has flushed.
        starts: `<int32>[B, 1, 1]`, positions at which documents start.
        length: number of places that the pairs before those of a call take.
    """

    def __init__(self, group, cache, after):
        self._group, self._cache, self._after = group, cache, after
        self.table = table(cache)
        self.starts = after["start"][:, None, None]
        self.length = cache["recent"].shape[2] + group.num_sinks

    def before(self, pairs, size):
        """Returns `Pairs` of the cache, in `size` places, and after them those given.

        First pairs come first, recent ones last.
        """
        group, cache = self._group, self._cache
        found = [pairs_of(group, cache["recent"], cache["recent_clusters"])]
        num_recent = cache["recent"].shape[2]
        positions = cache["end"][:, None] - num_recent + numbers(num_recent)
        places = (positions - cache["start"][:, None])[:, None]
        # What is flushed is in the sums.
        is_there = places >= _border(group, cache["start"], cache["end"])[:, None, None]
        is_there = ops.logical_and(is_there, cache["recent"][..., -1] > 0)
        places = [ops.where(is_there, places, -1)]
        if group.num_sinks:
            first = self._after["first"]
            clusters = ops.zeros_like(first[..., 0], "int32")
            found.insert(0, pairs_of(group, first, clusters))
            wanted = numbers(group.num_sinks)
            places.insert(0, ops.where(first[..., -1] > 0, wanted, -1))
        missing = size - self.length

        def joined(name, none=0):
            parts = [getattr(x, name) for x in (*found, pairs)]
            if name == "places":
                shape = ops.shape(pairs.clusters)
                parts = [*places, ops.broadcast_to(pairs.places, shape)]
            if name == "bias":
                parts = [*parts[:-1], self._bias(pairs)]
            parts = [ops.cast(x, parts[-1].dtype) for x in parts]
            if missing:
                shape = list(ops.shape(parts[0]))
                shape[2] = missing
                parts.insert(len(parts) - 2, ops.full(shape, none, parts[-1].dtype))
            return ops.concatenate(parts, axis=2)

        names = ("key", "far_key", "value", "clusters", "bias")
        return Pairs(
            **{name: joined(name) for name in names}, places=joined("places", -1)
        )

    def _bias(self, pairs):
        shape = ops.shape(pairs.clusters)
        if pairs.bias is None:
            return ops.zeros(shape, "float32")
        return ops.broadcast_to(pairs.bias, shape)

    def with_members(self, members, choice):
        """Returns `Members` that start with those of the cache, and ends among them."""
        group, counts = self._group, self._cache["counts"]
        if group.keeps_all:
            x, clusters = self._cache["rows"], self._cache["clusters"]
            return self._before_members(x, clusters, members), choice.counts
        window = self._cache["rows"].shape[3]
        order = (counts[..., None] + numbers(window)) % max(window, 1)
        batch, heads, number, _ = ops.shape(order)
        place = numbers(number)[:, None] * window + order
        flat = (batch, heads, number * window)
        is_there = counts[..., None] - window + numbers(window) >= 0
        clusters = ops.where(is_there, numbers(number)[:, None], number)
        x = ops.reshape(self._cache["rows"], (*flat, self._cache["rows"].shape[-1]))
        x = tensors.gather(x, ops.reshape(place, flat))
        members = self._before_members(x, ops.reshape(clusters, flat), members)
        gone = counts - ops.minimum(counts, window)
        ends = choice.counts - choice.of_chosen(gone[:, :, None, None])
        return members, ends

    def _before_members(self, x, clusters, members):
        key, value, bias, _ = rows.split_rows(self._group, x)
        key, value, bias = (ops.cast(x, "float32") for x in (key, value, bias))
        old = Members(clusters, key, value, bias)
        return Members(
            *(
                ops.concatenate([getattr(x, field.name) for x in (old, members)], 2)
                for field in dataclasses.fields(Members)
            )
        )


def of_memory(group, pairs, starts):
    """Returns what queries need of another sequence, a dict of tensors.

    Args:
        group: the `MultipoleHeads`.
        pairs: its `Pairs`.
        starts: `<int32>`, broadcastable to `[B, 1, 1]`, positions of the first ones.
    """
    cache = make(group, ops.shape(pairs.key)[0], length_of(pairs.key, 2))
    is_far = pairs.far_clusters(group) < group.num_clusters
    x = rows_of(group, pairs, pairs.places >= 0)
    if group.keeps_all:
        far = far_rows(group, x, pairs.clusters)
        cache |= whole_clusters.written(cache, 0, far, pairs.clusters)
        cache |= whole_clusters.ordered(group, cache, is_far)
    cache = flush(group, cache, x, pairs.clusters, is_far)
    first = pairs.first(starts, group.num_sinks)
    first = rows_of(group, first, first.places >= 0)
    unused = ("start", "end", "recent", "recent_clusters", "pending")
    kept = {name: x for name, x in cache.items() if name not in unused}
    return {**kept, "first": first}
