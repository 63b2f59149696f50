"""Linformer attention: queries see learned mixtures of all keys."""

import keras
from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.masks import without_padding
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import initializer
from routing_tf.layers.support.validation import static_length
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.pattern import Pattern

__all__ = ["LinformerHeads"]

SHARING = (None, "heads", "all")
NO_PLACES = "the keys of these heads are mixtures of all tokens, without a place"


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


def _settings(sizes):
    return {"max_length": sizes.max_length, "num_projected": sizes.attention_window}


PATTERNS = {
    "linformer": Pattern(
        LinformerHeads,
        _settings,
        has_relative_positions=False,
        of_decoders=False,
        refuses=("entmax_alpha", "key_shift"),
    )
}
