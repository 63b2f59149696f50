"""Relative position embeddings after Shaw et al. (2018)."""

import math

import keras
from keras import ops

from routing_tf.layers.support import backends
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.tensors import cut_axis
from routing_tf.layers.support.tensors import dense
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import library
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import initializer


@keras.saving.register_keras_serializable("routing_tf")
class RelativePosition(ConfiguredLayer):
    """Learned vectors for the distance between a query and a key.

    One table is added to the keys and one to the values; both are shared by all
    heads. Distances are clipped to `max_relative_position` on either side. The
    `(queries, keys, dim)` tensor of embeddings is never built: the product of the
    queries with the vectors of all distances is shifted row by row instead.

    Args:
        max_relative_position: largest distance with a vector of its own, in tokens.
        embeddings_initializer: initializer of both tables. Defaults to
            `"glorot_uniform"`.
        key_initializer: initializer of the table of the keys; None (the default) for
            `embeddings_initializer`. A standard deviation of 1 and more makes heads
            prefer some distances from the start, which speeds up training.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments: none; use `key_logits` and `value_sums`, or `key_logits_at` and
    `value_sums_at` if distances are not differences of slots.

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import RelativePosition

    relative = RelativePosition(max_relative_position=4)
    relative.build((2, 6, 8), (2, 6, 8))
    queries = np.ones((2, 6, 8), "float32")
    assert relative.key_logits(queries, num_keys=6, offset=0).shape == (2, 6, 6)
    ```

    Reference: Shaw, Uszkoreit, Vaswani, "Self-Attention with Relative Position
    Representations" (https://arxiv.org/abs/1803.02155);
    `dot_product_attention_relative` of the release.
    """

    max_relative_position = Argument(check_positive_integer)
    embeddings_initializer = Argument(initializer)
    key_initializer = Argument(initializer)

    def __init__(
        self,
        max_relative_position,
        embeddings_initializer="glorot_uniform",
        key_initializer=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.max_relative_position = max_relative_position
        self.embeddings_initializer = embeddings_initializer
        self.key_initializer = key_initializer

    def build(self, query_shape, value_shape):
        rows = 2 * self.max_relative_position + 1
        self.key_embeddings = self.add_weight(
            name="key_embeddings",
            shape=(rows, query_shape[-1]),
            initializer=cloned(self.key_initializer or self.embeddings_initializer),
        )
        self.value_embeddings = self.add_weight(
            name="value_embeddings",
            shape=(rows, value_shape[-1]),
            initializer=cloned(self.embeddings_initializer),
        )

    def key_logits(self, query, num_keys, offset, is_causal=False):
        """Returns `query · key_embeddings[distance]`, `<float>[..., queries, keys]`.

        Key `j` has the distance `j - offset - i` from query `i`. With `is_causal`, a
        mask hides later keys: the last query sees all, each earlier one a key less.
        """
        num_queries = length_of(query, -2)
        columns = _num_columns(num_queries, num_keys, is_causal)
        rows = self._rows(self.key_embeddings, num_queries, columns, offset)
        products = ops.matmul(query, ops.transpose(ops.cast(rows, query.dtype)))
        return distances_to_keys(products, num_keys)

    def value_sums(self, weights, offset, is_causal=False):
        """Returns the sums over keys of `weights · value_embeddings[distance]`.

        From `<float>[..., queries, keys]` to `[..., queries, value_dim]`. With
        `is_causal`, the weights of later keys are zero; see `key_logits`.
        """
        num_queries, num_keys = length_of(weights, -2), length_of(weights, -1)
        columns = _num_columns(num_queries, num_keys, is_causal)
        rows = self._rows(self.value_embeddings, num_queries, columns, offset)
        weights = keys_to_distances(weights, columns)
        return ops.matmul(weights, ops.cast(rows, weights.dtype))

    def key_logits_at(self, query, distances):
        """Returns `query · key_embeddings[distance]` for distances of any kind.

        Leading axes of the query and of `<int>[..., queries, keys]` are broadcast.
        """
        *shape, dim = ops.shape(query)
        # In two dimensions, because XLA takes no other product in a loop on TensorFlow.
        rows = ops.reshape(query, (-1, dim))
        table = ops.cast(self.key_embeddings, query.dtype)
        # Many keys share a clipped distance: their gradients add up in float32.
        products = ops.cast(ops.matmul(rows, ops.transpose(table)), "float32")
        index = self._entries(shape, distances, self.max_relative_position)
        flat = ops.take(ops.reshape(products, (-1,)), ops.reshape(index, (-1,)), axis=0)
        return ops.cast(ops.reshape(flat, ops.shape(index)), query.dtype)

    def value_sums_at(self, weights, distances):
        """Returns the sum over keys of `weights · value_embeddings[distance]`.

        Args:
            weights: `<float>[..., queries, keys]`.
            distances: `<int>`, broadcastable to the shape of `weights`.

        Returns:
            `<float>[..., queries, value_dim]`.
        """
        limit, dtype = self.max_relative_position, weights.dtype
        weights = ops.cast(weights, "float32")
        shape = ops.shape(weights)[:-1]
        inner = ops.where(ops.abs(distances) < limit, weights, 0)
        index = self._entries(shape, distances, limit - 1)
        sums = backends.segment_sum(
            ops.reshape(inner, (-1,)),
            ops.reshape(ops.broadcast_to(index, ops.shape(weights)), (-1,)),
            num_segments=math.prod(shape) * (2 * limit - 1),
        )
        # Clipped distances occur more than once, so they are added up in a fixed order;
        # otherwise last bits could differ between runs.
        first, last = (
            ops.reshape(ops.sum(ops.where(end, weights, 0), axis=-1), (-1, 1))
            for end in (distances <= -limit, distances >= limit)
        )
        sums = ops.reshape(sums, (-1, 2 * limit - 1))
        sums = ops.cast(ops.concatenate([first, sums, last], axis=-1), dtype)
        output = ops.matmul(sums, ops.cast(self.value_embeddings, dtype))
        return ops.reshape(output, (*shape, output.shape[-1]))

    def _entries(self, shape, distances, limit):
        """Indices of clipped distances in a flattened `[*shape, 2 * limit + 1]`."""
        rows = ops.arange(math.prod(shape), dtype="int32") * (2 * limit + 1)
        columns = ops.clip(distances, -limit, limit) + limit
        return ops.reshape(rows, (*shape, 1)) + columns

    def _rows(self, table, num_queries, columns, offset):
        distances = numbers(columns) - num_queries - offset
        limit = self.max_relative_position
        clip = library(columns, num_queries, offset).clip
        places = clip(distances, -limit, limit) + limit
        return backends.take(dense(table), places, axis=0)


def _num_columns(num_queries, num_keys, is_causal):
    """Number of distances that count, plus a leading one for the shift."""
    return num_keys + (1 if is_causal else num_queries)


def distances_to_keys(products, num_keys):
    """Shifts rows so that columns mean keys: `out[i, j] = in[i, j + queries - i]`.

    From `<float>[..., queries, columns]`, a column for each distance and more than
    `num_keys`, to `[..., queries, num_keys]`; any entry if there is no such column.
    """
    *leading, rows, columns = ops.shape(products)
    # Read with rows one element shorter, each row starts one column earlier.
    flat = ops.reshape(products, (*leading, rows * columns))
    flat = cut_axis(flat, rows, rows * columns, axis=-1)
    keys = ops.reshape(flat, (*leading, rows, columns - 1))
    return cut_axis(keys, 0, num_keys, axis=-1)


def keys_to_distances(weights, columns):
    """The transpose of `distances_to_keys`: `out[i, j + queries - i] = in[i, j]`.

    `columns` must exceed the number of keys; entries without a key are zero.
    """
    *leading, rows, num_keys = ops.shape(weights)
    weights = _pad_last(weights, 0, columns - 1 - num_keys)
    flat = ops.reshape(weights, (*leading, rows * (columns - 1)))
    return ops.reshape(_pad_last(flat, rows, 0), (*leading, rows, columns))


def _pad_last(x, before, after):
    if is_known(before, after) and not before and not after:
        return x
    return ops.pad(x, [(0, 0)] * (len(x.shape) - 1) + [(before, after)])
