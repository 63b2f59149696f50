"""Learned queries of the heads of a group, and a norm of all of them together."""

from keras import ops

from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import cloned

EPSILON = 1e-5


def add_weight(group, name, number, dim, initializer):
    """Makes vectors of each head, `number` of them of `dim` numbers."""
    # With one axis for all heads, its initializer knows the number of vectors.
    return group.add_weight(
        name=name,
        shape=(number, group.num_heads * dim),
        initializer=cloned(initializer),
    )


def of_heads(group, weight, dtype):
    """Returns the vectors of a weight as `[1, heads, number, dim]`."""
    number, size = weight.shape
    weight = ops.cast(ops.convert_to_tensor(weight), dtype)
    weight = ops.reshape(weight, (number, group.num_heads, size // group.num_heads))
    return ops.transpose(weight, (1, 0, 2))[None]


def attend(group, weight, inputs, value, training):
    """Attends with the learned queries of a weight to the tokens of a sequence.

    `value` is `<float>[batch, heads, length, columns]`. Returns `[batch, heads, number,
    columns]`.
    """
    key = inputs.key
    query = of_heads(group, weight, key.dtype) * group.key_dim**-0.5
    query = ops.broadcast_to(query, (ops.shape(key)[0], *ops.shape(query)[1:]))
    mask, bias = (
        None if x is None else x[:, :, None]
        for x in (inputs.value_mask, inputs.token_bias)
    )
    return group.dot_product(
        query, key, value, attention_mask=mask, bias=bias, training=training
    )


class HeadNorm(ConfiguredLayer):
    """Normalizes the numbers of a token in all heads of a group, in float32.

    The same as layer normalization of vectors before they are split over heads, with a
    scale and an offset for each number.

    Args:
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        x: `<float>[batch, heads, ..., dim]`.

    Returns:
        A tensor of the same shape.
    """

    def build(self, shape):
        # Heads and numbers, with axes between them.
        shape = (shape[1], shape[-1])
        # The names of Keras, by which weight decay excludes normalization.
        self.gamma = self.add_weight(name="gamma", shape=shape, initializer="ones")
        self.beta = self.add_weight(name="beta", shape=shape, initializer="zeros")

    def call(self, x):
        exact = ops.cast(x, "float32")
        mean = ops.mean(exact, axis=(1, -1), keepdims=True)
        exact = exact - mean
        variance = ops.mean(ops.square(exact), axis=(1, -1), keepdims=True)
        exact = exact * ops.rsqrt(variance + EPSILON)
        heads, dim = self.gamma.shape
        shape = (heads, *[1] * (len(x.shape) - 3), dim)
        gamma, beta = (
            ops.reshape(ops.cast(ops.convert_to_tensor(weight), "float32"), shape)
            for weight in (self.gamma, self.beta)
        )
        return ops.cast(exact * gamma + beta, x.dtype)
