"""Attention to near pairs, the best clusters, and means of the rest, in one softmax.

Letters: B batch, H heads, G key heads, L length, X pairs, N blocks, R queries of a
block (those of all heads of a key head, one token after the other), S first pairs, W
pairs of a window, K clusters, P clusters that a query reads, D dim.
"""

import dataclasses
import functools
from typing import Any

from keras import ops

from routing_tf.layers.caches import multipole_cache
from routing_tf.layers.caches import rows
from routing_tf.layers.routing import far_field
from routing_tf.layers.routing import rings
from routing_tf.layers.routing.cluster_reads import GatheredReads
from routing_tf.layers.routing.cluster_reads import ReadsOfTwo
from routing_tf.layers.routing.cluster_reads import SortedReads
from routing_tf.layers.routing.far_field import HIDDEN
from routing_tf.layers.routing.far_field import Near
from routing_tf.layers.routing.far_field import OneSoftmax
from routing_tf.layers.routing.far_field import Poles
from routing_tf.layers.routing.multipole_blocks import Blocks
from routing_tf.layers.routing.multipole_blocks import ClusterSums
from routing_tf.layers.routing.multipole_blocks import padded
from routing_tf.layers.routing.pairs import at_places
from routing_tf.layers.support import backends
from routing_tf.layers.support import gathering
from routing_tf.layers.support import key_heads
from routing_tf.layers.support.axes import cut_axis
from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.lengths import numbers
from routing_tf.layers.support.products import product
from routing_tf.layers.support.segments import next_positions


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
        is_whole: whether there is one document without padding. Defaults to False.
        front: what a cache holds, a `Front`; None (the default) for nothing.
    """

    is_causal = True

    def __init__(self, group, queries, pairs, is_whole=False, front=None):
        self._group, self._queries, self._front = group, queries, front
        self._length = length_of(queries.near, 2)
        number = 0 if front is None else front.length
        blocks = Blocks(group, self._length, is_whole, number, self.is_causal)
        if front is not None:
            pairs = front.before(pairs, blocks.front * blocks.size)
        self._blocks, self._pairs = blocks, pairs
        self._first = self._first_index()
        self._clusters = pairs.far_clusters(group)

    def attend(self, training=None):
        """Returns `<float32>[B, H, L, D]`; `training` says whether dropout is on."""
        group, queries, num_key_heads = (
            self._group,
            self._queries,
            self._pairs.key.shape[1],
        )
        query = self._blocks.rows(queries.near, num_key_heads)
        far = self._blocks.rows(ops.cast(queries.far, "float32"), num_key_heads)
        window, value = self._window(query, far), self._in_windows(self._pairs.value)
        if self._blocks.has_far:
            clusters = None
            if window.flushed is not None:
                clusters = self._in_windows(self._clusters, group.num_clusters)
                clusters = backends.one_hot(clusters, group.num_clusters, "float32")
            poles = self._poles(far, window, clusters)
            choice = poles.choice(group)
            reads = self._reads(far, choice)
            near = Near(window.logits, value, window.flushed, clusters)
            softmax = OneSoftmax(group, near, poles, choice, reads)
        else:
            softmax = OneSoftmax(group, Near(window.logits, value))
        return self._blocks.in_order(softmax.output(training), self._length)

    def _window(self, query, far):
        """Compares queries with windows and first pairs; returns a `_Window`."""
        group, pairs = self._group, self._pairs
        own = self._of_rows(self._queries.places, -1)[..., None]
        places = self._places()[..., None, :]
        seen = places >= 0
        if self.is_causal:
            seen = ops.logical_and(seen, places <= own)
        if pairs.segments is not None:
            segments = self._of_rows(self._queries.segments)[..., None]
            others = self._in_windows(pairs.segments)[..., None, :]
            seen = ops.logical_and(seen, segments == others)
        is_first, flushed = places < group.num_sinks, None
        if not self._blocks.is_aligned:
            near = ops.logical_or(self._is_near(own, places), is_first)
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

    def _is_near(self, own, places):
        """Returns which pairs of a window are near."""
        return places >= self._group.borders(own)

    def _poles(self, far, window, clusters):
        """Returns the `Poles` of all queries."""
        tables = self._tables()
        sums = zip(*(table.seen_by(far) for table in tables))
        logits, counts, biases = (None if x[0] is None else sum(x) for x in sums)
        if window.flushed is not None:
            flushed = window.flushed
            logits = logits + product(flushed * window.far_logits, clusters)
            counts = counts + product(flushed, clusters)
            if window.bias is not None:
                biases = biases + product(flushed * window.bias, clusters)
        return Poles(logits, counts, biases, tables)

    def _tables(self):
        """Returns the `Table`s of all pairs outside windows."""
        sums = self._cluster_sums()
        before = sums.before()
        if self._front is not None:
            before = before + self._front.sums[:, :, None]
        if self._pairs.segments is None:
            return [self._table(before)]
        return [self._table(before, sums.documents_before())]

    def _cluster_sums(self):
        """Returns the `ClusterSums` of all pairs."""
        pairs, count = self._pairs, self._group.num_clusters
        rows = pairs.rows()
        return ClusterSums(self._blocks, rows, self._clusters, count, pairs.segments)

    def _table(self, sums, documents=None):
        """Returns the `Table` of sums, those of some documents only."""
        is_own = None
        if documents is not None:
            own = self._of_rows(self._queries.segments)
            is_own = ops.cast(own == documents[..., None], "float32")[..., None]
        return far_field.Table(sums, self._group.key_dim, self._group.value_dim, is_own)

    def _reads(self, far, choice):
        """Returns the `SortedReads` of all queries."""
        members, ends = self._pairs.members(self._clusters), choice.counts
        if self._pairs.segments is not None:
            borders = self._group.borders(self._queries.places)
            ends = self._num_members(choice, borders + self._queries.starts)
        window = self._group.window_of_clusters(length_of(members.key, 2))
        if self._front is not None:
            window = self._front.window
            members, ends = self._front.with_members(members, choice)
        num_read = ops.minimum(choice.counts, window)
        return SortedReads(self._group, far, members, choice, ends, num_read, window)

    def _num_members(self, choice, positions):
        """Counts the pairs, of any document, that clusters have before positions.

        Args:
            choice: `Choice`.
            positions: `<int32>[B, 1, L]`, from 0 up to the length.

        Returns:
            `<int32>[B, G, N, R, P]`.
        """
        joins = backends.one_hot(self._clusters, self._group.num_clusters, "int32")
        counts = padded(ops.cumsum(joins, axis=2), 1, 0)
        shape = (*ops.shape(counts)[:2], self._length)
        counts = gathering.gather(counts, ops.broadcast_to(positions, shape))
        counts = self._blocks.of_queries(counts)
        per_key = self._group.num_heads // self._pairs.key.shape[1]
        if per_key > 1:
            counts = ops.repeat(counts, per_key, axis=3)
        return choice.of_chosen(counts)

    def _first_index(self):
        """Returns where first pairs stand, `<int32>[B, 1, S]`; None without any.

        In packed documents those of the document at the start of each window,
        `<int32>[B, 1, N, S]`.
        """
        blocks, starts = self._blocks, self._queries.starts
        if not self._group.num_sinks:
            return None
        places = numbers(self._group.num_sinks)
        if self._pairs.segments is None:
            return places[None, None] + starts
        starts = ops.broadcast_to(starts, ops.shape(self._pairs.segments))
        starts = padded(blocks.of_pairs(starts)[..., 0], blocks.before, 0)
        return cut_axis(starts, 0, blocks.number, axis=2)[..., None] + places

    def _places(self):
        """Returns the places of first pairs and those of windows, `[B, 1, N, S + W]`.

        They are -1 for what is no pair, and for first pairs that stand elsewhere.
        """
        group, blocks, places = self._group, self._blocks, self._pairs.places
        if self._first is None:
            return blocks.windows(places, -1)
        first, wanted = at_places(places, self._first), numbers(group.num_sinks)
        is_there = first == wanted
        if self._pairs.segments is None:
            # They stand apart.
            places = ops.where(places < group.num_sinks, -1, places)
        else:
            window = (numbers(blocks.number) - blocks.before) * blocks.size
            is_there = ops.logical_and(is_there, self._first < window[:, None])
        first = ops.where(is_there, first, -1)
        return _side_by_side(first, blocks.windows(places, -1))

    def _in_windows(self, x, none=0):
        """Returns what stands at first pairs and in windows, `[B, G, N, S + W, ...]`.

        Args:
            x: `[B, G, X, ...]`.
            none: what there is in places without a pair.
        """
        windows = self._blocks.windows(x, none)
        if self._first is None:
            return windows
        return _side_by_side(at_places(x, self._first), windows)

    def _of_rows(self, x, none=0):
        """Returns what belongs to tokens, `[B, 1, L]`, of rows, `[B, 1, N, R]`."""
        x = self._blocks.of_queries(x, none)
        per_key = self._group.num_heads // self._pairs.key.shape[1]
        return x if per_key == 1 else ops.repeat(x, per_key, axis=-1)


class TwoSidedPass(MultipolePass):
    """Attention of many queries that also see later pairs.

    Args: as of `MultipolePass`, without a cache.
    """

    is_causal = False

    def _is_near(self, own, places):
        return ops.abs(places - own) <= self._group.num_recent // 2

    def _tables(self):
        sums = self._cluster_sums()
        before, after = sums.before(), sums.after()
        if self._pairs.segments is None:
            return [self._table(before + after)]
        return [
            self._table(before, sums.documents_before()),
            self._table(after, sums.documents_after()),
        ]

    def _reads(self, far, choice):
        """Returns reads of the last pairs after the near ones, and before them."""
        queries, near = self._queries, self._group.num_recent // 2
        starts, ends = queries.starts, self._length
        if queries.segments is not None:
            ends = next_positions(queries.segments)
        own = queries.places + starts
        last, later, earlier = (
            self._num_members(choice, ops.broadcast_to(x, ops.shape(own)))
            for x in (
                ends,
                ops.minimum(own + near + 1, ends),
                ops.maximum(own - near, starts),
            )
        )
        members = self._pairs.members(self._clusters)
        window = self._group.window_of_clusters(length_of(members.key, 2))
        number = ops.minimum(choice.counts, window)
        num_later = ops.minimum(number, last - later)
        group = self._group
        return ReadsOfTwo(
            SortedReads(group, far, members, choice, last, num_later, window),
            SortedReads(
                group, far, members, choice, earlier, number - num_later, window
            ),
        )


def attend_to_memory(group, query, first, sums, reads_of, training=None):
    """Attends to another sequence, of which only first pairs are near.

    Args:
        group: the `MultipoleHeads`.
        query: `<float>[B, H, L, D]`.
        first: `Pairs` of the first places, `[B, G, S, ...]`.
        sums: `<float32>[B, G, K, E]`, sums of all others, see `Table`.
        reads_of: function of queries and `Choice` that returns the reads.
        training: whether dropout is on.

    Returns:
        `<float32>[B, H, L, D]`.
    """
    num_key_heads, length = sums.shape[1], length_of(query, 2)
    query = key_heads.of_queries(query, num_key_heads)
    batch, heads, per_key, _, dim = ops.shape(query)
    query = ops.transpose(query, (0, 1, 3, 2, 4))
    query = ops.reshape(query, (batch, heads, 1, length * per_key, dim))
    logits = ops.cast(
        product(query, first.key[:, :, None], transpose_y=True), "float32"
    )
    logits = group.capped(logits)
    if first.bias is not None:
        logits = logits + first.bias[:, :, None, None]
    is_there = first.places[:, :, None, None] >= 0
    near = Near(ops.where(is_there, logits, HIDDEN), first.value[:, :, None])
    query = ops.cast(query, "float32")
    softmax = _softmax_with_far(group, query, near, sums, reads_of)
    output = ops.reshape(
        softmax.output(training), (batch, heads, length, per_key, group.value_dim)
    )
    return key_heads.all_queries(ops.transpose(output, (0, 1, 3, 2, 4)))


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
    near = _near_of_cache(group, cache, index, query, far)
    reads_of = functools.partial(reads_of_cache, group, cache)
    output = _softmax_with_far(group, far, near, cache["sums"], reads_of).output()
    return key_heads.all_queries(output[:, :, 0])[:, :, None]


def _softmax_with_far(group, far, near, sums, reads_of):
    """Returns the `OneSoftmax` of queries that all see the same pairs from far."""
    table = far_field.Table(sums[:, :, None], group.key_dim, group.value_dim)
    poles = Poles(*table.seen_by(far), [table])
    choice = poles.choice(group)
    return OneSoftmax(group, near, poles, choice, reads_of(far, choice))


def reads_of_pairs(group, pairs, clusters, far, choice):
    """Returns the `SortedReads` of queries that see all pairs in clusters from far."""
    window = group.window_of_clusters(length_of(pairs.key, 2))
    number = ops.minimum(choice.counts, window)
    members = pairs.members(clusters)
    return SortedReads(group, far, members, choice, choice.counts, number, window)


def reads_of_cache(group, cache, far, choice):
    """Returns the `GatheredReads` of queries that see all that a cache flushed."""
    window = cache["rows"].shape[3]
    x = gathering.gather_blocks(cache["rows"], choice.clusters[:, :, 0])
    key, value, bias, _ = rows.split_rows(group, ops.cast(x, "float32"))
    key, value, bias = (x[:, :, None] for x in (key, value, bias))
    visible = rings.ranks(choice.counts, window) >= 0
    number = ops.minimum(choice.counts, window)
    return GatheredReads(group, far, key, value, bias, visible, number)


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
        is_first = numbers(group.num_sinks) <= place
        is_near = ops.concatenate([is_first, is_near], axis=2)
    pairs = multipole_cache.pairs_of(group, x[:, :, None])
    logits = ops.cast(product(query, pairs.key, transpose_y=True), "float32")
    if group.far_distance is not None and group.num_sinks:
        far_key = ops.cast(pairs.far_key, "float32")
        far_logits = product(far, far_key, transpose_y=True)
        is_far = place - numbers(group.num_sinks) > group.far_distance
        is_far = ops.pad(is_far, [(0, 0), (0, 0), (0, num_recent)])
        logits = ops.where(is_far[:, :, None, None], far_logits, logits)
    logits = group.capped(logits) + pairs.bias[..., None, :]
    seen = ops.logical_and(pairs.places >= 0, is_near[:, :, None])[..., None, :]
    return Near(ops.where(seen, logits, HIDDEN), pairs.value)


def _side_by_side(first, windows):
    """Joins `[B, G, S, ...]` or `[B, G, N, S, ...]` and `[B, G, N, W, ...]`."""
    if len(first.shape) < len(windows.shape):
        first = first[:, :, None]
        batch, heads, _, *rest = ops.shape(first)
        number = length_of(windows, 2)
        first = ops.broadcast_to(first, (batch, heads, number, *rest))
    return ops.concatenate([first, windows], axis=3)
