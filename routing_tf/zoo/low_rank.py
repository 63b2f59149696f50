"""Attention weights of low rank: Linformer and Nyström attention."""

import keras
import numpy as np
from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers.softmax.softmax_attention import softmax
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.masks import without_padding
from routing_tf.layers.support.tensors import break_into_blocks
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import initializer
from routing_tf.layers.support.validation import static_length
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.pattern import Pattern

__all__ = ["LinformerHeads", "NystromHeads"]


SHARING = (None, "heads", "all")
NO_PLACES = "the keys of these heads are mixtures of all tokens, without a place"

LANDMARKS = "landmarks are means over tokens of the whole sequence"
HIDDEN = -1e30


@keras.saving.register_keras_serializable("routing_tf")
class LinformerHeads(HeadGroup):
    """Heads whose queries see a fixed number of mixtures of all keys and values.

    The output is `softmax(Q (E K)^T) (F V)`, where the learned matrices E and F mix up
    to `max_length` tokens, by their places, to `num_projected` ones. Work and memory
    are linear in the length. Because a mixture contains tokens of all places, the rule
    has no causal form.

    Args:
        num_heads: number of heads in the group.
        max_length: largest number of tokens of a sequence that is attended to.
        num_projected: number of mixtures. Defaults to 256.
        sharing: which heads of the group have the same mixtures: `"heads"` (the
            default) for one E and one F for all heads, `"all"` for one matrix that is
            both E and F, None for a separate E and F of each head.
        projection_initializer: initializer of E and F; None (the default) for normal
            numbers of variance `1 / num_projected`.
        **kwargs: arguments of `HeadGroup`, without `max_relative_position`,
            `key_shift` and `token_bias_weight`: mixtures have no place and no bias.

    Call arguments and Returns: as in `HeadGroup`. Mixtures leave out tokens that a mask
    hides.

    Raises:
        ValueError: if an argument has no meaning; when called, with a causal mask or a
            token bias, or if the length is larger than `max_length`, or unknown while
            TensorFlow traces the call.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.LinformerHeads(2, max_length=16, num_projected=4)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16))).shape == (1, 10, 16)
    ```

    Reference: Wang et al., "Linformer: Self-Attention with Linear Complexity"
    (https://arxiv.org/abs/2006.04768), section 4, equation 7.
    """

    compares_by_products = True

    max_length = Argument(check_positive_integer)
    num_projected = Argument(check_positive_integer)
    sharing = Argument(check_choice, SHARING)
    projection_initializer = Argument(initializer)

    def __init__(
        self,
        num_heads,
        max_length,
        num_projected=256,
        sharing="heads",
        projection_initializer=None,
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        refusals.refuse_arguments(
            self, NO_PLACES, "max_relative_position", "key_shift", "token_bias_weight"
        )
        self.max_length = max_length
        self.num_projected = num_projected
        self.sharing = sharing
        self.projection_initializer = projection_initializer

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        self.key_projection = self._projection("key_projection")
        self.value_projection = self.key_projection
        if self.sharing != "all":
            self.value_projection = self._projection("value_projection")

    def prepared(self, inputs):
        refusals.refuse_causal_mask(inputs, NO_PLACES)
        refusals.refuse_bias(inputs, NO_PLACES)
        return super().prepared(inputs)

    def attend(self, inputs, training=None):
        return self.dot_product(
            inputs.query, *self._mixtures(inputs), training=training
        )

    def make_cache(self, batch_size, max_length, positions=None):
        refusals.refuse_cache(self, NO_PLACES)

    def make_memory(self, inputs, max_length):
        key, value = self._mixtures(inputs)
        return {"key": key, "value": value}

    def read_memory(self, cache, index, inputs):
        output = self.dot_product(
            inputs.query, cache["key"], cache["value"], training=False
        )
        return output, cache

    def _projection(self, name):
        """Makes a matrix that mixes tokens."""
        shape = (self.max_length, self.num_projected)
        initial = cloned(self.projection_initializer)
        if initial is None:
            initial = keras.initializers.RandomNormal(stddev=self.num_projected**-0.5)
        return self.add_weight(
            name=name,
            shape=shape if self.sharing else (self.num_heads, *shape),
            initializer=initial,
        )

    def _mixtures(self, inputs):
        """Returns the mixtures of keys and those of values."""
        name = "value" if inputs.is_cross_attention else "query"
        length = static_length(name, inputs.value, axis=2)
        if length > self.max_length:
            raise ValueError(
                "`max_length` must be at least the length of the sequence that is "
                f"attended to. Received: max_length={self.max_length} with a sequence "
                f"of {length} tokens. Shorten the sequence, or make heads with a "
                "larger `max_length`"
            )
        mixtures = []
        for projection, x in (
            (self.key_projection, inputs.key),
            (self.value_projection, inputs.value),
        ):
            x = without_padding(x, inputs.value_mask)
            weights = ops.swapaxes(projection[..., :length, :], -1, -2)
            mixtures.append(product(weights, x))
        return mixtures


def _linformer(sizes):
    return {"max_length": sizes.max_length, "num_projected": sizes.attention_window}


@keras.saving.register_keras_serializable("routing_tf")
class NystromHeads(HeadGroup):
    """Heads that estimate full attention from landmarks, means of queries and keys.

    With `K'` and `Q'`, the means of the keys and queries in each of `num_landmarks`
    segments, the output is `softmax(Q K'^T) Z softmax(Q' K^T) V`, plus a convolution of
    the values; Z is the pseudo-inverse of `softmax(Q' K'^T)`, computed by iterations.
    Work and memory are linear in the length. Because landmarks contain tokens of all
    places, the rule has no causal form.

    Segments contain only real tokens and are as even as possible; if there are at most
    as many tokens as landmarks, each token is a segment. Everything is computed in
    float32.

    Args:
        num_heads: number of heads in the group.
        num_landmarks: number of landmarks. Defaults to 64.
        num_iterations: number of iterations of the pseudo-inverse. Defaults to 6.
        convolution_size: odd number of places, centred at the query, over which values
            are summed with weights of each head; None for no convolution. Defaults
            to 33.
        **kwargs: arguments of `HeadGroup`, without `max_relative_position`,
            `key_shift`, `token_bias_weight` and `dropout`: landmarks have no place and
            no bias, and weights of pairs are never built.

    Call arguments and Returns: as in `HeadGroup`.

    Raises:
        ValueError: if `convolution_size` is even, or an argument has no meaning; when
            called, with a causal mask, a token bias or another sequence as value.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.NystromHeads(2, num_landmarks=4, convolution_size=3)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16))).shape == (1, 10, 16)
    ```

    Reference: Xiong et al., "Nyströmformer: A Nyström-Based Algorithm for Approximating
    Self-Attention" (https://arxiv.org/abs/2102.03902), sections 3.1 and 3.2, equations
    11 to 14. The iterations start from the norms of each matrix, as in the paper. Its
    code uses the largest norm of a batch, so one sequence depends on the others.
    """

    num_landmarks = Argument(check_positive_integer)
    num_iterations = Argument(check_positive_integer)

    def __init__(
        self,
        num_heads,
        num_landmarks=64,
        num_iterations=6,
        convolution_size=33,
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        refusals.refuse_arguments(
            self, LANDMARKS, "max_relative_position", "key_shift", "token_bias_weight"
        )
        refusals.refuse_arguments(self, refusals.NO_WEIGHTS, "dropout")
        self.num_landmarks = num_landmarks
        self.num_iterations = num_iterations
        size = check_optional_integer("convolution_size", convolution_size)
        if size is not None and size % 2 == 0:
            raise ValueError(
                "`convolution_size` must be odd, with a place in the middle. "
                f"Received: convolution_size={size}. Add 1"
            )
        self.convolution_size = size

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        if self.convolution_size is not None:
            self.convolution_kernel = self.add_weight(
                name="convolution_kernel",
                shape=(self.convolution_size, self.num_heads, 1),
                initializer="glorot_uniform",
                dtype="float32",
                autocast=False,
            )

    def prepared(self, inputs):
        refusals.refuse_causal_mask(inputs, LANDMARKS)
        refusals.refuse_bias(inputs, LANDMARKS)
        refusals.refuse_another_sequence(
            inputs, "its tokens are in no segments of queries"
        )
        return super().prepared(inputs)

    def attend(self, inputs, training=None):
        query, key, value = (
            ops.cast(x, "float32") for x in (inputs.query, inputs.key, inputs.value)
        )
        mask, query_mask = inputs.value_mask, inputs.query_mask
        if mask is not None:
            value = ops.where(mask[..., None], value, 0.0)
        query_mask = mask if query_mask is None else query_mask
        landmarks, is_landmark = self._landmarks(query, query_mask)
        key_landmarks, is_key_landmark = self._landmarks(key, mask)
        of_landmarks = ops.matmul(_weights(landmarks, key, mask), value)
        middle = _weights(landmarks, key_landmarks, is_key_landmark)
        if is_landmark is not None:
            middle = ops.where(is_landmark[..., None], middle, 0.0)
        inverse = _pseudo_inverse(middle, self.num_iterations)
        output = ops.matmul(
            _weights(query, key_landmarks, is_key_landmark),
            ops.matmul(inverse, of_landmarks),
        )
        if self.convolution_size is not None:
            output = output + self._convolved(value)
        return ops.cast(output, self.compute_dtype)

    def make_cache(self, batch_size, max_length, positions=None):
        refusals.refuse_cache(self, LANDMARKS)

    def _landmarks(self, tokens, mask):
        """Returns means of tokens, and which of them exist; None if all do.

        From `<float32>[batch, heads, length, dim]` to `[batch, heads, landmarks, dim]`
        and `<bool>[batch, 1, landmarks]`.
        """
        length, number = length_of(tokens, 2), self.num_landmarks
        if mask is None and is_known(length) and length % number == 0:
            segments = break_into_blocks(tokens, length // number, axis=2)
            return ops.mean(segments, axis=3), None
        if mask is None:
            ranks, count = numbers(length)[None, None], length
        else:
            ones = ops.cast(mask, "int32")
            ranks = ops.cumsum(ones, axis=-1) - 1
            count = ops.sum(ones, axis=-1, keepdims=True)
        # If there are fewer tokens than landmarks, each is one.
        count = ops.maximum(ops.convert_to_tensor(count, "int32"), number)
        of_token = (ranks * number) // count
        belongs = of_token[..., None, :] == numbers(number)[:, None]
        if mask is not None:
            belongs = ops.logical_and(belongs, mask[..., None, :])
        belongs = ops.cast(belongs, "float32")
        sizes = ops.sum(belongs, axis=-1)
        means = product(belongs, tokens) / ops.maximum(sizes, 1.0)[..., None]
        return means, sizes > 0

    def _convolved(self, value):
        """Returns `<float32>[batch, heads, length, dim]`, summed over places."""
        batch, heads, length, dim = ops.shape(value)
        value = ops.reshape(
            ops.transpose(value, (0, 3, 2, 1)), (batch * dim, length, heads)
        )
        value = ops.depthwise_conv(
            value,
            ops.convert_to_tensor(self.convolution_kernel),
            padding="same",
            data_format="channels_last",
        )
        value = ops.reshape(value, (batch, dim, length, heads))
        return ops.transpose(value, (0, 3, 2, 1))


def _weights(query, key, mask):
    """Returns the softmax over keys that `mask` `[batch, 1, keys]` or None shows."""
    logits = ops.matmul(query, ops.swapaxes(key, -1, -2))
    if mask is not None:
        logits = ops.where(mask[..., None, :], logits, HIDDEN)
    return softmax(logits)


def _pseudo_inverse(x, num_iterations):
    """Approximates the Moore-Penrose inverse of `<float32>[..., size, size]`."""
    sizes = ops.abs(x)
    scale = tensors.largest(ops.sum(sizes, axis=-1), axis=-1)
    scale = scale * tensors.largest(ops.sum(sizes, axis=-2), axis=-1)
    # Zero where there is no token, and no inverse.
    scale = ops.where(scale > 0, scale, 1.0)
    inverse = ops.swapaxes(x, -1, -2) / scale[..., None, None]
    identity = ops.convert_to_tensor(np.eye(x.shape[-1], dtype="float32"))
    for _ in range(num_iterations):
        product = ops.matmul(x, inverse)
        inner = 15 * identity - ops.matmul(product, 7 * identity - product)
        inner = 13 * identity - ops.matmul(product, inner)
        inverse = 0.25 * ops.matmul(inverse, inner)
    return inverse


def _nystrom(sizes):
    return {"num_landmarks": sizes.attention_window}


PATTERNS = {
    "linformer": Pattern(
        LinformerHeads,
        _linformer,
        has_relative_positions=False,
        of_decoders=False,
        refuses=("entmax_alpha", "key_shift"),
    ),
    "nystrom": Pattern(
        NystromHeads,
        _nystrom,
        has_relative_positions=False,
        of_decoders=False,
        refuses=("entmax_alpha", "dropout", "key_shift"),
    ),
}
