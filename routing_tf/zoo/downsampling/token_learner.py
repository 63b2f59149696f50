"""A few tokens made of many by learned maps, and the way back to the many."""

import keras
from keras import ops

from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate
from routing_tf.layers.support.validation import check_seed
from routing_tf.zoo.parts import refusals

__all__ = ["TokenFuser", "TokenLearner"]

NORMALIZATIONS = ("softmax", "sigmoid")


@keras.saving.register_keras_serializable("routing_tf")
class TokenLearner(ConfiguredLayer):
    """Makes a fixed number of tokens, each a weighted mean of all inputs.

    Weights of the inputs, one map for each token, come from a network with one hidden
    layer that reads each normalised input by itself. So layers that follow work on
    `num_tokens` tokens, however many patches an image or frames a video has. It is not
    causal: every token reads all inputs.

    Args:
        num_tokens: number of tokens that are made. Defaults to 8.
        bottleneck_dim: number of hidden units of the network. Defaults to 64.
        normalization: `"softmax"` (the default): the weights of a token add up to 1
            (version 1.1 of the authors' code); `"sigmoid"`: each weight is between 0
            and 1, and their sum is divided by the number of inputs (the paper).
        dropout: rate of dropped hidden units while training, in [0, 1). Defaults to
            0.0.
        seed: integer seed of the dropout; None (the default) for a random one.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        inputs: `<float>[batch, length, dim]`.
        mask: `<bool>[batch, length]`, True for real inputs; None (the default) for no
            padding. Padding has no weight.
        training: whether dropout is on.

    Returns:
        `<float>[batch, num_tokens, dim]`, zero if all inputs are padding.

    Example:

    ```python
    import numpy as np
    from routing_tf import zoo

    patches = np.random.default_rng(0).normal(size=(2, 196, 32)).astype("float32")
    tokens = zoo.TokenLearner(num_tokens=8)(patches)
    assert tokens.shape == (2, 8, 32)
    assert zoo.TokenFuser()(tokens, patches).shape == (2, 196, 32)
    ```

    Reference: Ryoo et al., "TokenLearner: What Can 8 Learned Tokens Do for Images and
    Videos?" (https://arxiv.org/abs/2106.11297). Tested only against NumPy code of this
    repository.
    """

    num_tokens = Argument(check_positive_integer)
    bottleneck_dim = Argument(check_positive_integer)
    normalization = Argument(check_choice, NORMALIZATIONS)
    dropout = Argument(check_rate)
    seed = Argument(check_seed)

    def __init__(
        self,
        num_tokens=8,
        bottleneck_dim=64,
        normalization="softmax",
        dropout=0.0,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_tokens = num_tokens
        self.bottleneck_dim = bottleneck_dim
        self.normalization = normalization
        self.dropout = dropout
        self.seed = seed
        own = {"dtype": self.dtype_policy}
        self.norm = keras.layers.LayerNormalization(name="norm", **own)
        self.hidden_dense = keras.layers.Dense(
            self.bottleneck_dim, activation="gelu", name="hidden", **own
        )
        self.dropout_layer = keras.layers.Dropout(dropout, seed=self.seed, **own)
        self.map_dense = keras.layers.Dense(self.num_tokens, name="maps", **own)

    def build(self, inputs_shape):
        refusals.tokens_shape(self, inputs_shape)
        self.norm.build(inputs_shape)
        self.hidden_dense.build(inputs_shape)
        self.map_dense.build((*inputs_shape[:-1], self.bottleneck_dim))

    def call(self, inputs, mask=None, training=None):
        refusals.tokens_shape(self, inputs.shape)
        weights = self.maps(inputs, mask, training)
        return ops.matmul(ops.cast(weights, inputs.dtype), inputs)

    def maps(self, inputs, mask=None, training=None):
        """Returns the weights of the inputs, `<float32>[batch, num_tokens, length]`.

        Args:
            inputs: as in a call.
            mask: as in a call.
            training: as in a call.
        """
        hidden = self.hidden_dense(self.norm(inputs))
        logits = self.map_dense(self.dropout_layer(hidden, training=training))
        logits = ops.transpose(ops.cast(logits, "float32"), (0, 2, 1))
        real = ops.ones_like(logits[:, :1])
        if mask is not None:
            real = ops.cast(mask, "float32")[:, None]
        if self.normalization == "sigmoid":
            number = ops.maximum(ops.sum(real, axis=-1, keepdims=True), 1.0)
            return ops.sigmoid(logits) * real / number
        # Padding is far below all others, and is nothing even where it is alone.
        return ops.softmax(logits - 1e9 * (1.0 - real), axis=-1) * real

    def compute_mask(self, inputs, mask=None):
        return None

    def compute_output_shape(self, inputs_shape):
        return (inputs_shape[0], self.num_tokens, inputs_shape[-1])


@keras.saving.register_keras_serializable("routing_tf")
class TokenFuser(ConfiguredLayer):
    """Brings a few tokens back to the positions that they were made of.

    The tokens are mixed with each other by one matrix, and each position takes a sum of
    them, weighted by numbers between 0 and 1 that come from its own input. It is not
    causal if the tokens are not.

    Args:
        dropout: rate of dropped outputs while training, in [0, 1). Defaults to 0.0.
        seed: integer seed of the dropout; None (the default) for a random one.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        tokens: `<float>[batch, num_tokens, dim]`, as `TokenLearner` made them and other
            layers have changed them.
        inputs: `<float>[batch, length, size]`, what they were made of.
        training: whether dropout is on.

    Returns:
        `<float>[batch, length, dim]`, to be added to `inputs`, without a mask.

    Raises:
        ValueError: when called, if the number of tokens is unknown.

    Example: see `TokenLearner`.

    Reference: Ryoo et al. (https://arxiv.org/abs/2106.11297). Tested only against NumPy
    code of this repository.
    """

    dropout = Argument(check_rate)
    seed = Argument(check_seed)

    def __init__(self, dropout=0.0, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.dropout = dropout
        self.seed = seed
        own = {"dtype": self.dtype_policy}
        self.token_norm = keras.layers.LayerNormalization(name="token_norm", **own)
        self.mixed_norm = keras.layers.LayerNormalization(name="mixed_norm", **own)
        self.dropout_layer = keras.layers.Dropout(dropout, seed=self.seed, **own)

    def build(self, tokens_shape, inputs_shape):
        refusals.tokens_shape(self, tokens_shape)
        refusals.tokens_shape(self, inputs_shape)
        number = tokens_shape[1]
        if number is None:
            raise ValueError(
                "`tokens` must be of a known number. Received: "
                f"shape={tuple(tokens_shape)}. Make them with `TokenLearner`"
            )
        self.mixing_kernel = self.add_weight(
            name="mixing_kernel", shape=(number, number)
        )
        self.weight_dense = keras.layers.Dense(
            number, activation="sigmoid", name="weights", dtype=self.dtype_policy
        )
        self.weight_dense.build(inputs_shape)
        self.token_norm.build(tokens_shape)
        self.mixed_norm.build(tokens_shape)

    def call(self, tokens, inputs, training=None):
        tokens = self.token_norm(tokens)
        kernel = ops.cast(self.mixing_kernel, tokens.dtype)
        mixed = self.mixed_norm(ops.einsum("bsd,st->btd", tokens, kernel))
        outputs = ops.matmul(self.weight_dense(inputs), mixed)
        return self.dropout_layer(outputs, training=training)

    def compute_mask(self, tokens, mask=None):
        return None

    def compute_output_shape(self, tokens_shape, inputs_shape):
        return (*inputs_shape[:2], tokens_shape[-1])
