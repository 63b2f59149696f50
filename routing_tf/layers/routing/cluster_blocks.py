"""Tokens of each cluster: the first ones in a block, the later ones in chunks.

The sizes of clusters depend on the data. `cluster_order` has room for any sizes, and
half of the pairs that it computes belong to two clusters. Here there are only as many
chunks as are needed, so almost all pairs belong to one cluster; a step of training
takes a quarter to a third less time on a CPU. Shapes then depend on the data, which
only TensorFlow allows, see `backends.may_follow_data`.

Letters: B batch, H heads, L length, K clusters, T tokens of a block, N chunks of all
heads and sequences, C slots of a chunk, S slots that a chunk reads, D dim.
"""

import numpy as np
from keras import ops

from routing_tf.layers.routing.cluster_order import SortedTokens
from routing_tf.layers.routing.cluster_order import inverse
from routing_tf.layers.support.backends import stated_gradient
from routing_tf.layers.support.backends import take
from routing_tf.layers.support.tensors import entries_at

# The number of chunks is rounded up to a multiple of this, because libraries prepare
# for each new shape. Empty chunks repeat what comes next.
CHUNK_STEP = 16


def block_size_for(length, num_clusters, attention_window, chunk_size):
    """Returns the size of a block in whole chunks: an even share, at most a window."""
    share = min(-(-length // num_clusters), attention_window)
    return -(-share // chunk_size) * chunk_size


class ClusterBlocks:
    """Tokens sorted by cluster, with the first ones of each cluster in a block.

    Later tokens stand in chunks, each of which reads the chunks before it, in its
    cluster, that its own tokens may see. In blocks and chunks tokens stand in order of
    position. So a token's place inside them, and all that it reads, depend only on
    earlier tokens. The number of its chunk has no influence.

    Args:
        clusters: `<int32>[B, H, L]`, from 0 to K - 1; K for tokens without a cluster,
            which have no place.
        num_clusters: K.
        attention_window: how many tokens of its cluster a token sees, itself included.
        block_size: T, a multiple of `chunk_size`.
        chunk_size: C.
        all_have_one: whether each token has a cluster. Defaults to False.

    Attributes:
        offset: slot at which a chunk's own tokens start among those that it reads, S -
            C.
    """

    def __init__(
        self,
        clusters,
        num_clusters,
        attention_window,
        block_size,
        chunk_size,
        all_have_one=False,
    ):
        batch, heads, length = ops.shape(clusters)
        self.attention_window = attention_window
        self.block_size, self.chunk_size = block_size, chunk_size
        self.offset = -(-(attention_window - 1) // chunk_size) * chunk_size
        self._blocks = (batch, heads, num_clusters)
        self._num_block_slots = batch * heads * num_clusters * block_size
        found = SortedTokens(clusters, num_clusters + 1)
        first, sizes = found.starts[..., :-1], found.counts[..., :-1]
        rank = inverse(found.tokens, found.ranks())
        # Tokens and clusters of all heads and sequences, one after the other.
        rows = ops.reshape(ops.arange(batch * heads, dtype="int32"), (batch, heads, 1))
        token_at = found.tokens + rows * length
        slots = np.arange(block_size, dtype="int32")
        place = ops.minimum(first[..., None] + slots, length - 1)
        starts, of_chunks, in_chunks = self._lay_out_chunks(
            ops.reshape(sizes, (-1,)),
            ops.reshape(first + rows * length, (-1,)),
            ops.reshape(token_at, (-1,)),
        )
        # Slots of the blocks, and then those of the chunks.
        self._tokens = _joined(entries_at(token_at, place), of_chunks)
        self._is_filled = _joined(slots < sizes[..., None], in_chunks)
        cluster = rows * num_clusters + ops.minimum(clusters, num_clusters - 1)
        in_block = cluster * block_size + rank
        in_chunk = take(starts, cluster, axis=0) * chunk_size + rank - block_size
        in_chunk += self._num_block_slots
        self._slots = ops.where(rank < block_size, in_block, in_chunk)
        self._has_place = None
        if not all_have_one:
            self._has_place = clusters < num_clusters
            self._slots = ops.where(self._has_place, self._slots, 0)

    def _lay_out_chunks(self, sizes, first, token_at):
        """Makes the chunks of all clusters.

        `first` tells where clusters start in `token_at`, the tokens in order. Returns
        the first chunk of each, and `[N, C]` the tokens in the slots of chunks and
        which of these are filled.
        """
        size, num_clusters = self.chunk_size, sizes.shape[0]
        later = ops.maximum(sizes - self.block_size, 0)
        chunks = (later + size - 1) // size
        ends = ops.cumsum(chunks, axis=0)
        starts = ends - chunks
        # At least a few, which nobody reads if all tokens are in blocks.
        steps = (ops.sum(chunks) + CHUNK_STEP - 1) // CHUNK_STEP
        count = ops.maximum(steps, 1) * CHUNK_STEP
        chunk = ops.arange(count, dtype="int32")
        cluster = ops.cast(ops.searchsorted(ends, chunk, side="right"), "int32")
        cluster = ops.minimum(cluster, num_clusters - 1)
        number = chunk - take(starts, cluster, axis=0)
        rank = self.block_size + number * size
        rank = rank[:, None] + np.arange(size, dtype="int32")
        place = take(first, cluster, axis=0)[:, None] + rank
        place_or_last = ops.minimum(place, token_at.shape[0] - 1)
        tokens = take(token_at, place_or_last, axis=0)
        is_filled = rank < take(sizes, cluster, axis=0)[:, None]
        # The chunks of the blocks and then these, each by its number in its cluster.
        of_block = self.block_size // size
        back = np.arange(-self.offset // size, 1, dtype="int32")
        self._number_read = number[:, None] + of_block + back
        in_block = cluster[:, None] * of_block + self._number_read
        in_chunks = num_clusters * of_block + chunk[:, None] + back
        read = ops.where(self._number_read < of_block, in_block, in_chunks)
        self._read = ops.maximum(read, 0)
        return starts, tokens, is_filled

    def arrange(self, x):
        """Puts tokens into blocks and chunks.

        From `[B, H, L, D]` to `[B, H, K, T, D]` and `[N, C, D]`. Empty slots contain
        any token, and must have no influence.
        """

        # Each token has at most one slot, so the gradient need not add up.
        @stated_gradient
        def arrange(x):
            def gradient(*upstream):
                return self._of_tokens(_rows(upstream))

            rows = ops.reshape(x, (-1, x.shape[-1]))
            return self._cut(take(rows, self._tokens, axis=0)), gradient

        return arrange(x)

    def arrange_and_read(self, x):
        """Returns the result of `arrange` and what the chunks read, `[N, S, D]`."""
        # A chunk is one row, so few long rows are copied and added up.
        dim, window = x.shape[-1], self.offset + self.chunk_size
        row = self.chunk_size * dim

        @stated_gradient
        def arrange(x):
            def gradient(first, later, windows):
                slots = ops.scatter_update(
                    ops.reshape(_rows((first, later)), (-1, row)),
                    ops.reshape(self._read, (-1, 1)),
                    ops.reshape(windows, (-1, row)),
                    reduction="add",
                )
                return self._of_tokens(ops.reshape(slots, (-1, dim)))

            slots = take(ops.reshape(x, (-1, dim)), self._tokens, axis=0)
            windows = take(ops.reshape(slots, (-1, row)), self._read, axis=0)
            return (
                *self._cut(slots),
                ops.reshape(windows, (-1, window, dim)),
            ), gradient

        return arrange(x)

    def _cut(self, slots):
        """From all slots, `[., D]`, to those of the blocks and those of the chunks."""
        first, later = slots[: self._num_block_slots], slots[self._num_block_slots :]
        dim = slots.shape[-1]
        return (
            ops.reshape(first, (*self._blocks, self.block_size, dim)),
            ops.reshape(later, (-1, self.chunk_size, dim)),
        )

    def _of_tokens(self, slots):
        """From all slots, `[., D]`, to tokens, `[B, H, L, D]`; zero without a slot."""
        tokens = take(slots, self._slots, axis=0)
        if self._has_place is None:
            return tokens
        return ops.where(self._has_place[..., None], tokens, 0)

    def entries(self, x):
        """Arranges a mask or bias, broadcastable to `[B, H, L]`; None stays None.

        Returns `[B, H, K, 1, T]` for the blocks, and for what chunks read `[N, 1, S]`.
        """
        if x is None:
            return None, None
        everywhere = ops.broadcast_to(x, ops.shape(self._slots))
        first, _, windows = self.arrange_and_read(everywhere[..., None])
        return tuple(ops.swapaxes(each, -1, -2) for each in (first, windows))

    def mask(self, nearest=0):
        """Returns which slots of its block a token sees, up to its own.

        Returns `<bool>[T, T]`; None for all. With `nearest=1` it does not see itself.
        """
        if not nearest and self.block_size <= self.attention_window:
            return None
        back = np.arange(self.block_size)[:, None] - np.arange(self.block_size)
        return (back >= nearest) & (back < self.attention_window)

    def window_mask(self, nearest=0):
        """Returns which slots a token of a chunk sees, broadcastable to `[N, C, S]`.

        With `nearest=1` it does not see itself.
        """
        back = np.arange(self.chunk_size)[:, None] + self.offset
        back = back - np.arange(self.offset + self.chunk_size)
        near = (back >= nearest) & (back < self.attention_window)
        if self.offset <= self.block_size:
            return near
        # Chunks that would stand before the first one of the cluster.
        exists = ops.repeat(self._number_read >= 0, self.chunk_size, axis=-1)
        return ops.logical_and(near, exists[:, None])

    def restore(self, first, later):
        """Undoes `arrange`; zero for tokens without a cluster."""

        @stated_gradient
        def restore(first, later):
            def gradient(upstream):
                rows = ops.reshape(upstream, (-1, upstream.shape[-1]))
                slots = take(rows, self._tokens, axis=0)
                return self._cut(ops.where(self._is_filled[:, None], slots, 0))

            return self._of_tokens(_rows((first, later))), gradient

        return restore(first, later)


def _joined(of_blocks, of_chunks):
    """Joins the entries of the slots of blocks and of chunks, in this order, `[.]`."""
    parts = [ops.reshape(x, (-1,)) for x in (of_blocks, of_chunks)]
    return ops.concatenate(parts, axis=0)


def _rows(blocks_and_chunks):
    """Undoes `_cut`."""
    rows = [ops.reshape(x, (-1, x.shape[-1])) for x in blocks_and_chunks]
    return ops.concatenate(rows, axis=0)
