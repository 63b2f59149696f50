"""The queries and pairs of multipole heads, and their arrangement in blocks.

Letters: B batch, H heads, G key heads, L length, X pairs, D dim, N blocks, A tokens of
a block, R queries of a block (those of all heads of a key head, one token after the
other), W pairs of a window, K clusters, E size of a row.
"""

import dataclasses
import functools
import math
from typing import Any

from keras import ops

from routing_tf.layers.routing.cluster_order import gathered_windows
from routing_tf.layers.routing.cluster_order import windows_are_gathered
from routing_tf.layers.routing.cluster_reads import Members
from routing_tf.layers.routing.far_field import Table
from routing_tf.layers.support import backends
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support import masks as segment
from routing_tf.layers.support import tensors
from routing_tf.layers.support.tensors import break_into_blocks
from routing_tf.layers.support.tensors import cut_axis
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import memory_windows
from routing_tf.layers.support.tensors import num_parts
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.tensors import running_total

# Tokens of a block whose queries have different borders.
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 64


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pairs:
    """Pairs of keys and values, in order of position.

    Args:
        key: `<float>[B, G, X, D]`, as near queries see it.
        far_key: the same, as queries see it from far.
        value: `<float>[B, G, X, D]`.
        clusters: `<int32>[B, G, X]`.
        places: `<int32>`, broadcastable to `[B, G, X]`, counted from the start of a
            document; negative for what is no pair.
        bias: `<float32>`, broadcastable to `[B, G, X]`; None without any.
        segments: `<int32>[B, 1, X]`, numbers of documents; None for one.
    """

    key: Any
    far_key: Any
    value: Any
    clusters: Any
    places: Any
    bias: Any = None
    segments: Any = None

    def far_clusters(self, group):
        """Returns clusters of pairs seen from far; their number for all others."""
        is_far = self.places >= group.num_sinks
        return ops.where(is_far, self.clusters, group.num_clusters)

    def parts(self):
        """Returns keys as seen from far, values, and biases if any, to be added up.

        They are `<float32>[B, G, X, .]`.
        """
        key, value = (ops.cast(x, "float32") for x in (self.far_key, self.value))
        if self.bias is None:
            return [key, value]
        return [key, value, ops.ones_like(key[..., :1]) * self.bias[..., None]]

    def members(self, clusters):
        """Returns the pairs as `Members` of clusters `<int32>[B, G, X]`."""
        key, value = (ops.cast(x, "float32") for x in (self.far_key, self.value))
        bias = self.bias
        bias = None if bias is None else ops.broadcast_to(bias, ops.shape(clusters))
        return Members(clusters, key, value, bias)

    def first(self, starts, number):
        """Returns the `Pairs` of the first `number` places, `[B, G, number, ...]`.

        Their places are -1 for what is no pair.
        """
        wanted = numbers(number)[None, None]
        found = {
            name: at_places(getattr(self, name), wanted + starts)
            for name in ("key", "far_key", "value", "clusters", "places", "bias")
            if getattr(self, name) is not None
        }
        places = ops.where(found["places"] == wanted, wanted, -1)
        return Pairs(**{**found, "places": places})


def at_places(x, index):
    """Returns `[B, G, X, ...]` at places `<int32>[B, 1, ...]`; the last beyond it."""
    index = ops.minimum(index, length_of(x, 2) - 1)
    index = ops.broadcast_to(index, (*ops.shape(x)[:2], *ops.shape(index)[2:]))
    if len(x.shape) == 3:
        return tensors.entries_at(x, index)
    return tensors.gather(x, index)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Queries:
    """Queries `<float>[B, H, L, D]`, as they see near pairs and pairs from far.

    `scores` `<float32>[B, H, L, K]` are those of clusters, None where mass counts.
    `starts` are the positions at which their documents start, as `[B, 1, L]`.
    """

    near: Any
    far: Any
    scores: Any
    places: Any
    segments: Any = None
    starts: Any = None


def document_places(length, mask, segments):
    """Returns the place of each token in its document, and where documents start.

    A document starts at its first real token. Both are `<int32>`, broadcastable to
    `[B, 1, L]`.

    Args:
        length: number of tokens.
        mask: `<bool>[B, 1, L]`, False for padding; None for no padding.
        segments: `Segments`; None for one document.
    """
    positions = numbers(length)[None, None]
    if mask is None and segments is None:
        return ops.convert_to_tensor(positions), 0
    if segments is None:
        first = ops.argmax(ops.cast(mask, "int32"), axis=-1)
        starts = ops.cast(first, "int32")[..., None]
        return positions - starts, starts
    starts = segments.value_starts
    if mask is not None:
        real = ops.cast(mask, "int32")
        earlier = ops.cumsum(real, axis=-1) - real
        own = earlier - ops.take_along_axis(earlier, starts, axis=-1)
        is_first = ops.logical_and(mask, own == 0)
        is_first = ops.logical_or(is_first, positions == 0)
        starts = ops.maximum(starts, segment.first_positions(is_first))
    return positions - starts, starts


