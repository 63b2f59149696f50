"""The feed-forward part of a transformer block."""

import keras
from keras import ops

from routing_tf.layers.initializers import cloned
from routing_tf.layers.serialization import ConfiguredLayer
from routing_tf.layers.validation import check_choice
from routing_tf.layers.validation import check_positive_integer
from routing_tf.layers.validation import check_rate

ACTIVATIONS = ("geglu", "relu")


@keras.saving.register_keras_serializable("routing_tf")
class FeedForward(ConfiguredLayer):
    """Two linear maps with a non-linearity between, applied to each token alone.

    `"geglu"` gates one projection with the GELU (tanh form) of another and has no
    biases; `"relu"` is the original form, with biases.

    Args:
        intermediate_dim: size between the two maps.
        activation: `"geglu"` or `"relu"`. Defaults to `"geglu"`.
        dropout: rate of dropped intermediate values, in [0, 1). Defaults to 0.0.
        kernel_initializer: initializer of the kernels. Defaults to
            `"glorot_uniform"`.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        inputs: `<float>[batch, length, dim]`.
        training: whether dropout is on.

    Returns:
        `<float>[batch, length, dim]`.

    Raises:
        ValueError: if `intermediate_dim` is not a positive integer, `activation` is
            unknown, or `dropout` is not in [0, 1).

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import FeedForward

    assert FeedForward(64)(np.ones((2, 5, 16))).shape == (2, 5, 16)
    ```

    Reference: Shazeer, "GLU Variants Improve Transformer"
    (https://arxiv.org/abs/2002.05202); `geglu` and `dense_relu_dense` of the release.
    """

    def __init__(
        self,
        intermediate_dim,
        activation="geglu",
        dropout=0.0,
        kernel_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_choice("activation", activation, ACTIVATIONS)
        check_rate("dropout", dropout)
        self.supports_masking = True
        self.intermediate_dim = check_positive_integer(
            "intermediate_dim", intermediate_dim
        )
        self.activation = activation
        self.dropout = dropout
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.dropout_layer = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, inputs_shape):
        dim = inputs_shape[-1]
        self.input_dense = self._dense("input", self.intermediate_dim, dim)
        if self.activation == "geglu":
            self.gate_dense = self._dense("gate", self.intermediate_dim, dim)
        self.output_dense = self._dense("output", dim, self.intermediate_dim)

    def _dense(self, name, units, input_dim):
        dense = keras.layers.Dense(
            units,
            use_bias=self.activation == "relu",
            kernel_initializer=cloned(self.kernel_initializer),
            name=name,
            dtype=self.dtype_policy,
        )
        dense.build((None, None, input_dim))
        return dense

    def call(self, inputs, training=None):
        hidden = self.input_dense(inputs)
        if self.activation == "geglu":
            hidden = ops.gelu(hidden, approximate=True) * self.gate_dense(inputs)
        else:
            hidden = ops.relu(hidden)
        return self.output_dense(self.dropout_layer(hidden, training=training))

    def compute_output_shape(self, inputs_shape):
        return inputs_shape
