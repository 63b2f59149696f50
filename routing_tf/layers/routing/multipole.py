"""Attention to near pairs, the best clusters, and means of the rest, in one softmax.

Letters: B batch, H heads, G key heads, L length, X pairs, N blocks, A tokens of a
block, R queries of a block (those of all heads of a key head, one token after the
other), W pairs of a window, S sinks, K clusters, P clusters that a query reads, D dim.
"""

import dataclasses
import math
from typing import Any

from keras import ops

from routing_tf.layers.caches import multipole_cache
from routing_tf.layers.caches import rows
from routing_tf.layers.routing import far_field
from routing_tf.layers.routing import rings
from routing_tf.layers.routing.cluster_reads import GatheredReads
from routing_tf.layers.routing.cluster_reads import Members
from routing_tf.layers.routing.cluster_reads import SortedReads
from routing_tf.layers.routing.far_field import HIDDEN
from routing_tf.layers.routing.far_field import Near
from routing_tf.layers.routing.far_field import OneSoftmax
from routing_tf.layers.routing.far_field import Poles
from routing_tf.layers.support import backends
from routing_tf.layers.support import gathering
from routing_tf.layers.support import key_heads
from routing_tf.layers.support.axes import cut_axis
from routing_tf.layers.support.blocks import break_into_blocks
from routing_tf.layers.support.blocks import memory_windows
from routing_tf.layers.support.lengths import is_known
from routing_tf.layers.support.lengths import larger
from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.lengths import num_parts
from routing_tf.layers.support.lengths import numbers
from routing_tf.layers.support.products import product

# Tokens of a block where borders of flushed pairs do not say so.
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 64


class Blocks:
    """How tokens lie in blocks, each with a window of pairs before it.

    Args:
        group: the `MultipoleHeads`.
        length: number of queries.
        is_whole: whether places are positions, from 0 on.
        front: number of places of pairs that stand before the first block. Defaults to
            0.

    Attributes:
        size: number of tokens of a block.
        before: number of blocks of a window before its own.
        lead: number of empty places before the first query.
        number: number of blocks of queries.
        front: number of blocks of pairs before the first block of queries.
        num_blocks: number of blocks of pairs.
        is_aligned: whether all pairs of a window, and no others, are near.
        has_far: whether there may be pairs that are not near.
    """

    def __init__(self, group, length, is_whole, front=0):
        recent, flushed = group.num_recent, group.flushed_block
        self.is_aligned = is_whole and flushed >= SMALLEST_BLOCK
        self.has_far = not (is_whole and is_known(length)) or length >= recent + flushed
        if self.is_aligned:
            # All queries of a block have one border, at which their window starts.
            self.size = flushed
            self.before, rest = divmod(recent - 1, flushed)
            self.before += rest > 0
            self.lead = -rest % flushed
        else:
            self.size = min(max(SMALLEST_BLOCK, recent), LARGEST_BLOCK)
            self.before = num_parts(max(recent + flushed - 2, 0), self.size)
            self.lead = 0
        self.number = num_parts(self.lead + length, self.size)
        if is_whole and is_known(length):
            self.before = min(self.before, self.number - 1)
        self.front = num_parts(front, self.size)
        self.num_blocks = self.number + self.front

    def of_queries(self, x, none=0):
        """From `[B, H, L, ...]` to `[B, H, N, A, ...]`."""
        missing = self.number * self.size - self.lead - length_of(x, 2)
        return break_into_blocks(
            _padded(x, self.lead, missing, none), self.size, axis=2
        )

    def of_pairs(self, x, none=0):
        """The same for pairs, which have no lead."""
        missing = self.num_blocks * self.size - length_of(x, 2)
        return break_into_blocks(_padded(x, 0, missing, none), self.size, axis=2)

    def windows(self, x, none=0):
        """From pairs `[B, G, X, ...]` to windows `[B, G, N, W, ...]`."""
        x = self.of_pairs(x, none)
        x = memory_windows(x - none if none else x, (self.before,), (0,), axis=2)
        x = cut_axis(x, self.num_blocks - self.number, self.num_blocks, axis=2)
        return x + none if none else x

    def in_order(self, x, length):
        """Undoes `of_queries`."""
        batch, heads, blocks, size, *rest = ops.shape(x)
        x = ops.reshape(x, (batch, heads, blocks * size, *rest))
        return cut_axis(x, self.lead, self.lead + length, axis=2)