class Turn:
    """Turns rows of tokens until their documents start at the first place.

    Padding before a document goes after all others.

    Args:
        starts: `<int32>`, broadcastable to `[B, 1, 1]`, where documents start.
        length: number of tokens.
    """

    def __init__(self, starts, length):
        places = numbers(length)[None, None]
        self._places = ops.convert_to_tensor(places)
        self._sources = (places + starts) % length
        self._targets = (places + length - starts) % length

    def of_queries(self, queries):
        """Returns turned `Queries`, in one document without padding before it."""
        same = queries.near is queries.far
        near = self._turned(queries.near)
        far = near if same else self._turned(queries.far)
        scores = self._turned(queries.scores)
        return Queries(near, far, scores, self._places, starts=0)

    def of_pairs(self, pairs):
        """Returns turned `Pairs`."""
        same = pairs.key is pairs.far_key
        fields = ("key", "value", "clusters", "places", "bias")
        fields += () if same else ("far_key",)
        found = {name: self._turned(getattr(pairs, name)) for name in fields}
        return Pairs(**{"far_key": found["key"], **found})

    def back(self, x):
        """Returns `[B, H, L, D]` in the order of before."""
        return tensors.permuted(x, self._targets, self._sources)

    def _turned(self, x):
        if x is None:
            return None
        if len(x.shape) == 4:
            return tensors.permuted(x, self._sources, self._targets)
        of_all = x + ops.zeros_like(self._sources, dtype=x.dtype)
        return at_places(of_all, self._sources)


class Blocks:
    """How tokens lie in blocks, each of which has a window of pairs.

    Args:
        group: the `MultipoleHeads`.
        length: number of queries.
        is_whole: whether there is one document, which starts at the first query and
            has no padding. Defaults to False.
        front: number of places of pairs that stand before the first block. Defaults to
            0.
        is_causal: whether queries see no later pairs. Defaults to True.

    Attributes:
        size: number of tokens of a block.
        before: number of blocks of a window before its own.
        after: number of blocks of a window after its own.
        lead: number of empty places before the first query.
        number: number of blocks of queries.
        front: number of blocks of pairs before the first block of queries.
        num_blocks: number of blocks of pairs.
        is_aligned: whether all earlier pairs of a window, and no others, are near.
        has_far: whether there may be pairs that are not near.
        has_flushed: whether some of them may stand in windows.
    """

    def __init__(self, group, length, is_whole=False, front=0, is_causal=True):
        recent, flushed = group.num_recent, group.flushed_block
        self.is_aligned = is_causal and is_whole and flushed >= SMALLEST_BLOCK
        self.lead = self.after = 0
        self.size = min(max(SMALLEST_BLOCK, recent), LARGEST_BLOCK)
        farthest = recent + flushed - 1
        if self.is_aligned:
            # All queries of a block have one border, at which their window starts.
            self.size = flushed
            self.before = num_parts(recent - 1, flushed)
            self.lead = self.before * flushed - (recent - 1)
        elif is_causal:
            self.before = num_parts(max(farthest - 1, 0), self.size)
        else:
            farthest = recent // 2
            self.before = num_parts(farthest, self.size)
            # First pairs may stand after a query.
            most = max(farthest, group.num_sinks - 1)
            self.after = num_parts(most, self.size)
        self.number = num_parts(self.lead + length, self.size)
        self.has_far = True
        if is_whole and is_known(length):
            self.has_far = length > farthest
            self.before = min(self.before, self.number - 1)
            self.after = min(self.after, self.number - 1)
        self.has_flushed = self.has_far and not self.is_aligned
        self.front = num_parts(front, self.size)
        self.num_blocks = self.number + self.front

    def of_queries(self, x, none=0):
        """From `[B, H, L, ...]` to `[B, H, N, A, ...]`."""
        missing = self.number * self.size - self.lead - length_of(x, 2)
        x = padded(x, self.lead, missing, none)
        return break_into_blocks(x, self.size, axis=2)

    def of_pairs(self, x, none=0):
        """From `[B, G, X, ...]` to all blocks of pairs, which have no lead."""
        missing = self.num_blocks * self.size - length_of(x, 2)
        return break_into_blocks(padded(x, 0, missing, none), self.size, axis=2)

    def windows(self, x, none=0):
        """From `[B, G, X, ...]` to windows `[B, G, N, W, ...]`.

        `none` is what stands where there are no pairs.
        """
        x = self.of_pairs(x, none)
        if not self.after and len(x.shape) == 5 and windows_are_gathered():
            # Any block stands where there is none: no query sees it.
            x = gathered_windows(x, self.before)
            return cut_axis(x, self.front, self.num_blocks, axis=2)
        x = x - none if none else x
        x = memory_windows(x, (self.before,), (self.after,), axis=2)
        x = cut_axis(x, self.front, self.num_blocks, axis=2)
        return x + none if none else x

    def rows(self, x, num_key_heads):
        """From queries `[B, H, L, D]` to `[B, G, N, R, D]`."""
        x = self.of_queries(x)
        if x.shape[1] == num_key_heads:
            return x
        x = ops.transpose(head_inputs.of_queries(x, num_key_heads), (0, 1, 3, 4, 2, 5))
        batch, heads, number, size, per_key, dim = ops.shape(x)
        return ops.reshape(x, (batch, heads, number, size * per_key, dim))

    def in_order(self, x, length):
        """From `[B, G, N, R, D]` to `[B, H, L, D]`."""
        batch, heads, number, rows, dim = ops.shape(x)
        if rows != self.size:
            per_key = rows // self.size
            x = ops.reshape(x, (batch, heads, number, self.size, per_key, dim))
            x = head_inputs.all_queries(ops.transpose(x, (0, 1, 4, 2, 3, 5)))
            heads = heads * per_key
        x = ops.reshape(x, (batch, heads, number * self.size, dim))
        return cut_axis(x, self.lead, self.lead + length, axis=2)


