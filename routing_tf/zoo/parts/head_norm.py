"""Layer normalization of all heads of a group together."""

from keras import ops

from routing_tf.layers.support.serialization import ConfiguredLayer

EPSILON = 1e-5


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
