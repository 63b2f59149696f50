"""Induced attention: tokens read a few learned points, which have read all tokens."""

import keras
from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import initializer
from routing_tf.zoo.parts import learned
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.learned import HeadNorm
from routing_tf.zoo.parts.pattern import Pattern

__all__ = ["InducedHeads"]

ALL_TOKENS = "inducing points have read all tokens of the sequence"


@keras.saving.register_keras_serializable("routing_tf")
class InducedHeads(HeadGroup):
    """Heads whose queries see `num_points` learned points that have read all tokens.

    The inducing points I first attend to the tokens with learned queries, and the
    results pass through a small block over all heads of the group:
    `H = LN(O + relu(O W + b))` with `O = LN(I + attention)`. Queries of tokens then
    attend to keys and values projected from H. Work and memory are linear in the
    length. Because the points have read all tokens, the rule has no causal form.

    This is the attention of an induced set attention block, without the residual and
    the feed-forward layer after it, which belong to the block that contains the layer.
    The paper makes the learned queries from I; here both are learned.

    Args:
        num_heads: number of heads in the group.
        num_points: number of inducing points. Defaults to 32.
        use_layer_norm: whether there are layer normalizations LN, as in the paper; its
            code leaves them out by default. Defaults to True.
        kernel_initializer: initializer of points, queries and kernels. Defaults to
            `"glorot_uniform"`.
        **kwargs: arguments of `HeadGroup`, without `max_relative_position`,
            `key_shift` and `rotary_positions`.

    Call arguments and Returns: as in `HeadGroup`. A token bias is added to the logits
    by which points read tokens. Maps show the weights of tokens through the points.

    Raises:
        ValueError: if an argument has no meaning; when called, with a causal mask.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    attention = layers.MixedAttention([zoo.InducedHeads(2, 4)], key_dim=8)
    assert attention(np.ones((1, 10, 16))).shape == (1, 10, 16)
    ```

    Reference: Lee et al., "Set Transformer" (https://arxiv.org/abs/1810.00825),
    section 3.1, equations 9 and 10.
    """

    num_points = Argument(check_positive_integer)
    use_layer_norm = Argument(check_flag)
    kernel_initializer = Argument(initializer)

    def __init__(
        self,
        num_heads,
        num_points=32,
        use_layer_norm=True,
        kernel_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        refusals.refuse_arguments(
            self, ALL_TOKENS, "max_relative_position", "key_shift", "rotary_positions"
        )
        self.num_points = num_points
        self.use_layer_norm = use_layer_norm
        self.kernel_initializer = kernel_initializer
        self.norms = []
        if use_layer_norm:
            self.norms = [
                HeadNorm(name=name, dtype=self.dtype_policy)
                for name in ("point_norm", "output_norm")
            ]

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        self.inducing_queries = self._add_points("inducing_queries", self.key_dim)
        self.inducing_points = self._add_points("inducing_points", self.value_dim)
        for norm in self.norms:
            norm.build((None, self.num_heads, None, self.value_dim))
        self.hidden_kernel, self.hidden_bias = self._add_projection(
            "hidden", self.value_dim
        )
        self.key_kernel, self.key_bias = self._add_projection("key", self.key_dim)
        self.value_kernel, self.value_bias = self._add_projection(
            "value", self.value_dim
        )

    def _add_points(self, name, dim):
        return learned.add_weight(
            self, name, self.num_points, dim, self.kernel_initializer
        )

    def _add_projection(self, name, dim):
        """Makes kernel and bias of a projection of the points of all heads."""
        size = self.num_heads * dim
        kernel = self.add_weight(
            name=f"{name}_kernel",
            shape=(self.num_heads * self.value_dim, size),
            initializer=cloned(self.kernel_initializer),
        )
        bias = self.add_weight(name=f"{name}_bias", shape=(size,), initializer="zeros")
        return kernel, bias

    def prepared(self, inputs):
        refusals.refuse_causal_mask(inputs, ALL_TOKENS)
        return super().prepared(inputs)

    def attend(self, inputs, training=None):
        return self._read(inputs.query, self._points(inputs, training), training)

    def make_cache(self, batch_size, max_length, positions=None):
        refusals.refuse_cache(self, ALL_TOKENS)

    def make_memory(self, inputs, max_length):
        key, value, has_tokens = self._points(inputs)
        return {"key": key, "value": value, "has_tokens": has_tokens}

    def read_memory(self, cache, index, inputs):
        points = (cache[name] for name in ("key", "value", "has_tokens"))
        return self._read(inputs.query, points), cache

    def _points(self, inputs, training=None):
        """Returns keys and values of the points, and which sequences have tokens."""
        dim, value = self.value_dim, inputs.value
        found = learned.attend(self, self.inducing_queries, inputs, value, training)
        points = learned.of_heads(self, self.inducing_points, found.dtype)
        points = self._normalized(0, found[..., :dim] + points)
        hidden = self._projected(points, self.hidden_kernel, self.hidden_bias)
        points = self._normalized(1, points + ops.relu(hidden))
        key = self._projected(points, self.key_kernel, self.key_bias)
        value = self._projected(points, self.value_kernel, self.value_bias)
        if found.shape[-1] is None or found.shape[-1] > dim:
            value = ops.concatenate([value, found[..., dim:]], axis=-1)
        real = known_mask(inputs.value, inputs.value_mask)
        return key, value, ops.any(real, axis=-1)[..., None, None]

    def _read(self, query, points, training=None):
        key, value, has_tokens = points
        return self.dot_product(
            query, key, value, attention_mask=has_tokens, training=training
        )

    def _normalized(self, number, x):
        return self.norms[number](x) if self.use_layer_norm else x

    def _projected(self, x, kernel, bias):
        """Projects `[batch, heads, points, dim]` over all heads together."""
        kernel = ops.cast(ops.convert_to_tensor(kernel), x.dtype)
        bias = ops.cast(ops.convert_to_tensor(bias), x.dtype)
        batch, heads, points, dim = ops.shape(x)
        x = ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (batch, points, heads * dim))
        x = ops.matmul(x, kernel) + bias
        x = ops.reshape(x, (batch, points, heads, kernel.shape[-1] // heads))
        return ops.transpose(x, (0, 2, 1, 3))


def _settings(sizes):
    return {"num_points": sizes.attention_window}


PATTERNS = {
    "induced": Pattern(
        InducedHeads,
        _settings,
        has_relative_positions=False,
        of_decoders=False,
        refuses=("entmax_alpha", "key_shift", "rotary_positions"),
    )
}
