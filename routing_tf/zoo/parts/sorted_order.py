"""Tokens sorted by cluster, in chunks of one size.

Letters: B batch, F heads and rounds, L length, N chunks, C tokens of a chunk, D dim.
"""

from keras import ops

from routing_tf.layers.routing.cluster_order import SortedTokens
from routing_tf.layers.support import blocks
from routing_tf.layers.support import gathering
from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.lengths import num_parts


class SortedOrder:
    """Tokens sorted by cluster, in chunks of one size.

    Attributes:
        size: number of tokens of a chunk.
        length: number of tokens.
        num_chunks: number of chunks.
        tokens: `<int32>[B, F, L]`, the token at each place of the order.
        places: `<int32>[B, F, L]`, the place of each token.
    """

    def __init__(self, clusters, num_clusters, size):
        length = length_of(clusters, 2)
        self.size, self.length = size, length
        self.num_chunks = num_parts(length, size)
        self.tokens = SortedTokens(clusters, num_clusters).tokens
        self.places = ops.cast(ops.argsort(self.tokens, axis=-1), "int32")

    def arrange(self, x):
        """Puts `[B, F, L, D]` into chunks, `[B, F, N, C, D]`, followed by zeros."""
        x = gathering.gather(x, self.tokens)
        return blocks.break_into_blocks(x, self.size, axis=2)

    def windows(self, x):
        """Joins each chunk with the one before it, to `[B, F, N, 2 * C, D]`."""
        return blocks.memory_windows(x, (1,), (0,), axis=2)

    def restore(self, x):
        """Undoes `arrange`."""
        batch, heads, chunks, slots, dim = ops.shape(x)
        x = ops.reshape(x, (batch, heads, chunks * slots, dim))
        return gathering.gather(x, self.places)

    def entries(self, x):
        """From a bias of keys `[B, 1, L]` to what chunks read `[B, F, N, 1, 2 * C]`."""
        x = gathering.gather_entries(x, self.tokens, self.length)
        x = blocks.break_into_blocks(x, self.size, axis=2)
        return ops.swapaxes(self.windows(x[..., None]), -1, -2)