def padded(x, before, after, none=0):
    """Returns `[B, H, L, ...]` with places before and after the others."""
    if is_known(before, after) and not before and not after:
        return x
    padding = [(0, 0)] * len(x.shape)
    padding[2] = (before, after)
    return ops.pad(x, padding, constant_values=none)


class ClusterSums:
    """Sums over the pairs of each cluster outside the windows of blocks.

    In packed documents, those over the pairs of one document: the one at the border of
    the window.

    Args:
        blocks: `Blocks`.
        pairs: `Pairs`.
        clusters: `<int32>[B, G, X]`; K for pairs in none.
        num_clusters: number of clusters K.
    """

    def __init__(self, blocks, pairs, clusters, num_clusters):
        self._blocks = blocks
        self._parts = [blocks.of_pairs(x) for x in pairs.parts()]
        clusters = blocks.of_pairs(clusters, num_clusters)
        self._is_in = backends.one_hot(clusters, num_clusters, "float32")
        self._segments = None
        if pairs.segments is not None:
            self._segments = blocks.of_pairs(pairs.segments, -1)

    def before(self):
        """Returns the `Table` of the pairs before each window."""
        first = self._blocks.front - self._blocks.before
        return self._table(self._parts, self._is_in, self._segments, first)

    def after(self):
        """Returns the `Table` of the pairs after each window."""
        *parts, is_in, segments = (
            None if x is None else ops.flip(x, axis=(2, 3))
            for x in (*self._parts, self._is_in, self._segments)
        )
        table = self._table(parts, is_in, segments, -self._blocks.after)
        fields = (table.keys, table.values, table.counts, table.biases)
        return Table(*(None if x is None else ops.flip(x, axis=2) for x in fields))

    def documents_before(self):
        """Returns the document at the start of each window, `<int32>[B, 1, N]`."""
        first = self._blocks.front - self._blocks.before
        return self._documents(self._segments, first)

    def documents_after(self):
        """Returns the document at the end of each window, `<int32>[B, 1, N]`."""
        segments = ops.flip(self._segments, axis=(2, 3))
        return ops.flip(self._documents(segments, -self._blocks.after), axis=2)

    def _table(self, parts, is_in, segments, first):
        """Returns for block i the `Table` of all blocks before `i + first`."""
        add_up = functools.partial(self._added_up, first=first)
        if segments is not None:
            starts = segments[..., 0]
            # Of each block, the document that goes on in the next one.
            none = -ops.ones_like(starts[:, :, :1])
            following = ops.concatenate([starts[:, :, 1:], none], axis=2)
            goes_on = segments == following[..., None]
            is_in = is_in * ops.cast(goes_on, "float32")[..., None]
            own = self._documents(segments, first)
            is_own = own[..., None] == following[:, :, None]
            add_up = functools.partial(self._added_up_if, is_own=is_own, first=first)
        sums = [add_up(product(is_in, x, transpose_x=True)) for x in parts]
        keys, values, *biases = sums
        counts = add_up(ops.sum(is_in, axis=-2))
        return Table(keys, values, counts, *(x[..., 0] for x in biases))

    def _added_up(self, x, first):
        """From sums of blocks to those of all blocks before `i + first`."""
        x = padded(running_total(x, axis=2), 1 + max(-first, 0), 0)
        return cut_axis(x, max(first, 0), max(first, 0) + self._blocks.number, axis=2)

    def _added_up_if(self, x, is_own, first):
        """The same for some of them: `is_own` is `<bool>[B, 1, N, blocks]`."""
        batch, heads, num_blocks, *rest = ops.shape(x)
        number = self._blocks.number
        block = numbers(number)[:, None] + first
        is_own = ops.logical_and(is_own, numbers(num_blocks) < block)
        is_own = ops.broadcast_to(is_own, (batch, heads, number, num_blocks))
        x = ops.reshape(x, (batch, heads, num_blocks, math.prod(rest)))
        x = product(ops.cast(is_own, "float32"), x)
        return ops.reshape(x, (batch, heads, number, *rest))

    def _documents(self, segments, first):
        starts = padded(segments[..., 0], max(-first, 0), 0, -1)
        return cut_axis(
            starts, max(first, 0), max(first, 0) + self._blocks.number, axis=2
        )
