"""Attention through a few learned points: induced attention and Luna."""

import math

import keras
from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers.softmax.softmax_attention import softmax
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.tensors import running_sum
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import initializer
from routing_tf.zoo.feature_map import running_sums
from routing_tf.zoo.parts import learned
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.learned import HeadNorm
from routing_tf.zoo.parts.pattern import Pattern

__all__ = ["InducedHeads", "LunaHeads"]


ALL_TOKENS = "inducing points have read all tokens of the sequence"

PACKED = "tokens are read through packed ones, without a place"


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


def _induced(sizes):
    return {"num_points": sizes.attention_window}


@keras.saving.register_keras_serializable("routing_tf")
class LunaHeads(HeadGroup):
    """Heads with a few learned queries that pack the sequence, which tokens then read.

    Without a causal mask, the packing weights are `A = softmax(P K^T)` for `num_packed`
    learned queries P, and the output is `softmax(Q (A K)^T) (A V)`. With a causal mask,
    they are `A = log2(1 + 2**(P K^T))`, a softplus that is 1 at 0, and the output of
    query t is

        softmax(q_t sum_j(k_j a_j) / t) sum_j(a_j v_j) / t,

    with sums over the t tokens j up to t. So work and memory are linear in the length,
    and decoding remembers only the sums, whose size is constant. Sums are computed in
    float32.

    In the authors' code, another projection between packing and unpacking mixes heads;
    a causal layer has other weights than one without a causal mask, with separate keys
    for packing; and packed tokens are passed on to the next layer.

    Args:
        num_heads: number of heads in the group.
        num_packed: number of packed tokens. Defaults to 16.
        packing_initializer: initializer of P. Defaults to `"glorot_uniform"`.
        chunk_length: number of tokens in a chunk under a causal mask, inside which
            weights of pairs are computed. It influences time and memory, not results.
            Defaults to 128.
        **kwargs: arguments of `HeadGroup`, without `max_relative_position`,
            `key_shift` and `rotary_positions`. Dropout is on the weights of packing and
            of unpacking.

    Call arguments and Returns: as in `HeadGroup`. A token bias is added to the logits
    `P K^T`. In the map of a causal layer, the weights of a query do not add up to 1.

    Raises:
        ValueError: if an argument has no meaning; when called, if
            `use_causal_mask=True` and query and value differ in length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    attention = layers.MixedAttention([zoo.LunaHeads(2, num_packed=4)], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: Ma et al., "Luna: Linear Unified Nested Attention"
    (https://arxiv.org/abs/2106.01540), section 3; `LunarCausalAttention` in
    https://github.com/XuezheMax/fairseq-apollo.
    """

    num_packed = Argument(check_positive_integer)
    packing_initializer = Argument(initializer)
    chunk_length = Argument(check_positive_integer)

    def __init__(
        self,
        num_heads,
        num_packed=16,
        packing_initializer="glorot_uniform",
        chunk_length=128,
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        refusals.refuse_arguments(
            self, PACKED, "max_relative_position", "key_shift", "rotary_positions"
        )
        self.num_packed = num_packed
        self.packing_initializer = packing_initializer
        self.chunk_length = chunk_length

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        self.packing_queries = learned.add_weight(
            self,
            "packing_queries",
            self.num_packed,
            self.key_dim,
            self.packing_initializer,
        )

    def attend(self, inputs, training=None):
        if not inputs.use_causal_mask:
            return self._unpacked(
                inputs.query, *self._packed(inputs, training), training
            )
        packing = self._packing_weights(inputs, training)
        query, key, value = (
            ops.cast(x, "float32") for x in (inputs.query, inputs.key, inputs.value)
        )
        if inputs.value_mask is None:
            count = ops.cast(numbers(length_of(query, 2)) + 1, "float32")[:, None]
        else:
            count = running_sum(ops.cast(inputs.value_mask, "float32"))
            count = ops.maximum(count, 1.0)[..., None]
        logits = running_sums(query, key, packing, None, self.chunk_length)
        weights = self._unpacking_weights(logits / count, training)
        output = running_sums(weights, packing, value, None, self.chunk_length)
        return ops.cast(output / count, self.compute_dtype)

    def make_cache(self, batch_size, max_length, positions=None):
        shape = (batch_size, self.num_heads)
        return {
            "keys": ops.zeros((*shape, self.key_dim, self.num_packed), "float32"),
            "values": ops.zeros((*shape, self.num_packed, self.value_dim), "float32"),
            "count": ops.zeros((batch_size,), "float32"),
        }

    def fill_cache(self, cache, inputs):
        return self._sums(inputs, self._packing_weights(inputs))

    def step(self, cache, index, inputs):
        packing = self._packing_weights(inputs)
        query, key, value = (
            ops.cast(x, "float32") for x in (inputs.query, inputs.key, inputs.value)
        )
        real = known_mask(inputs.value, inputs.value_mask)
        count = cache["count"][:, None, None] + running_sum(ops.cast(real, "float32"))
        count = ops.maximum(count, 1.0)[..., None]
        logits = running_sums(query, key, packing, None, self.chunk_length)
        logits = logits + ops.matmul(query, cache["keys"])
        weights = self._unpacking_weights(logits / count)
        output = running_sums(weights, packing, value, None, self.chunk_length)
        output = output + ops.matmul(weights, cache["values"])
        new = self._sums(inputs, packing)
        cache = {name: x + new[name] for name, x in cache.items()}
        return ops.cast(output / count, self.compute_dtype), cache

    def max_positions(self, cache):
        return None

    def make_memory(self, inputs, max_length):
        key, value = self._packed(inputs)
        return {"key": key, "value": value}

    def read_memory(self, cache, index, inputs):
        return self._unpacked(inputs.query, cache["key"], cache["value"]), cache

    def _packed(self, inputs, training=None):
        """Returns packed keys and values."""
        both = ops.concatenate([inputs.key, inputs.value], axis=-1)
        both = learned.attend(self, self.packing_queries, inputs, both, training)
        return both[..., : self.key_dim], both[..., self.key_dim :]

    def _unpacked(self, query, key, value, training=None):
        return self.dot_product(query, key, value, training=training)

    def _packing_weights(self, inputs, training=None):
        """Returns the causal weights `<float32>[batch, heads, length, num_packed]`."""
        queries = learned.of_heads(self, self.packing_queries, "float32")
        queries = ops.swapaxes(queries, -1, -2) * self.key_dim**-0.5
        logits = product(ops.cast(inputs.key, "float32"), queries)
        if inputs.token_bias is not None:
            logits = logits + ops.cast(inputs.token_bias, "float32")[..., None]
        scale = math.log(2.0)
        weights = ops.softplus(logits * scale) / scale
        if inputs.value_mask is not None:
            weights = ops.where(inputs.value_mask[..., None], weights, 0.0)
        return self._dropped(weights, training)

    def _unpacking_weights(self, logits, training=None):
        return self._dropped(softmax(logits), training)

    def _dropped(self, weights, training):
        weights = self.dot_product.dropout_layer(weights, training=training)
        return ops.cast(weights, "float32")

    def _sums(self, inputs, packing):
        """Returns the sums over all tokens, and the number of real ones."""
        key, value = (ops.cast(x, "float32") for x in (inputs.key, inputs.value))
        real = known_mask(inputs.value, inputs.value_mask)[:, 0]
        return {
            "keys": ops.matmul(ops.swapaxes(key, -1, -2), packing),
            "values": ops.matmul(ops.swapaxes(packing, -1, -2), value),
            "count": ops.sum(ops.cast(real, "float32"), axis=-1),
        }


def _luna(sizes):
    return {"num_packed": sizes.attention_window}


PATTERNS = {
    "induced": Pattern(
        InducedHeads,
        _induced,
        has_relative_positions=False,
        of_decoders=False,
        refuses=("entmax_alpha", "key_shift", "rotary_positions"),
    ),
    "luna": Pattern(
        LunaHeads,
        _luna,
        has_relative_positions=False,
        is_bounded=True,
        refuses=("entmax_alpha", "key_shift", "rotary_positions"),
    ),
}
