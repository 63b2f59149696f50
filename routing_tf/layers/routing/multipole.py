"""Attention to near pairs, the best clusters, and means of the rest, in one softmax.

Letters: B batch, H heads, G key heads, L length, X pairs, N blocks, R queries of a
block (those of all heads of a key head, one token after the other), S first pairs, W
pairs of a window, K clusters, P clusters that a query reads, D dim.
"""

import dataclasses
import functools

from keras import ops

from routing_tf.layers.caches import rows
from routing_tf.layers.routing import multipole_cache
from routing_tf.layers.routing import whole_clusters
from routing_tf.layers.routing.cluster_reads import GatheredReads
from routing_tf.layers.routing.cluster_reads import ReadsOfTwo
from routing_tf.layers.routing.cluster_reads import SortedReads
from routing_tf.layers.routing.cluster_reads import WholeReads
from routing_tf.layers.routing.far_field import HIDDEN
from routing_tf.layers.routing.far_field import Near
from routing_tf.layers.routing.far_field import OneSoftmax
from routing_tf.layers.routing.far_field import Poles
from routing_tf.layers.routing.far_field import of_all_blocks
from routing_tf.layers.routing.multipole_blocks import Blocks
from routing_tf.layers.routing.multipole_blocks import ClusterSums
from routing_tf.layers.routing.multipole_blocks import at_places
from routing_tf.layers.routing.multipole_blocks import padded
from routing_tf.layers.support import backends
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import next_positions
from routing_tf.layers.support.tensors import cut_axis
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product


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
        group, blocks, heads = self._group, self._blocks, self._pairs.key.shape[1]
        query = blocks.rows(self._queries.near, heads)
        far = query
        if blocks.has_far or group.far_distance is not None:
            far = blocks.rows(ops.cast(self._queries.far, "float32"), heads)
        places, first = self._places()
        window, far_logits = self._compared(query, far, places, blocks.windows)
        near = (
            []
            if first is None
            else [self._compared(query, far, first, self._at_first)[0]]
        )
        near.append(window)
        if not blocks.has_far:
            softmax = OneSoftmax(group, near)
        else:
            poles = self._poles(far, window, far_logits)
            reads_of, scores = functools.partial(self._reads, far), self._queries.scores
            scores = None if scores is None else blocks.rows(scores, heads)
            softmax = OneSoftmax(group, near, poles, reads_of, scores)
        return blocks.in_order(softmax.output(training), self._length)

    def _compared(self, query, far, places, of_pairs):
        """Compares queries with pairs; returns `Near`, and logits as seen from far.

        Args:
            query: `<float>[B, G, N, R, D]`.
            far: the same as they see pairs from far.
            places: `<int32>[B, 1, N, Y]`, those of the pairs.
            of_pairs: function from what pairs have, `[B, G, X, ...]`, to what these
                have, `[B, G, N, Y, ...]`.
        """
        group, pairs = self._group, self._pairs
        own, places = (
            self._of_rows(self._queries.places, -1)[..., None],
            places[..., None, :],
        )
        seen = places >= 0
        if self.is_causal:
            seen = ops.logical_and(seen, places <= own)
        if pairs.segments is not None:
            segments = self._of_rows(self._queries.segments)[..., None]
            others = of_pairs(pairs.segments)[..., None, :]
            seen = ops.logical_and(seen, segments == others)
        is_first, flushed, clusters = places < group.num_sinks, None, None
        if of_pairs != self._at_first and self._blocks.has_flushed:
            near = ops.logical_or(self._is_near(own, places), is_first)
            flushed = ops.logical_and(seen, ops.logical_not(near))
            flushed = ops.cast(flushed, "float32")
            seen = ops.logical_and(seen, near)
            clusters = of_pairs(self._clusters, group.num_clusters)
            clusters = backends.one_hot(clusters, group.num_clusters, "float32")
        logits = of_all_blocks(query, of_pairs(pairs.key), transpose_y=True)
        logits = far_logits = ops.cast(logits, "float32")
        if group.far_distance is not None:
            key = ops.cast(of_pairs(pairs.far_key), "float32")
            far_logits = of_all_blocks(far, key, transpose_y=True)
            is_far = ops.logical_and(is_first, own - places > group.far_distance)
            logits = ops.where(is_far, far_logits, logits)
        logits = group.capped(logits)
        if pairs.bias is not None:
            logits = logits + of_pairs(pairs.bias)[..., None, :]
        logits = logits + ops.where(seen, 0.0, HIDDEN)
        return Near(logits, of_pairs(pairs.value), flushed, clusters), far_logits

    def _is_near(self, own, places):
        """Returns which pairs of a window are near."""
        return places >= self._group.borders(own)

    def _poles(self, far, window, far_logits):
        """Returns the `Poles` of all queries."""
        tables = self._tables()
        sums = zip(*(table.seen_by(far) for table in tables))
        logits, counts, biases = (None if x[0] is None else sum(x) for x in sums)
        if window.flushed is not None:
            flushed, clusters = window.flushed, window.clusters
            logits = logits + product(flushed * far_logits, clusters)
            counts = counts + product(flushed, clusters)
            if biases is not None:
                bias = self._blocks.windows(self._pairs.bias)[..., None, :]
                biases = biases + product(flushed * bias, clusters)
        return Poles(logits, counts, biases, tables)

    def _tables(self):
        """Returns the `Table`s of all pairs outside windows."""
        sums = self._cluster_sums()
        before = sums.before()
        if self._front is not None:
            before = before + self._front.table
        if self._pairs.segments is None:
            return [before]
        return [self._of_documents(before, sums.documents_before())]

    def _cluster_sums(self):
        """Returns the `ClusterSums` of all pairs."""
        count = self._group.num_clusters
        return ClusterSums(self._blocks, self._pairs, self._clusters, count)

    def _of_documents(self, table, documents):
        """Returns a `Table` that only queries in these documents see."""
        own = self._of_rows(self._queries.segments)
        is_own = ops.cast(own == documents[..., None], "float32")[..., None]
        return dataclasses.replace(table, is_own=is_own)

    def _reads(self, far, choice):
        """Returns how all queries read the clusters of a `Choice`."""
        members, ends = self._pairs.members(self._clusters), choice.counts
        if self._pairs.segments is not None:
            borders = self._group.borders(self._queries.places)
            ends = self._num_members(choice, borders + self._queries.starts)
        if self._front is not None:
            members, ends = self._front.with_members(members, choice)
        return sorted_reads(self._group, far, members, choice, ends)

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
        counts = tensors.gather(counts, ops.broadcast_to(positions, shape))
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
        """Returns the places of windows, and those of first pairs, `[B, 1, N, .]`.

        They are -1 for what is no pair, and for first pairs that stand elsewhere; None
        without first pairs.
        """
        group, blocks, places = self._group, self._blocks, self._pairs.places
        if self._first is None:
            return blocks.windows(places, -1), None
        first, wanted = self._at_first(places), numbers(group.num_sinks)
        is_there = first == wanted
        if self._pairs.segments is None:
            # They stand apart.
            places = ops.where(places < group.num_sinks, -1, places)
        else:
            window = (numbers(blocks.number) - blocks.before) * blocks.size
            is_there = ops.logical_and(is_there, self._first < window[:, None])
        return blocks.windows(places, -1), ops.where(is_there, first, -1)

    def _at_first(self, x):
        """From `[B, G, X, ...]` to first pairs, `[B, G, N (or 1), S, ...]`."""
        x = at_places(x, self._first)
        return x if len(self._first.shape) == 4 else x[:, :, None]

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
            return [before + after]
        return [
            self._of_documents(before, sums.documents_before()),
            self._of_documents(after, sums.documents_after()),
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
        group, members = self._group, self._pairs.members(self._clusters)
        number = group.num_read(choice.counts)
        num_later = ops.minimum(number, last - later)
        reads = functools.partial(sorted_reads, group, far, members, choice)
        return ReadsOfTwo(reads(last, num_later), reads(earlier, number - num_later))


def attend_to_memory(group, query, scores, first, table, reads_of, training=None):
    """Attends to another sequence, of which only first pairs are near.

    Args:
        group: the `MultipoleHeads`.
        query: `<float>[B, H, L, D]`.
        scores: as of `Queries`.
        first: `Pairs` of the first places, `[B, G, S, ...]`.
        table: `Table` of all others, with 1 for N.
        reads_of: function of queries and `Choice` that returns the reads.
        training: whether dropout is on.

    Returns:
        `<float32>[B, H, L, D]`.
    """
    heads, length = table.keys.shape[1], length_of(query, 2)
    batch, per_key = ops.shape(query)[0], query.shape[1] // heads

    def rows_of(x):
        x = ops.transpose(head_inputs.of_queries(x, heads), (0, 1, 3, 2, 4))
        return ops.reshape(x, (batch, heads, 1, length * per_key, x.shape[-1]))

    query = rows_of(query)
    scores = None if scores is None else rows_of(scores)
    key = first.key[:, :, None]
    logits = group.capped(ops.cast(product(query, key, transpose_y=True), "float32"))
    if first.bias is not None:
        logits = logits + first.bias[:, :, None, None]
    is_there = first.places[:, :, None, None] >= 0
    near = Near(ops.where(is_there, logits, HIDDEN), first.value[:, :, None])
    query = ops.cast(query, "float32")
    poles = Poles(*table.seen_by(query), [table])
    reads_of = functools.partial(reads_of, query)
    output = OneSoftmax(group, [near], poles, reads_of, scores).output(training)
    shape = batch, heads, length, per_key, ops.shape(output)[-1]
    output = ops.transpose(ops.reshape(output, shape), (0, 1, 3, 2, 4))
    return head_inputs.all_queries(output)


def attend_next(group, cache, index, query, far, scores):
    """Attends with the newest token of a cache; returns `<float32>[B, H, 1, D]`.

    Args:
        group: the `MultipoleHeads`.
        cache: that of `routing.multipole_cache`, with the token.
        index: position of the token.
        query: `<float>[B, H, 1, D]`, as it sees near pairs.
        far: the same, as it sees pairs from far.
        scores: as of `Queries`.
    """
    table = multipole_cache.table(cache)
    query, far, scores = (
        None
        if x is None
        else head_inputs.of_queries(x[:, :, 0], table.keys.shape[1])[:, :, None]
        for x in (query, far, scores)
    )
    far = ops.cast(far, "float32")
    near = _near_of_cache(group, cache, index, query, far)
    poles = Poles(*table.seen_by(far), [table])
    reads_of = functools.partial(reads_of_cache, group, cache, far)
    output = OneSoftmax(group, [near], poles, reads_of, scores).output()
    return head_inputs.all_queries(output[:, :, 0])[:, :, None]


def sorted_reads(group, far, members, choice, ends, number=None):
    """Returns how `far` queries read the clusters of a `Choice`.

    `ends` `<int32>[B, G, N, R, P]` are the ranks after the last pairs that are read;
    `number` is how many are read, None for as many as the group reads.
    """
    number = group.num_read(choice.counts) if number is None else number
    ends = ops.cast(ends, "int32")
    if group.keeps_all:
        return WholeReads.of_members(group, far, members, choice, ends, number)
    window, length = group.cluster_window, length_of(members.key, 2)
    window = min(window, length) if is_known(length) else window
    return SortedReads(group, far, members, choice, ends, number, window)


def reads_of_pairs(group, pairs, clusters, far, choice):
    """Returns the reads of queries that see all pairs in clusters from far."""
    members = pairs.members(clusters)
    return sorted_reads(group, far, members, choice, choice.counts)


def reads_of_cache(group, cache, far, choice):
    """Returns the reads of a few queries that see all that a cache flushed."""
    number = group.num_read(choice.counts)
    if group.keeps_all:
        return WholeReads(number, *whole_clusters.attend(group, cache, far, choice))
    place, visible = _places_read(group, choice, number, cache["rows"].shape[3])
    shape = ops.shape(cache["rows"])
    x = ops.reshape(cache["rows"], (*shape[:2], shape[2] * shape[3], shape[4]))
    x = ops.cast(tensors.gather(x, place), "float32")
    key, value, bias, _ = rows.split_rows(group, x)
    return GatheredReads(group, far, key, value, bias, visible, number)


def _places_read(group, choice, number, num_places):
    """Returns where the pairs stand that a few queries read, one after the other.

    Args:
        group: the `MultipoleHeads`.
        choice: `Choice`.
        number: `<int32>[B, G, 1, R, P]`, how many pairs are read of each cluster.
        num_places: number of places in the ring of a cluster.

    Returns:
        Places in all rings `<int32>[B, G, 1, R, S]`, for all S pairs that could be
        read, and which of them are those of each cluster, `<bool>[B, G, 1, R, P, S]`.
    """
    most = min(group.attention_window, group.cluster_window * group.clusters_per_query)
    slots, ends = numbers(most), ops.cumsum(number, axis=-1)[..., None]
    first = ends - number[..., None]
    visible = ops.logical_and(slots >= first, slots < ends)
    own = ops.cast(visible, "int32")
    # The last ones of each cluster, in order.
    rank = slots + ops.sum(own * (choice.counts[..., None] - ends), axis=-2)
    cluster = ops.sum(own * choice.clusters[..., None], axis=-2)
    return cluster * num_places + rank % num_places, visible


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
