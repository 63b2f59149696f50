"""A memory of very many values, of which each token finds a few by their keys."""

import keras
from keras import ops

from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.keras_internals import BatchNormalization
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate
from routing_tf.layers.support.validation import check_seed
from routing_tf.layers.support.validation import initializer
from routing_tf.zoo.parts import refusals

__all__ = ["ProductKeyMemory"]


NORM_EPSILON = 1e-5


@keras.saving.register_keras_serializable("routing_tf")
class ProductKeyMemory(ConfiguredLayer):
    """A learned table of `num_keys**2` values, from which each token reads a few.

    A value has a key of two halves, and each half is one of `num_keys` learned vectors:
    value `i * num_keys + j` has the first half i and the second half j. Each head makes
    a query, whose score with a key is the sum of the products of the halves. The
    `top_k` best keys of all are found exactly among the `top_k**2` pairs of the best
    halves, so search costs `num_keys` and not `num_keys**2` products. The output is the
    sum over the heads of the values, weighted by a softmax over the scores.

    The layer takes the place of a feed-forward layer, in one or a few blocks. Tokens do
    not see each other, so it is causal and needs no cache; only with
    `query_norm="batch"`, as in the paper, tokens of a batch influence each other in
    training. The batch is that of all replicas, and one part of a step that is
    accumulated.

    The values are gathered: values that no token has chosen have a gradient of zero.
    An optimizer with momentum still moves those that were chosen in earlier steps. The
    paper trains the values with a larger learning rate than other weights.

    Args:
        num_heads: number of queries of a token. Defaults to 4.
        num_keys: number of vectors for each half of the keys, so that there are
            `num_keys**2` values. Defaults to 128.
        top_k: number of values that a query reads, at most `num_keys`. Defaults to 32.
        key_dim: size of a key, an even number. Defaults to 256.
        value_dim: size of the output; None (the default) for that of the input.
        query_norm: `"layer"` for layer normalization of each half of a query,
            `"batch"` for batch normalization of the queries, which leaves padding out,
            or None. Defaults to `"layer"`.
        use_bias: whether the projection to queries has a bias. Defaults to False.
        input_dropout: rate of dropped inputs, in [0, 1). Defaults to 0.0.
        kernel_initializer: initializer of the projection to queries. Defaults to
            `"glorot_uniform"`.
        seed: integer, for dropout; None (the default) for another one each time.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`. Scores
            are added and compared in float32 under every policy.

    Call arguments:
        inputs: `<float>[batch, length, dim]`.
        mask: `<bool>[batch, length]`, True for real tokens; None for no padding.
            Defaults to the Keras mask of `inputs`. It matters for batch normalization
            only.
        training: whether dropout is on, and batch normalization uses the batch.

    Returns:
        `<float>[batch, length, value_dim]`.

    Raises:
        ValueError: if `key_dim` is odd, or `top_k` exceeds `num_keys`.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    memory = zoo.ProductKeyMemory(num_heads=2, num_keys=16, top_k=4, key_dim=8)
    block = layers.TransformerBlock(
        layers.MixedAttention([layers.LocalHeads(2, (8,))], key_dim=8), memory
    )
    x = np.random.default_rng(0).normal(size=(2, 24, 16)).astype("float32")
    assert block(x).shape == (2, 24, 16)
    assert memory.values.shape == (256, 16)
    ```

    Reference: Lample et al., "Large Memory Layers with Product Keys"
    (https://arxiv.org/abs/1907.05242).
    """

    num_heads = Argument(check_positive_integer)
    num_keys = Argument(check_positive_integer)
    top_k = Argument(check_positive_integer)
    key_dim = Argument(check_positive_integer)
    query_norm = Argument(check_choice, ("layer", "batch", None))
    use_bias = Argument(check_flag)
    input_dropout = Argument(check_rate)
    kernel_initializer = Argument(initializer)
    seed = Argument(check_seed)

    def __init__(
        self,
        num_heads=4,
        num_keys=128,
        top_k=32,
        key_dim=256,
        value_dim=None,
        query_norm="layer",
        use_bias=False,
        input_dropout=0.0,
        kernel_initializer="glorot_uniform",
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = num_heads
        self.num_keys = num_keys
        self.top_k = top_k
        self.key_dim = key_dim
        self.value_dim = value_dim
        if value_dim is not None:
            self.value_dim = check_positive_integer("value_dim", value_dim)
        self.query_norm = query_norm
        self.use_bias = use_bias
        self.input_dropout = input_dropout
        self.kernel_initializer = kernel_initializer
        self.seed = seed
        if self.key_dim % 2:
            raise ValueError(
                "`key_dim` must be even, for keys of two halves. Received: "
                f"key_dim={key_dim}"
            )
        if self.top_k > self.num_keys:
            raise ValueError(
                "`top_k` must be at most `num_keys`. Received: "
                f"top_k={top_k}, num_keys={num_keys}"
            )
        self.dropout_layer = keras.layers.Dropout(
            input_dropout, seed=self.seed, dtype=self.dtype_policy
        )
        self.query_dense = keras.layers.Dense(
            self.num_heads * self.key_dim,
            use_bias=use_bias,
            kernel_initializer=self.kernel_initializer,
            name="query",
            dtype=self.dtype_policy,
        )
        self.norm = self._norm()

    def _norm(self):
        options = {"epsilon": NORM_EPSILON, "dtype": self.dtype_policy}
        if self.query_norm == "batch":
            return BatchNormalization(momentum=0.9, name="query_norm", **options)
        if self.query_norm == "layer":
            return keras.layers.LayerNormalization(name="query_norm", **options)
        return None

    def build(self, inputs_shape):
        refusals.tokens_shape(self, inputs_shape)
        self.dim = inputs_shape[-1]
        half = self.key_dim // 2
        value_dim = self.value_dim or inputs_shape[-1]
        self.query_dense.build(inputs_shape)
        if self.query_norm == "batch":
            self.norm.build((None, None, self.num_heads * self.key_dim))
        elif self.query_norm == "layer":
            self.norm.build((None, None, 2, self.num_heads, half))
        self.keys = self.add_weight(
            name="keys",
            shape=(2, self.num_heads, self.num_keys, half),
            initializer=keras.initializers.RandomUniform(-(half**-0.5), half**-0.5),
        )
        self.values = self.add_weight(
            name="values",
            shape=(self.num_keys**2, value_dim),
            initializer=keras.initializers.RandomNormal(stddev=value_dim**-0.5),
        )

    def call(self, inputs, mask=None, training=None):
        query = self._queries(inputs, mask, training)
        scores, chosen = self._best(query)
        weights = ops.softmax(scores, axis=-1)
        # Dense gradients: optimizers of Keras square sparse ones before they add up
        # what belongs to the same row.
        table = ops.convert_to_tensor(self.values) * 1.0
        values = ops.take(table, chosen, axis=0)
        weights = ops.cast(weights, values.dtype)
        # LiteRT cannot have the product of matrices that `einsum` makes of this.
        batch, length = ops.shape(weights)[:2]
        number, dim = self.num_heads * self.top_k, values.shape[-1]
        values = ops.reshape(values, (batch, length, number, dim))
        weights = ops.reshape(weights, (batch, length, 1, number))
        return ops.squeeze(ops.matmul(weights, values), 2)

    def find(self, inputs):
        """Returns scores and values' numbers, `[batch, length, num_heads, top_k]`."""
        return self._best(self._queries(ops.convert_to_tensor(inputs)))

    def _queries(self, x, mask=None, training=None):
        """Returns both halves of the queries `[batch, length, 2, heads, half]`."""
        refusals.tokens_shape(self, x.shape, self.dim)
        query = self.query_dense(self.dropout_layer(x, training=training))
        if self.query_norm == "batch":
            query = self.norm(query, training=training, mask=mask)
        batch, length = ops.shape(x)[:2]
        shape = (batch, length, 2, self.num_heads, self.key_dim // 2)
        query = ops.reshape(query, shape)
        return self.norm(query) if self.query_norm == "layer" else query

    def _best(self, query):
        """Returns the best scores of each query, and the numbers of their values."""
        keys = ops.cast(ops.convert_to_tensor(self.keys), query.dtype)
        scores = ops.einsum("blphd,phnd->blphn", query, keys)
        scores, halves = ops.top_k(ops.cast(scores, "float32"), self.top_k)
        halves = ops.cast(halves, "int32")
        # The best sums have halves that are among the best themselves.
        scores = _sums(scores)
        numbers = _sums(halves, self.num_keys)
        shape = (*ops.shape(scores)[:3], self.top_k**2)
        scores, places = ops.top_k(ops.reshape(scores, shape), self.top_k)
        numbers = ops.take_along_axis(ops.reshape(numbers, shape), places, axis=-1)
        return scores, numbers

    def compute_output_shape(self, inputs_shape):
        return (*inputs_shape[:-1], self.value_dim or inputs_shape[-1])


def _sums(halves, factor=1):
    """Adds all pairs of halves; unstacks, as OpenVINO is wrong about such slices."""
    first, second = ops.unstack(halves, 2, axis=2)
    return ops.expand_dims(first * factor, -1) + ops.expand_dims(second, -2)


def _in_a_model(place, dropout, **options):
    """A memory in one block in the middle, as in the paper."""
    if place.index != place.num_blocks // 2:
        return None
    return ProductKeyMemory(input_dropout=dropout, **options)


FEED_FORWARDS = {"product_key_memory": _in_a_model}
