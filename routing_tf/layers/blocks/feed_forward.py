"""The feed-forward part of a transformer block."""

import keras
from keras import ops

from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate
from routing_tf.layers.support.validation import initializer

ACTIVATIONS = ("geglu", "relu", "sigmoid_gelu")
# x * sigmoid(1.702 x) is close to the GELU.
SIGMOID_GELU_SLOPE = 1.702


@keras.saving.register_keras_serializable("routing_tf")
class FeedForward(ConfiguredLayer):
    """Two linear maps with a non-linearity in between, applied token by token.

    `"geglu"` gates one projection with the GELU (tanh form) of another and has no
    biases; `"relu"` is the original form, with biases; `"sigmoid_gelu"` also has
    biases, and uses x * sigmoid(1.702 x), which is close to the GELU.

    Args:
        intermediate_dim: size between the two maps.
        activation: `"geglu"`, `"relu"` or `"sigmoid_gelu"`. Defaults to `"geglu"`.
        dropout: rate of dropped intermediate values, in [0, 1). Defaults to 0.0.
        kernel_initializer: initializer of the kernels. Defaults to
            `"glorot_uniform"`.
        output_initializer: initializer of the last kernel; None (the default) for
            `kernel_initializer`.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        inputs: `<float>[batch, length, dim]`.
        training: whether dropout is on.

    Returns:
        `<float>[batch, length, dim]`.

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import FeedForward

    assert FeedForward(64)(np.ones((2, 5, 16))).shape == (2, 5, 16)
    ```

    Reference: Shazeer, "GLU Variants Improve Transformer"
    (https://arxiv.org/abs/2002.05202); `geglu` and `dense_relu_dense` of the release;
    for `"sigmoid_gelu"` Hendrycks and Gimpel, "Gaussian Error Linear Units"
    (https://arxiv.org/abs/1606.08415), and Child et al. (2019), section 5.3.
    """

    intermediate_dim = Argument(check_positive_integer)
    dropout = Argument(check_rate)
    kernel_initializer = Argument(initializer)
    output_initializer = Argument(initializer)

    def __init__(
        self,
        intermediate_dim,
        activation="geglu",
        dropout=0.0,
        kernel_initializer="glorot_uniform",
        output_initializer=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_choice("activation", activation, ACTIVATIONS)
        self.supports_masking = True
        self.intermediate_dim = intermediate_dim
        # In a call, `keras.RematScope` puts a function in place of `activation`.
        self.activation = self._activation = activation
        self.dropout = dropout
        self.kernel_initializer = kernel_initializer
        self.output_initializer = output_initializer
        self.dropout_layer = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, inputs_shape):
        dim = inputs_shape[-1]
        self.input_dense = self._dense("input", self.intermediate_dim, dim)
        if self.activation == "geglu":
            self.gate_dense = self._dense("gate", self.intermediate_dim, dim)
        self.output_dense = self._dense(
            "output", dim, self.intermediate_dim, self.output_initializer
        )

    def _dense(self, name, units, input_dim, initializer=None):
        dense = keras.layers.Dense(
            units,
            use_bias=self.activation != "geglu",
            kernel_initializer=cloned(initializer or self.kernel_initializer),
            name=name,
            dtype=self.dtype_policy,
        )
        dense.build((None, None, input_dim))
        return dense

    def call(self, inputs, training=None):
        hidden = self.input_dense(inputs)
        if self._activation == "geglu":
            hidden = ops.gelu(hidden, approximate=True) * self.gate_dense(inputs)
        elif self._activation == "relu":
            hidden = ops.relu(hidden)
        else:
            hidden = hidden * ops.sigmoid(SIGMOID_GELU_SLOPE * hidden)
        return self.output_dense(self.dropout_layer(hidden, training=training))

    def compute_output_shape(self, inputs_shape):
        return inputs_shape
