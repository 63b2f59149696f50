"""Layer normalization whose gradient needs less memory."""

import keras
from keras import ops

from routing_tf.layers.support.backends import stated_gradient
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of

# Number of rows that TensorFlow sums up fast on a CPU.
ROWS_AT_ONCE = 64


class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization` with a gradient of its own.

    The gradient that TensorFlow derives keeps a tensor of the size of the input, and
    takes more passes over it. Arguments and weights are those of Keras' layer, for the
    last axis, with a scale and an offset.

    Call arguments:
        inputs: `<float>[..., dim]`.

    Returns:
        `<float>[..., dim]`.
    """

    def call(self, inputs):
        # Half precision would lose too much.
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        inputs, scale, offset = (
            ops.cast(x, dtype) for x in (inputs, self.gamma, self.beta)
        )
        return ops.cast(self._normalized(inputs, scale, offset), self.compute_dtype)

    def _normalized(self, inputs, scale, offset):
        @stated_gradient
        def normalized(inputs, scale, offset):
            average = _mean(inputs)
            variance = _mean(ops.square(inputs - average))
            slope = ops.rsqrt(variance + self.epsilon)

            def gradient(upstream):
                unit = (inputs - average) * slope
                along = upstream * unit
                of_scale, of_offset = (_sum_of_rows(x) for x in (along, upstream))
                along = unit * _mean(along * scale)
                upstream = upstream * scale
                of_inputs = slope * (upstream - _mean(upstream) - along)
                return of_inputs, of_scale, of_offset

            return (inputs - average) * slope * scale + offset, gradient

        return normalized(inputs, scale, offset)


def _mean(x):
    return ops.mean(x, axis=-1, keepdims=True)


def _sum_of_rows(x):
    """Sums over all axes except the last one."""
    rows = ops.reshape(x, (-1, x.shape[-1]))
    number = length_of(rows, 0)
    if is_known(number) and number % ROWS_AT_ONCE == 0:
        rows = ops.sum(ops.reshape(rows, (-1, ROWS_AT_ONCE, x.shape[-1])), axis=1)
    return ops.sum(rows, axis=0)
