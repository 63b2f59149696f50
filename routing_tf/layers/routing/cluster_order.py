"""Tokens in the order of their clusters, in chunks that hold tokens of one cluster.

Letters: B batch, H heads, L length, K clusters, N chunks, C slots of a chunk, D dim.
"""

import keras
from keras import ops

from routing_tf.layers.support import backends
from routing_tf.layers.support import tensors
from routing_tf.layers.support.backends import stated_gradient
from routing_tf.layers.support.keras_internals import is_compiled_by_xla
from routing_tf.layers.support.masks import changes
from routing_tf.layers.support.masks import first_positions
from routing_tf.layers.support.tensors import entries_at
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import library
from routing_tf.layers.support.tensors import memory_windows
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import smaller

LARGEST_INTEGER = 2**31 - 1
# Fewer rows than this make matrix products slow.
MIN_CHUNK_SIZE = 16


def chunk_size_for(attention_window):
    """Returns the slots of a chunk, about a quarter of the window: few are empty."""
    smallest = min(MIN_CHUNK_SIZE, attention_window)
    return max(smallest, -(-attention_window // 4))


class ClusterOrder:
    """Tokens sorted by cluster, in which every cluster starts a chunk of its own.

    In a cluster the tokens stand in order of position. So a token's place inside its
    chunk, and all chunks of its cluster before it, depend only on earlier tokens.
    Shapes follow from the length: there are enough chunks for clusters of any sizes.
    `clusters` are `<int32>[B, H, L]`, from 0 to K - 1.

    Attributes:
        first_chunk: `<int32>[B, H, K]`, the chunk at which each cluster starts; for a
            cluster without tokens, the chunk of the next one.
        cluster_of_chunk: `<int32>[B, H, N]`. Chunks that hold no token belong to any
            cluster.
        rank_of_chunk: `<int32>[B, H, N]`, number of chunks of the same cluster before
            it.
        slots: `<int32>[B, H, L]`, slot of each token, counted over all chunks.
        tokens: `<int32>[B, H, N, C]`, token in each slot; any token where a slot is
            empty, which are the last ones of a cluster's last chunk.
        is_filled: `<bool>[B, H, N, C]`, whether a slot holds a token.

    Example:

    ```python
    from keras import ops
    from routing_tf.layers.routing.cluster_order import ClusterOrder

    clusters = ops.convert_to_tensor([[[1, 0, 1, 1]]])
    order = ClusterOrder(clusters, num_clusters=2, chunk_size=2)
    assert ops.convert_to_numpy(order.slots).tolist() == [[[2, 0, 3, 4]]]
    ```
    """

    def __init__(self, clusters, num_clusters, chunk_size):
        length = length_of(clusters, 2)
        found = SortedTokens(clusters, num_clusters)
        self.chunk_size = chunk_size
        num_chunks = (length + num_clusters * (chunk_size - 1)) // chunk_size
        self.num_chunks = smaller(length, num_chunks)
        chunks = (found.counts + chunk_size - 1) // chunk_size
        self.first_chunk = first_chunk = ops.cumsum(chunks, axis=-1) - chunks
        places = numbers(self.num_chunks)
        # Of clusters with the same first chunk, only the last one has tokens.
        starts = _count(first_chunk, self.num_chunks + 1)[..., : self.num_chunks]
        self.cluster_of_chunk = ops.cumsum(starts, axis=-1) - 1
        self.rank_of_chunk = places - entries_at(first_chunk, self.cluster_of_chunk)
        place = entries_at(found.starts, self.cluster_of_chunk)
        place = place + self.rank_of_chunk * chunk_size
        place = place[..., None] + numbers(chunk_size)
        self.tokens = entries_at(found.tokens, ops.minimum(place, length - 1))
        slots = entries_at(first_chunk, found.clusters) * chunk_size + found.ranks()
        self.slots = inverse(found.tokens, slots)
        size = entries_at(found.counts, self.cluster_of_chunk)
        self.is_filled = self.ranks() < size[..., None]

    def leave_out_last(self):
        """Leaves out the chunks of the last cluster, all but the first.

        Its tokens then share a slot, and their results must have no influence. How many
        chunks there are is then not known before they are computed.
        """
        number = ops.max(self.first_chunk[..., -1], initial=0) + 1
        self.num_chunks = number = ops.minimum(number, self.num_chunks)
        self.cluster_of_chunk = self.cluster_of_chunk[:, :, :number]
        self.rank_of_chunk = self.rank_of_chunk[:, :, :number]
        self.tokens = self.tokens[:, :, :number]
        self.is_filled = self.is_filled[:, :, :number]
        self.slots = ops.minimum(self.slots, number * self.chunk_size - 1)

    def arrange(self, x):
        """Puts `[B, H, L, D]` into slots `[B, H, N, C, D]`; empty ones get any token.

        Results computed from empty slots must have no influence: their gradient is
        ignored.
        """

        # Each token has one slot, so the gradient need not add up.
        @stated_gradient
        def arrange(x, tokens, slots):
            def gradient(upstream):
                return _take_slots(upstream, slots), None, None

            return tensors.gather(x, tokens), gradient

        return arrange(x, self.tokens, self.slots)

    def restore(self, x):
        """Undoes `arrange`: from `[B, H, N, C, D]` to `[B, H, L, D]`."""

        @stated_gradient
        def restore(x, tokens, slots, is_filled):
            def gradient(upstream):
                found = tensors.gather(upstream, tokens)
                found = ops.where(is_filled[..., None], found, 0)
                return found, None, None, None

            return _take_slots(x, slots), gradient

        return restore(x, self.tokens, self.slots, self.is_filled)

    def windows(self, x, attention_window):
        """Joins each chunk with those before it that its tokens may see.

        From `[B, H, N, C, D]` to `[B, H, N, S, D]`; any entries before the first chunk.
        """
        before = self._num_chunks_before(attention_window)
        if before and windows_are_gathered():
            return gathered_windows(x, before)
        return memory_windows(x, (before,), (0,), axis=2)

    def window_offset(self, attention_window):
        """Returns the slot of a window at which its own chunk starts."""
        return self._num_chunks_before(attention_window) * self.chunk_size

    def window_mask(self, attention_window, nearest=0):
        """Returns which slots of its window a token sees: the last of its cluster.

        Returns `<bool>[B, H, N, C, S]`. The attention window includes the token itself,
        even with `nearest=1`, where it does not see itself.
        """
        before = self._num_chunks_before(attention_window)
        offset = before * self.chunk_size
        back = numbers(self.chunk_size)[:, None] + offset
        back = back - numbers(offset + self.chunk_size)
        near = (back >= nearest) & (back < attention_window)
        chunks_back = before - numbers(offset + self.chunk_size) // self.chunk_size
        own_cluster = chunks_back <= self.rank_of_chunk[..., None]
        return ops.logical_and(near, own_cluster[..., None, :])

    def ranks(self):
        """Returns the rank of each slot in its cluster, `<int32>[B, H, N, C]`."""
        slots = numbers(self.chunk_size)
        return self.rank_of_chunk[..., None] * self.chunk_size + slots

    def _num_chunks_before(self, attention_window):
        return -(-(attention_window - 1) // self.chunk_size)


def windows_are_gathered():
    """Returns whether `gathered_windows` is faster than `memory_windows`."""
    return keras.backend.backend() == "tensorflow" and not is_compiled_by_xla()


def gathered_windows(x, before):
    """Does what `memory_windows` does, with any chunk in the place of none.

    Several long rows are gathered faster than padded, cut and joined. It defines its
    gradient: TensorFlow's would scatter, although the readers of a chunk are known.
    """
    batch, heads, num_chunks, slots, dim = ops.shape(x)
    chunk, place = numbers(num_chunks)[:, None], numbers(before + 1)
    size, lib = before + 1, library(num_chunks)
    read = lib.maximum(chunk + place - before, 0)
    # Who reads a chunk at each place of its window. The first chunk does not read the
    # one before it, whose place has the gradient zero.
    reader = chunk + before - place
    reader = lib.where(reader < num_chunks, reader * size + place, 0)

    @stated_gradient
    def join(rows):
        def gradient(upstream):
            rows = ops.reshape(upstream, (batch, heads, num_chunks * size, slots * dim))
            return ops.sum(backends.take(rows, reader, axis=2), axis=3)

        return backends.take(rows, read, axis=2), gradient

    windows = join(ops.reshape(x, (batch, heads, num_chunks, slots * dim)))
    return ops.reshape(windows, (batch, heads, num_chunks, size * slots, dim))


def _take_slots(x, slots):
    """From `[B, H, N, C, D]` to the entries of the slots, `[B, H, L, D]`."""
    batch, heads, num_chunks, size, dim = ops.shape(x)
    rows = ops.reshape(x, (batch, heads, num_chunks * size, dim))
    return tensors.gather(rows, slots)


class SortedTokens:
    """Tokens sorted by cluster, and in a cluster by position.

    `clusters` are `<int32>[B, H, L]`, from 0 to K - 1.

    Attributes:
        clusters: `<int32>[B, H, L]`, the clusters in order.
        tokens: `<int32>[B, H, L]`, the token at each place of this order.
        counts: `<int32>[B, H, K]`, number of tokens of each cluster.
        starts: `<int32>[B, H, K]`, the place at which each cluster starts.
        places: `<int32>[L]`, all places in order.
    """

    def __init__(self, clusters, num_clusters):
        length = length_of(clusters, 2)
        if is_known(length) and (num_clusters + 1) * length > LARGEST_INTEGER:
            raise ValueError(
                "The number of entries to sort times the number of clusters must be "
                f"less than 2**31. Received: {length} entries (tokens, or tokens times "
                f"the blocks that each one chooses) and {num_clusters} clusters or "
                "blocks. Use fewer clusters, longer blocks or shorter sequences"
            )
        # All keys differ, so any sort is a stable one.
        self.places = numbers(length)
        keys = ops.sort(clusters * length + self.places, axis=-1)
        self.clusters, self.tokens = keys // length, keys % length
        self.counts = _count(clusters, num_clusters)
        self.starts = ops.cumsum(self.counts, axis=-1) - self.counts

    def ranks(self):
        """Returns the rank in its cluster of the token at each place."""
        return self.places - entries_at(self.starts, self.clusters)


def ranks_in_clusters(clusters, num_clusters, starts=None):
    """Returns how many earlier tokens are in the cluster of each token.

    From `<int32>[B, H, L]` to `<int32>[B, H, L]`. With `starts`, `<int32>[B, H, L]`,
    where the segment of each token starts, only tokens of its segment count.
    """
    found = SortedTokens(clusters, num_clusters)
    if starts is None:
        return inverse(found.tokens, found.ranks())
    start = entries_at(starts, found.tokens)
    first = first_positions(ops.logical_or(changes(found.clusters), changes(start)))
    return inverse(found.tokens, found.places - first)


def _count(numbers, size):
    """Counts how often each number below `size` occurs; larger ones count as last."""
    batch, heads, _ = ops.shape(numbers)
    flat = tensors.flat_positions(ops.minimum(numbers, size - 1), size)
    counts = backends.segment_sum(
        ops.ones_like(flat), flat, num_segments=batch * heads * size
    )
    return ops.reshape(counts, (batch, heads, size))


def inverse(order, values):
    """Returns `values` with the one at place i moved to `order[i]`."""
    batch, heads, length = ops.shape(order)
    positions = tensors.flat_positions(order, length)
    flat = backends.scatter(
        positions[:, None], ops.reshape(values, (-1,)), (batch * heads * length,)
    )
    return ops.reshape(flat, (batch, heads, length))
