"""What an indexer makes of a sequence, and queries that are scored block by block."""

import typing

from keras import ops

from routing_tf.layers.support.blocks import put_back_blocks
from routing_tf.layers.support.lengths import numbers
from routing_tf.layers.support.products import product


class Index(typing.NamedTuple):
    """What the indexer makes of a sequence. J is its number of heads, E their size.

    Attributes:
        query: `<float>[B, L, J, E]`.
        weights: `<float>[B, L, J]`, those of the heads of each query.
        key: `<float>[B, S, E]`, the same for all heads; or other keys for each query,
            `[B, L, S, E]`.
    """

    query: typing.Any
    weights: typing.Any
    key: typing.Any

    def scores(self):
        """Returns the scores of the keys, `<float32>[B, L, S]`."""
        batch, length, heads, size = ops.shape(self.query)
        if len(self.key.shape) == 4:
            products = product(self.query, self.key, transpose_y=True)
        else:
            query = ops.reshape(self.query, (batch, length * heads, size))
            products = product(query, self.key, transpose_y=True)
            shape = (batch, length, heads, ops.shape(self.key)[1])
            products = ops.reshape(products, shape)
        products = ops.cast(ops.relu(products), "float32")
        return ops.sum(ops.cast(self.weights, "float32")[..., None] * products, axis=2)


def in_blocks(function, length, size, axis):
    """Joins the results of a function of places, `<int32>[Q]`, along an axis."""
    if size >= length:
        return function(numbers(length))
    size = max(1, size)
    starts = ops.arange(0, length, size, dtype="int32")
    # A loop, so that one block is in memory at once.
    found = ops.map(
        lambda start: function(ops.minimum(start + numbers(size), length - 1)), starts
    )
    return put_back_blocks(ops.moveaxis(found, 0, axis), length, axis=axis)
