"""Where queries of multipole heads and the pairs near them stand in a pass.

Letters: B batch, H heads, G key heads, L length, X pairs, N blocks, A tokens of a
block, R queries of a block (those of all heads of a key head, one token after the
other), W pairs of a window, K clusters, E size of a row.
"""

import math

from keras import ops

from routing_tf.layers.support import key_heads
from routing_tf.layers.support.axes import cut_axis
from routing_tf.layers.support.blocks import break_into_blocks
from routing_tf.layers.support.blocks import memory_windows
from routing_tf.layers.support.lengths import is_known
from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.lengths import num_parts
from routing_tf.layers.support.lengths import numbers
from routing_tf.layers.support.products import product

# Tokens of a block whose queries have different borders.
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 64


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
        x = x - none if none else x
        x = memory_windows(x, (self.before,), (self.after,), axis=2)
        x = cut_axis(x, self.front, self.num_blocks, axis=2)
        return x + none if none else x

    def rows(self, x, num_key_heads):
        """From queries `[B, H, L, D]` to `[B, G, N, R, D]`."""
        x = self.of_queries(x)
        if x.shape[1] == num_key_heads:
            return x
        x = ops.transpose(key_heads.of_queries(x, num_key_heads), (0, 1, 3, 4, 2, 5))
        batch, heads, number, size, per_key, dim = ops.shape(x)
        return ops.reshape(x, (batch, heads, number, size * per_key, dim))

    def in_order(self, x, length):
        """From `[B, G, N, R, D]` to `[B, H, L, D]`."""
        batch, heads, number, rows, dim = ops.shape(x)
        if rows != self.size:
            per_key = rows // self.size
            x = ops.reshape(x, (batch, heads, number, self.size, per_key, dim))
            x = key_heads.all_queries(ops.transpose(x, (0, 1, 4, 2, 3, 5)))
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
        rows: `<float32>[B, G, X, E]`, what is added up.
        clusters: `<int32>[B, G, X]`; K for pairs in none.
        num_clusters: number of clusters K.
        segments: `<int32>[B, 1, X]`, numbers of documents; None for one document.
    """

    def __init__(self, blocks, rows, clusters, num_clusters, segments=None):
        self._blocks = blocks
        self._rows = blocks.of_pairs(rows)
        clusters = blocks.of_pairs(clusters, num_clusters)
        self._is_in = ops.cast(clusters[..., None] == numbers(num_clusters), "float32")
        self._segments = None if segments is None else blocks.of_pairs(segments, -1)

    def before(self):
        """Returns the sums before windows, `<float32>[B, G, N, K, E]`."""
        first = self._blocks.front - self._blocks.before
        return self._summed(self._rows, self._is_in, self._segments, first)

    def after(self):
        """Returns the sums after windows, `<float32>[B, G, N, K, E]`."""
        rows, is_in, segments = (
            None if x is None else ops.flip(x, axis=(2, 3))
            for x in (self._rows, self._is_in, self._segments)
        )
        sums = self._summed(rows, is_in, segments, -self._blocks.after)
        return ops.flip(sums, axis=2)

    def documents_before(self):
        """Returns the document at the start of each window, `<int32>[B, 1, N]`."""
        first = self._blocks.front - self._blocks.before
        return self._documents(self._segments, first)

    def documents_after(self):
        """Returns the document at the end of each window, `<int32>[B, 1, N]`."""
        segments = ops.flip(self._segments, axis=(2, 3))
        return ops.flip(self._documents(segments, -self._blocks.after), axis=2)

    def _summed(self, rows, is_in, segments, first):
        """Returns for block i the sums over all blocks before `i + first`."""
        number = self._blocks.number
        if segments is None:
            sums = ops.cumsum(product(is_in, rows, transpose_x=True), axis=2)
            sums = padded(sums, 1 + max(-first, 0), 0)
            return cut_axis(sums, max(first, 0), max(first, 0) + number, axis=2)
        starts = segments[..., 0]
        # Of each block, the document that goes on in the next one.
        following = ops.concatenate(
            [starts[:, :, 1:], -ops.ones_like(starts[:, :, :1])], 2
        )
        goes_on = ops.cast(segments == following[..., None], "float32")
        sums = product(is_in * goes_on[..., None], rows, transpose_x=True)
        own = self._documents(segments, first)[..., None]
        block = numbers(number)[:, None] + first
        is_own = ops.logical_and(
            own == following[:, :, None], numbers(self._blocks.num_blocks) < block
        )
        batch, heads, num_blocks, *rest = ops.shape(sums)
        flat = ops.reshape(sums, (batch, heads, num_blocks, math.prod(rest)))
        is_own = ops.broadcast_to(is_own, (batch, heads, number, num_blocks))
        sums = product(ops.cast(is_own, "float32"), flat)
        return ops.reshape(sums, (batch, heads, number, *rest))

    def _documents(self, segments, first):
        starts = padded(segments[..., 0], max(-first, 0), 0, -1)
        return cut_axis(
            starts, max(first, 0), max(first, 0) + self._blocks.number, axis=2
        )
