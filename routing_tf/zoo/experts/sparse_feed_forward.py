"""A feed-forward network of which each token uses one hidden unit in each block."""

import keras
from keras import ops

from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.tensors import place_of_largest
from routing_tf.layers.support.validation import check_not_negative
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate
from routing_tf.layers.support.validation import check_seed
from routing_tf.layers.support.validation import initializer
from routing_tf.zoo.parts import refusals

__all__ = ["SparseFeedForward"]


@keras.saving.register_keras_serializable("routing_tf")
class SparseFeedForward(ConfiguredLayer):
    """A feed-forward network in which a controller chooses one hidden unit per block.

    The hidden units are divided into blocks. For each token the controller, two linear
    maps with a bottleneck between them, gives every unit a logit, and the unit with the
    largest one in its block keeps its value; all others are zero. So of both kernels, a
    token needs `1 / block_size`. A call with a single token, as in decoding, reads only
    the rows of the chosen units; calls with more compute all units and mask them, with
    the same result.

    In training the choice follows the authors' code. In a step, with a probability of
    `hard_probability`, one unit of each block is chosen by its log probability plus
    `temperature` times Gumbel noise, and gradients pass to the softmax over the logits
    of the block as if it had been used (straight through). In all other steps units are
    multiplied by this softmax. Decoding reads few weights; training saves nothing.

    Tokens do not see each other, so the layer is causal and needs no cache.

    Args:
        intermediate_dim: number of hidden units, a multiple of `block_size`.
        block_size: number of units of which one is chosen. Defaults to 32.
        controller_dim: size between the two maps of the controller. Defaults to 64.
        temperature: factor of the Gumbel noise; 0.0 for none. Defaults to 0.1.
        hard_probability: probability that a step of training chooses, in [0, 1].
            Defaults to 0.3.
        dropout: rate of dropped hidden units, in [0, 1). Defaults to 0.0.
        kernel_initializer: initializer of all kernels. Defaults to `"glorot_uniform"`.
        seed: integer, for noise and dropout; None (the default) for another one each
            time.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`. Logits
            are compared in float32 under every policy.

    Call arguments:
        inputs: `<float>[batch, length, dim]`.
        training: whether units are chosen as in training, and dropout is on.

    Returns:
        `<float>[batch, length, dim]`.

    Raises:
        ValueError: if `block_size` does not divide `intermediate_dim`.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    feed_forward = zoo.SparseFeedForward(64, block_size=8, controller_dim=4)
    block = layers.TransformerBlock(
        layers.MixedAttention([layers.RoutedHeads(2, 3, 8)], key_dim=8), feed_forward
    )
    x = np.random.default_rng(0).normal(size=(2, 24, 16)).astype("float32")
    assert block(x).shape == (2, 24, 16)
    assert feed_forward.choose(x).shape == (2, 24, 8)
    ```

    Reference: Jaszczur et al., "Sparse is Enough in Scaling Transformers"
    (https://arxiv.org/abs/2111.12763), section 3.1; `SparseFF` of the package trax.
    Tested only against NumPy code of this repository.
    """

    intermediate_dim = Argument(check_positive_integer)
    block_size = Argument(check_positive_integer)
    controller_dim = Argument(check_positive_integer)
    temperature = Argument(check_not_negative)
    hard_probability = Argument(check_not_negative)
    dropout = Argument(check_rate)
    kernel_initializer = Argument(initializer)
    seed = Argument(check_seed)

    def __init__(
        self,
        intermediate_dim,
        block_size=32,
        controller_dim=64,
        temperature=0.1,
        hard_probability=0.3,
        dropout=0.0,
        kernel_initializer="glorot_uniform",
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.intermediate_dim = intermediate_dim
        self.block_size = block_size
        self.controller_dim = controller_dim
        self.temperature = temperature
        self.hard_probability = hard_probability
        self.dropout = dropout
        self.kernel_initializer = kernel_initializer
        self.seed = seed
        if self.intermediate_dim % self.block_size:
            raise ValueError(
                "`block_size` must divide `intermediate_dim`. Received: "
                f"block_size={block_size}, intermediate_dim={intermediate_dim}"
            )
        if self.hard_probability > 1:
            raise ValueError(
                "`hard_probability` must be at most 1. Received: "
                f"hard_probability={hard_probability}"
            )
        self.num_blocks = self.intermediate_dim // self.block_size
        self.seed_generator = keras.random.SeedGenerator(self.seed)
        self.dropout_layer = keras.layers.Dropout(
            dropout, seed=self.seed, dtype=self.dtype_policy
        )
        self.bottleneck = self._dense("bottleneck", self.controller_dim, use_bias=False)
        self.controller = self._dense("controller", self.intermediate_dim)

    def _dense(self, name, units, **options):
        return keras.layers.Dense(
            units,
            kernel_initializer=cloned(self.kernel_initializer),
            name=name,
            dtype=self.dtype_policy,
            **options,
        )

    def build(self, inputs_shape):
        refusals.tokens_shape(self, inputs_shape)
        self.dim = dim = inputs_shape[-1]
        self.bottleneck.build(inputs_shape)
        self.controller.build((None, None, self.controller_dim))
        # Both kernels have a row for each unit.
        shape, first = (self.intermediate_dim, dim), self.kernel_initializer
        self.input_kernel = self._add_weight("input_kernel", shape, cloned(first))
        self.output_kernel = self._add_weight("output_kernel", shape, cloned(first))
        self.input_bias = self._add_weight(
            "input_bias", (self.intermediate_dim,), "zeros"
        )
        self.output_bias = self._add_weight("output_bias", (dim,), "zeros")

    def _add_weight(self, name, shape, initializer):
        # A cast before the rows are chosen would read all of them.
        return self.add_weight(
            name=name, shape=shape, initializer=initializer, autocast=False
        )

    def call(self, inputs, training=None):
        refusals.tokens_shape(self, inputs.shape, self.dim)
        logits = self._logits(inputs)
        if inputs.shape[1] == 1 and not training:
            return self._from_chosen_rows(inputs, place_of_largest(logits))
        kernel, bias = self._values(self.input_kernel), self._values(self.input_bias)
        hidden = ops.relu(ops.matmul(inputs, ops.transpose(kernel)) + bias)
        weights = self._weights(logits, training)
        weights = ops.reshape(weights, ops.shape(hidden))
        hidden = hidden * ops.cast(weights, hidden.dtype)
        hidden = self.dropout_layer(hidden, training=training)
        output = ops.matmul(hidden, self._values(self.output_kernel))
        return output + self._values(self.output_bias)

    def choose(self, inputs):
        """Returns which unit of each block a token uses, not in training.

        They are numbers within a block, `<int32>[batch, length, blocks]`.
        """
        refusals.check_built(self, "choose")
        inputs = ops.convert_to_tensor(inputs)
        refusals.tokens_shape(self, inputs.shape, self.dim)
        logits = self._logits(inputs)
        return place_of_largest(logits)

    def _logits(self, x):
        """Returns `<float32>[batch, length, blocks, units of a block]`."""
        logits = ops.cast(self.controller(self.bottleneck(x)), "float32")
        batch, length = ops.shape(x)[:2]
        return ops.reshape(logits, (batch, length, self.num_blocks, self.block_size))

    def _weights(self, logits, training):
        """Returns what the units of a block are multiplied by, as `logits`."""
        if not training:
            return ops.one_hot(place_of_largest(logits), self.block_size)
        soft = ops.softmax(logits, axis=-1)
        noise = keras.random.uniform(
            ops.shape(logits), 1e-6, 1 - 1e-6, "float32", seed=self.seed_generator
        )
        noise = -self.temperature * ops.log(-ops.log(noise))
        chosen = place_of_largest(ops.log_softmax(logits, axis=-1) + noise)
        hard = ops.one_hot(chosen, self.block_size, dtype="float32")
        hard = soft + ops.stop_gradient(hard - soft)
        drawn = keras.random.uniform((), dtype="float32", seed=self.seed_generator)
        return ops.where(drawn < self.hard_probability, hard, soft)

    def _from_chosen_rows(self, x, chosen):
        """Returns what the chosen units alone make of one token of each sequence.

        Args:
            x: `<float>[batch, 1, dim]`.
            chosen: `<int32>[batch, 1, blocks]`.
        """
        starts = self.block_size * ops.arange(self.num_blocks, dtype="int32")
        rows = (chosen + starts)[:, 0]
        kernel, bias, output_kernel = (
            ops.cast(ops.take(weight, rows, axis=0), x.dtype)
            for weight in (self.input_kernel, self.input_bias, self.output_kernel)
        )
        hidden = ops.relu(ops.einsum("bd,bud->bu", x[:, 0], kernel) + bias)
        output = ops.einsum("bu,bud->bd", hidden, output_kernel)
        return (output + self._values(self.output_bias))[:, None]

    def _values(self, weight):
        return ops.cast(ops.convert_to_tensor(weight), self.compute_dtype)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


def _in_a_model(place, **options):
    return SparseFeedForward(place.intermediate_dim, **options)


FEED_FORWARDS = {"sparse_feed_forward": _in_a_model}
