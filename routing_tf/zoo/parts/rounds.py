"""Several rounds of hashing, each with its own hashes, joined into one attention.

Until they are joined, the rounds of a head are separate heads: heads times rounds, with
those of a round together. Letters: B batch, R rounds, H heads, F the product of both, L
length, N chunks, C queries or tokens of a chunk, S keys that a chunk reads, D dim.
"""

import dataclasses

import numpy as np
from keras import ops

from routing_tf.layers.routing.cluster_order import SortedTokens
from routing_tf.layers.softmax.scaled_dot_product import joined_parts
from routing_tf.layers.support import tensors
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import num_parts


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
        x = tensors.gather(x, self.tokens)
        return tensors.break_into_blocks(x, self.size, axis=2)

    def windows(self, x):
        """Joins each chunk with the one before it, to `[B, F, N, 2 * C, D]`."""
        return tensors.memory_windows(x, (1,), (0,), axis=2)

    def restore(self, x):
        """Undoes `arrange`."""
        batch, heads, chunks, slots, dim = ops.shape(x)
        x = ops.reshape(x, (batch, heads, chunks * slots, dim))
        return tensors.gather(x, self.places)

    def entries(self, x):
        """From a bias of keys `[B, 1, L]` to what chunks read `[B, F, N, 1, 2 * C]`."""
        x = tensors.gather_entries(x, self.tokens, self.length)
        x = tensors.break_into_blocks(x, self.size, axis=2)
        return ops.swapaxes(self.windows(x[..., None]), -1, -2)


class Rounds:
    """Which keys the queries of each head see in each round.

    Keys have places, of which a query sees a range. A key seen in several rounds counts
    once: its weight is divided by their number.

    Args:
        num_rounds: number of rounds.
        places: `<int32>[B, F, L]`, those of the keys.
        first: `<int32>[B, F, L]`, the first place that each query sees.
        end: `<int32>[B, F, L]`, the place after the last one.
        sees_itself: whether a query that sees others also sees itself.

    Reference: Kitaev et al., "Reformer: The Efficient Transformer", section 2
    ("Multi-round LSH attention") and appendix A, where N is the number of rounds.
    """

    def __init__(self, num_rounds, places, first, end, sees_itself):
        self.num_rounds = num_rounds
        self.places = of_each_round(places, num_rounds)
        self.ranges = ops.concatenate(
            [of_each_round(x, num_rounds) for x in (first, end)], axis=-1
        )
        self.sees_itself = sees_itself
        self._is_alone = None
        if not sees_itself:
            alone = ops.cast(end - first <= 1, "int32")
            self._is_alone = tensors.smallest(unfolded(alone, num_rounds), axis=-1) > 0

    def bias(self, places, ranges):
        """Returns minus the logarithm of the number of rounds that show a key.

        `places` are those of keys `<int32>[..., S, R]`, `ranges` those of queries
        `<int32>[..., C, 2 * R]`. Returns `<float32>[..., C, S]`.
        """
        count = 0
        for n in range(self.num_rounds):
            place = places[..., None, :, n]
            first, end = (ranges[..., :, None, i] for i in (n, n + self.num_rounds))
            # A comparison with 0 is exact also where integers are compared as floats.
            seen = ops.logical_and(place - first >= 0, place - end < 0)
            count = count + ops.cast(seen, "float32")
        return -ops.log(ops.maximum(count, 1.0))

    def joined(self, output, logsumexp, value):
        """Joins `[B, F, L, D]` and `[B, F, L]` to `[B, H, L, D]`.

        Queries that see no other token get their own value of `[B, F, L, D]`.
        """
        if self.num_rounds > 1:
            output = joined_parts(
                unfolded(output, self.num_rounds, axis=-2),
                unfolded(logsumexp, self.num_rounds),
            )
            value = value[:, : output.shape[1]]
        if self._is_alone is None:
            return output
        return ops.where(self._is_alone[..., None], value, output)


def of_each_round(x, num_rounds):
    """From `[B, F, L]` to `[B, F, L, R]`: the entries of a head in all its rounds."""
    return ops.concatenate([unfolded(x, num_rounds)] * num_rounds, axis=1)


def folded(x, num_heads, num_rounds):
    """Repeats `[B, H, ...]` for each round, which all share it; None stays None."""
    if x is None or num_rounds == 1 or x.shape[1] != num_heads:
        return x
    return ops.concatenate([x] * num_rounds, axis=1)


def fold_inputs(inputs, num_heads, num_rounds):
    """Returns `HeadInputs` with a head for each round."""
    if num_rounds == 1:
        return inputs
    names = ("query", "key", "value")
    parts = {
        name: folded(getattr(inputs, name), num_heads, num_rounds) for name in names
    }
    if num_heads > 1:
        # A single head stands for all heads and all rounds.
        for name in ("key_mask", "value_mask"):
            parts[name] = folded(getattr(inputs, name), num_heads, num_rounds)
    return dataclasses.replace(inputs, **parts)


def unfolded(x, num_rounds, axis=-1):
    """Moves the rounds of `[B, F, ...]` to an axis of their own."""
    batch, folded_heads, *rest = ops.shape(x)
    x = ops.reshape(x, (batch, num_rounds, folded_heads // num_rounds, *rest))
    return ops.moveaxis(x, 1, axis)


def range_of_bucket(bucket, end, window, num_clusters):
    """Returns the places of the last members of a bucket: the first, and the end."""
    start = bucket * stride(num_clusters)
    return start + ops.maximum(end - window, 0), start + end


def stride(num_clusters):
    """Returns how many places a bucket has, including that of padding."""
    return np.int32(np.iinfo("int32").max // (num_clusters + 1))