def _padded(x, before, after, fill):
    if is_known(before, after) and not before and not after:
        return x
    padding = [(0, 0)] * len(x.shape)
    padding[2] = (before, after)
    return ops.pad(x, padding, constant_values=fill)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Window:
    """What queries see of the pairs of windows, and of first pairs beside them.

    Args:
        logits: `<float32>[B, G, N, R, S + W]`, hidden where a pair is not near.
        flushed: `<float32>`, broadcastable to `logits`, 1 for pairs that queries see
            from far; None where there are none.
        far_logits: `<float32>[B, G, N, R, S + W]`, as queries see pairs from far,
            without bias and soft cap.
        bias: `<float32>`, broadcastable to `logits`; None without any.
    """

    logits: Any
    flushed: Any
    far_logits: Any
    bias: Any


class MultipolePass:
    """Attention of many queries under a causal mask.

    Args:
        group: the `MultipoleHeads`.
        queries: `Queries`.
        pairs: `Pairs`, one for each query.
        is_whole: whether places are positions, from 0 on. Defaults to False.
        front: what a cache holds, a `Front`; None (the default) for nothing.
    """

    def __init__(self, group, queries, pairs, is_whole=False, front=None):
        self._group, self._queries, self._front = group, queries, front
        self._length = length_of(queries.near, 2)
        number = 0 if front is None else front.length
        self._blocks = Blocks(group, self._length, is_whole, number)
        if front is not None:
            pairs = front.before(pairs, self._blocks.front * self._blocks.size)
        self._pairs, self._num_key_heads = pairs, pairs.key.shape[1]
        self._first = self._first_index()
        # Clusters in which queries see pairs from far.
        self._clusters = ops.where(
            pairs.places >= group.num_sinks, pairs.clusters, group.num_clusters
        )

    def attend(self, training=None):
        """Returns `<float32>[B, H, L, D]`; `training` says whether dropout is on."""
        group = self._group
        query = self._rows(self._queries.near)
        far = self._rows(ops.cast(self._queries.far, "float32"))
        window, value = self._window(query, far), self._in_windows(self._pairs.value)
        if not self._blocks.has_far:
            near = Near(window.logits, value)
            return self._in_order(OneSoftmax(group, near).output(training))
        clusters = None
        if window.flushed is not None:
            none = group.num_clusters
            clusters = self._in_windows(self._clusters, none)
            clusters = backends.one_hot(clusters, none, dtype="float32")
        sums = self._running_sums()
        poles = self._poles(far, sums, window, clusters)
        means = poles.means(group.capped)
        choice = far_field.choose(means, poles.counts, group.clusters_per_query)
        reads = self._reads(far, choice)
        near = Near(window.logits, value, window.flushed, clusters)
        softmax = OneSoftmax(group, near, poles, choice, reads)
        return self._in_order(softmax.output(training))

    def _window(self, query, far):
        """Compares queries with windows and first pairs; returns a `_Window`."""
        group, pairs = self._group, self._pairs
        own = self._of_rows(self._queries.places, -1)[..., None]
        places = self._places()[..., None, :]
        seen = ops.logical_and(places <= own, places >= 0)
        if pairs.segments is not None:
            segments = self._of_rows(self._queries.segments)[..., None]
            others = self._in_windows(pairs.segments)[..., None, :]
            seen = ops.logical_and(seen, segments == others)
        is_first, flushed = places < group.num_sinks, None
        if not self._blocks.is_aligned:
            near = ops.logical_or(places >= group.borders(own), is_first)
            flushed = ops.logical_and(seen, ops.logical_not(near))
            flushed = ops.cast(flushed, "float32")
            seen = ops.logical_and(seen, near)
        logits = product(query, self._in_windows(pairs.key), transpose_y=True)
        logits = far_logits = ops.cast(logits, "float32")
        if group.far_distance is not None:
            key = ops.cast(self._in_windows(pairs.far_key), "float32")
            far_logits = product(far, key, transpose_y=True)
            is_far = ops.logical_and(is_first, own - places > group.far_distance)
            logits = ops.where(is_far, far_logits, logits)
        logits, bias = group.capped(logits), None
        if pairs.bias is not None:
            bias = self._in_windows(pairs.bias)[..., None, :]
            logits = logits + bias
        return _Window(ops.where(seen, logits, HIDDEN), flushed, far_logits, bias)

    def _poles(self, far, sums, window, clusters):
        """Returns the `Poles` of all queries."""
        key_dim, dim = far.shape[-1], self._pairs.value.shape[-1]
        logits = product(far, sums[..., :key_dim], transpose_y=True)
        counts, biases = sums[..., None, :, key_dim + dim], None
        if window.bias is not None:
            biases = sums[..., None, :, key_dim + dim + 1]
        goes_on = None
        if self._pairs.segments is not None:
            # Sums are those of the document at the start of a window.
            own = self._of_rows(self._queries.segments)[..., None]
            goes_on = ops.cast(
                own == self._segments_of_sums()[..., None, None], "float32"
            )
            logits, counts = logits * goes_on, counts * goes_on
            biases = None if biases is None else biases * goes_on
        if window.flushed is not None:
            flushed = window.flushed
            logits = logits + product(flushed * window.far_logits, clusters)
            counts = counts + product(flushed, clusters)
            if biases is not None:
                biases = biases + product(flushed * window.bias, clusters)
        values = sums[..., key_dim : key_dim + dim]
        return Poles(logits, counts, biases, values, goes_on)

    def _running_sums(self):
        """Returns sums over the pairs before each window, by cluster.

        Columns are those of keys as seen from far, of values, the number of pairs, and
        that of biases, if any: `<float32>[B, G, N, K, E]`.
        """
        pairs, blocks, count = self._pairs, self._blocks, self._group.num_clusters
        parts = [ops.cast(x, "float32") for x in (pairs.far_key, pairs.value)]
        parts.append(ops.ones_like(parts[1][..., :1]))
        if pairs.bias is not None:
            parts.append(parts[-1] * pairs.bias[..., None])
        added = blocks.of_pairs(ops.concatenate(parts, axis=-1))
        number = larger(blocks.num_blocks - blocks.before - 1, 0)
        added = cut_axis(added, 0, number, axis=2)
        clusters = cut_axis(blocks.of_pairs(self._clusters, count), 0, number, axis=2)
        clusters = backends.one_hot(clusters, count, dtype="float32")
        if pairs.segments is not None:
            return self._sums_of_segments(clusters, added)
        sums = ops.cumsum(product(clusters, added, transpose_x=True), axis=2)
        sums = _padded(sums, 1 + max(blocks.before - blocks.front, 0), 0, 0)
        first = max(blocks.front - blocks.before, 0)
        sums = cut_axis(sums, first, first + blocks.number, axis=2)
        return sums if self._front is None else sums + self._front.sums[:, :, None]

    def _sums_of_segments(self, clusters, added):
        """Returns sums over the pairs of the document at the start of each window."""
        blocks = self._blocks
        segments = blocks.of_pairs(self._pairs.segments, -1)
        starts = segments[..., 0]
        number = length_of(added, 2)
        goes_on = cut_axis(segments, 0, number, axis=2)
        goes_on = goes_on == cut_axis(starts, 1, number + 1, axis=2)[..., None]
        clusters = clusters * ops.cast(goes_on, "float32")[..., None]
        sums = product(clusters, added, transpose_x=True)
        # A document is at the start of all blocks between its first and its last one.
        own, other = self._segments_of_sums(), cut_axis(starts, 1, number + 1, axis=2)
        block = numbers(blocks.number)[:, None] - blocks.before
        is_own = ops.logical_and(
            own[..., None] == other[..., None, :], numbers(number) < block
        )
        batch, heads, _, *rest = ops.shape(sums)
        flat = ops.reshape(sums, (batch, heads, number, math.prod(rest)))
        is_own = ops.broadcast_to(is_own, (batch, heads, blocks.number, number))
        flat = product(ops.cast(is_own, "float32"), flat)
        return ops.reshape(flat, (batch, heads, blocks.number, *rest))

    def _segments_of_sums(self):
        """Returns the document at the start of each window, `<int32>[B, 1, N]`."""
        blocks = self._blocks
        starts = blocks.of_pairs(self._pairs.segments, -1)[..., 0]
        starts = _padded(starts + 1, blocks.before, 0, 0) - 1
        return cut_axis(starts, 0, blocks.number, axis=2)

    def _reads(self, far, choice):
        """Returns the `SortedReads` of all queries."""
        pairs, ends = self._pairs, choice.counts
        bias = pairs.bias
        if bias is not None:
            bias = ops.broadcast_to(bias, ops.shape(self._clusters))
        key, value = (ops.cast(x, "float32") for x in (pairs.far_key, pairs.value))
        members = Members(self._clusters, key, value, bias)
        if pairs.segments is not None:
            ends = self._ends_in_segments(choice)
        if self._front is not None:
            members, ends = self._front.with_members(members, choice)
        window = self._group.window_of_clusters(length_of(members.key, 2))
        return SortedReads(self._group, far, members, choice, ends, window)

    def _ends_in_segments(self, choice):
        """Returns how many pairs, of any document, chosen clusters have before borders.

        They are `<int32>[B, G, N, R, P]`.
        """
        group = self._group
        borders = ops.maximum(group.borders(self._queries.places), 0)
        borders = ops.minimum(borders + self._queries.starts, self._length)
        joins = backends.one_hot(self._clusters, group.num_clusters, dtype="int32")
        counts = ops.cumsum(joins, axis=2)
        counts = _padded(counts, 1, 0, 0)
        shape = (*ops.shape(counts)[:2], self._length)
        counts = gathering.gather(counts, ops.broadcast_to(borders, shape))
        batch, heads, length, number = ops.shape(counts)
        counts = self._blocks.of_queries(counts)
        per_key = group.num_heads // self._num_key_heads
        if per_key > 1:
            counts = ops.repeat(counts, per_key, axis=3)
        return choice.of_chosen(counts)

    def _first_index(self):
        """Returns where first pairs stand, `<int32>[B, 1, S]`; None without any.

        In packed documents those of the document at the start of each window,
        `<int32>[B, 1, N, S]`.
        """
        group, blocks, starts = self._group, self._blocks, self._queries.starts
        if not group.num_sinks:
            return None
        if self._front is not None:
            starts = 0
        if self._pairs.segments is None:
            return numbers(group.num_sinks)[None, None] + starts
        starts = _padded(blocks.of_pairs(starts)[..., 0], blocks.before, 0, 0)
        starts = cut_axis(starts, 0, blocks.number, axis=2)
        return starts[..., None] + numbers(group.num_sinks)

    def _places(self):
        """Returns the places of first pairs and those of windows, `[B, G, N, S + W]`.

        They are -1 for what is no pair, and for first pairs that stand elsewhere.
        """
        group, blocks, places = self._group, self._blocks, self._pairs.places
        if self._first is None:
            return blocks.windows(places, -1)
        found, wanted = self._at_first(places), numbers(group.num_sinks)
        is_there = found == wanted
        if self._pairs.segments is None:
            places = ops.where(places < group.num_sinks, -1, places)
        else:
            window = (numbers(blocks.number) - blocks.before) * blocks.size
            is_there = ops.logical_and(is_there, self._first < window[:, None])
        found = ops.where(is_there, found, -1)
        return self._beside(found, blocks.windows(places, -1))

    def _in_windows(self, x, none=0):
        """Returns what stands at first pairs and in windows, `[B, G, N, S + W, ...]`.

        Args:
            x: `[B, G, X, ...]`.
            none: what there is in places without a pair.
        """
        windows = self._blocks.windows(x, none)
        if self._first is None:
            return windows
        return self._beside(self._at_first(x), windows)

    def _at_first(self, x):
        """From `[B, G, X, ...]` to `[B, G, S, ...]` or `[B, G, N, S, ...]`."""
        length = length_of(x, 2)
        index = ops.minimum(self._first, length - 1)
        index = ops.broadcast_to(index, (*ops.shape(x)[:2], *ops.shape(index)[2:]))
        if len(x.shape) == 3:
            return gathering.entries_at(x, index)
        return gathering.gather(x, index)

    def _beside(self, first, windows):
        if len(first.shape) < len(windows.shape):
            first = first[:, :, None]
            shape = ops.shape(windows)
            first = ops.broadcast_to(
                first, (*ops.shape(first)[:2], shape[2], *ops.shape(first)[3:])
            )
        return ops.concatenate([first, windows], axis=3)

    def _rows(self, x):
        """From `[B, H, L, D]` to `[B, G, N, R, D]`."""
        x = self._blocks.of_queries(x)
        if x.shape[1] == self._num_key_heads:
            return x
        x = key_heads.of_queries(x, self._num_key_heads)
        x = ops.transpose(x, (0, 1, 3, 4, 2, 5))
        batch, heads, number, size, per_key, dim = ops.shape(x)
        return ops.reshape(x, (batch, heads, number, size * per_key, dim))

    def _of_rows(self, x, none=0):
        """Returns what belongs to tokens, `[B, 1, L]`, of rows, `[B, 1, N, R]`."""
        x = self._blocks.of_queries(x, none)
        per_key = self._group.num_heads // self._num_key_heads
        return x if per_key == 1 else ops.repeat(x, per_key, axis=-1)

    def _in_order(self, x):
        """From `[B, G, N, R, D]` to `[B, H, L, D]`."""
        batch, heads, number, rows, dim = ops.shape(x)
        size = self._blocks.size
        if rows != size:
            x = ops.reshape(x, (batch, heads, number, size, rows // size, dim))
            x = key_heads.all_queries(ops.transpose(x, (0, 1, 4, 2, 3, 5)))
        return self._blocks.in_order(x, self._length)


def attend_next(group, cache, index, query, far):
    """Attends with the newest token of a cache; returns `<float32>[B, H, 1, D]`.

    Args:
        group: the `MultipoleHeads`.
        cache: that of `caches.multipole_cache`, with the token.
        index: position of the token.
        query: `<float>[B, H, 1, D]`, as it sees near pairs.
        far: the same, as it sees pairs from far.
    """
    heads = cache["sums"].shape[1]
    query, far = (
        key_heads.of_queries(x[:, :, 0], heads)[:, :, None] for x in (query, far)
    )
    far = ops.cast(far, "float32")
    key_dim, dim = group.key_dim, group.value_dim
    sums = cache["sums"][:, :, None]
    poles = Poles(
        product(far, sums[..., :key_dim], transpose_y=True),
        sums[..., None, :, key_dim + dim],
        sums[..., None, :, key_dim + dim + 1],
        sums[..., key_dim : key_dim + dim],
    )
    means = poles.means(group.capped)
    choice = far_field.choose(means, poles.counts, group.clusters_per_query)
    near = _near_of_cache(group, cache, index, query, far)
    softmax = OneSoftmax(
        group, near, poles, choice, _reads_of_cache(group, cache, far, choice)
    )
    return key_heads.all_queries(softmax.output()[:, :, 0])[:, :, None]


def _near_of_cache(group, cache, index, query, far):
    """Returns the `Near` pairs of the newest token."""
    place = (index - cache["start"])[:, None, None]
    num_recent = cache["recent"].shape[2]
    end = (cache["end"] - cache["start"])[:, None, None]
    places = end - num_recent + numbers(num_recent)
    first = ops.maximum(group.borders(place), group.num_sinks)
    x, is_near = cache["recent"], places >= first
    if group.num_sinks:
        x = ops.concatenate([cache["first"], x], axis=2)
        sinks = numbers(group.num_sinks) <= place
        is_near = ops.concatenate([sinks, is_near], axis=2)
    key, far_key, value, bias, is_pair = multipole_cache.split(group, x[:, :, None])
    logits = ops.cast(product(query, key, transpose_y=True), "float32")
    if group.far_distance is not None and group.num_sinks:
        far_logits = product(far, ops.cast(far_key, "float32"), transpose_y=True)
        distance = place - numbers(group.num_sinks)
        is_far = ops.pad(
            distance > group.far_distance, [(0, 0), (0, 0), (0, num_recent)]
        )
        logits = ops.where(is_far[:, :, None, None], far_logits, logits)
    logits = group.capped(logits) + bias[..., None, :]
    seen = ops.logical_and(is_pair, is_near[:, :, None])[..., None, :]
    return Near(ops.where(seen, logits, HIDDEN), value)


def _reads_of_cache(group, cache, far, choice):
    """Returns the `GatheredReads` of the newest token."""
    window = cache["rows"].shape[3]
    x = gathering.gather_blocks(cache["rows"], choice.clusters[:, :, 0])
    key, value, bias, _ = rows.split_rows(group, ops.cast(x, "float32"))
    visible = rings.ranks(choice.counts, window) >= 0
    numbers = ops.minimum(choice.counts, window)
    key, value, bias = (x[:, :, None] for x in (key, value, bias))
    return GatheredReads(group, far, key, value, bias, visible, numbers)
