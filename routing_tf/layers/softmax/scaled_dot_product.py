"""Softmax attention inside a block, a cluster or a whole sequence."""

import keras
from keras import ops

from routing_tf.layers.softmax import fused_attention
from routing_tf.layers.softmax.relative_position import RelativePosition
from routing_tf.layers.softmax.softmax_attention import WHOLE
from routing_tf.layers.softmax.softmax_attention import Pairs
from routing_tf.layers.softmax.softmax_attention import can_attend
from routing_tf.layers.softmax.softmax_attention import causal_parts
from routing_tf.layers.softmax.softmax_attention import cut
from routing_tf.layers.softmax.softmax_attention import in_pieces
from routing_tf.layers.softmax.softmax_attention import joined
from routing_tf.layers.softmax.softmax_attention import num_pieces
from routing_tf.layers.softmax.softmax_attention import softmax
from routing_tf.layers.softmax.softmax_attention import softmax_attention
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.masks import causal_mask
from routing_tf.layers.support.masks import causal_mask_as_bias
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import mask_as_bias
from routing_tf.layers.support.masks import sees_some
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_optional_number
from routing_tf.layers.support.validation import check_rate
from routing_tf.layers.support.validation import check_seed
from routing_tf.layers.support.validation import initializer


@keras.saving.register_keras_serializable("routing_tf")
class ScaledDotProduct(ConfiguredLayer):
    """Attention of queries to keys with a mask, a bias and relative positions.

    Queries must be scaled already, and a query that may see nothing returns zero. Every
    head group arranges its blocks or clusters as leading axes and leaves the arithmetic
    to this layer.

    Args:
        max_relative_position: largest distance with an embedding of its own, in
            slots (places along the `keys` axis); None (the default) for no relative
            positions.
        dropout: rate of dropped attention weights, in [0, 1). Defaults to 0.0.
        embeddings_initializer: initializer of the relative position tables. Defaults
            to `"glorot_uniform"`.
        relative_key_initializer: initializer of the table of the keys, see
            `RelativePosition`; None (the default) for `embeddings_initializer`.
        seed: integer seed of the dropout; None (the default) for a random one.
        attention_implementation: how attention is computed. `"plain"` (the default):
            products, a softmax, products, on any device. `"auto"`: on JAX with a GPU
            (compute capability 8.0 or more) the kernel of cuDNN, which keeps no weights
            of pairs, where its constraints hold: float16 or bfloat16, keys and values
            of at most 128, even numbers of queries and keys, no relative positions, no
            dropout while training, no soft cap and no sums of exponentials. Where they
            do not, a message says why, once, and `"plain"` computes. Results are equal
            up to rounding. A mask that differs between blocks or clusters
            stays in memory, as a number for each pair. On a TPU it is the splash kernel
            for token choice and hashed heads, whose queries are routed as their keys
            are; all else is `"plain"` there. `keras.config.disable_flash_attention()`
            makes `"plain"` of `"auto"` in all layers. For tests and benchmarks:
            `"cudnn"`, and `"splash"` for these heads, raise an error instead of the
            message, and `"xla"` is JAX's reference.
        logit_soft_cap: a positive number c, for logits `c * tanh(logits / c)` between
            -c and c (Gemma 2); None (the default) for no cap. Relative positions are
            added to the logits before, the bias and masks after.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        query: `<float>[..., queries, key_dim]`.
        key: `<float>[..., keys, key_dim]`.
        value: `<float>[..., keys, value_dim]`; columns beyond the value size that the
            layer was built with are averaged without relative positions.
        attention_mask: `<bool>`, broadcastable to `[..., queries, keys]`, True where
            a query may see a key; or None.
        bias: `<float>`, broadcastable in the same way, added to the logits; or None.
            Large negative values, including -inf, hide a key as long as another is
            visible.
        offset: slot of the key at the first query's position, if distances are
            differences of slots.
        distances: `<int>`, broadcastable to `[..., queries, keys]`; None (the default)
            for differences of slots.
        use_causal_mask: whether the last query sees all keys, and each earlier query
            one key less. Then up to 3/8 of the products, all of masked pairs, are left
            out. Defaults to False.
        training: whether dropout is on.
        return_logsumexp: whether to also return the logarithm of the sum of the
            exponentials of a query's logits, with which `joined_parts` joins results
            for parts of the keys. Defaults to False.

    Returns:
        `<float>[..., queries, value_dim]`; with `return_logsumexp=True` also
        `<float32>[..., queries]`, large and negative for a query that sees nothing.

    Raises:
        ValueError: when called, if `"cudnn"` or `"xla"` cannot compute the attention.
            (`"splash"` raises it in heads with clusters, and is `"plain"` here.)

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import ScaledDotProduct

    x = np.random.normal(size=(2, 6, 8)).astype("float32")
    causal = np.tri(6, dtype=bool)
    assert ScaledDotProduct()(x, x, x, attention_mask=causal).shape == (2, 6, 8)
    ```

    Reference: `dot_product_attention` of the release.
    """

    #: What training computes again, which the layer around it sets. With `"weights"`
    #: gradients compute the weights again. With True they compute all again to save
    #: memory, and pieces would need some.
    remat = False
    #: Makes weights of keys of logits, both `<float>[..., queries, keys]`.
    normalized = staticmethod(softmax)

    dropout = Argument(check_rate)
    embeddings_initializer = Argument(initializer)
    relative_key_initializer = Argument(initializer)
    seed = Argument(check_seed)
    attention_implementation = Argument(check_choice, fused_attention.IMPLEMENTATIONS)
    logit_soft_cap = Argument(check_optional_number)

    def __init__(
        self,
        max_relative_position=None,
        dropout=0.0,
        embeddings_initializer="glorot_uniform",
        relative_key_initializer=None,
        seed=None,
        attention_implementation="plain",
        logit_soft_cap=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.attention_implementation = attention_implementation
        self.logit_soft_cap = logit_soft_cap
        self.max_relative_position = max_relative_position
        self.dropout = dropout
        self.embeddings_initializer = embeddings_initializer
        self.relative_key_initializer = relative_key_initializer
        self.seed = seed
        self.relative_position = None
        if max_relative_position is not None:
            self.relative_position = RelativePosition(
                max_relative_position,
                embeddings_initializer,
                relative_key_initializer,
                name="relative_position",
                dtype=self.dtype_policy,
            )
        self.dropout_layer = keras.layers.Dropout(
            dropout, seed=self.seed, dtype=self.dtype_policy
        )

    def build(self, query_shape, key_shape, value_shape):
        self.value_dim = value_shape[-1]
        if self.relative_position is not None:
            self.relative_position.build(query_shape, value_shape)

    def call(
        self,
        query,
        key,
        value,
        attention_mask=None,
        bias=None,
        offset=0,
        distances=None,
        use_causal_mask=False,
        training=None,
        return_logsumexp=False,
    ):
        pairs = Pairs(
            *(
                None if x is None else ops.convert_to_tensor(x)
                for x in (attention_mask, bias, distances)
            ),
            offset,
        )
        needs = return_logsumexp, training
        if self.attention_implementation not in ("plain", "splash"):
            output = self._fused(query, key, value, pairs, use_causal_mask, *needs)
            if output is not None:
                return output
        own = pairs.mask, pairs.bias, pairs.distances
        number = num_pieces(query, key, value, own)
        forgets = self.remat is True and training
        if number > 1 and (forgets or self.depends_on_place(training)):
            number = 1
        parts = WHOLE
        if use_causal_mask:
            # Pieces are small already, and share their masks.
            parts = causal_parts(query, key, 4 if number == 1 else 2)
        if number == 1:
            results = self._attend(query, key, value, pairs, parts, *needs)
        else:

            def attend(query, key, value, *own):
                own = Pairs(*own, offset)
                return self._attend(query, key, value, own, parts, *needs)

            results = in_pieces(attend, number, query, key, value, *own)
        if attention_mask is None:
            return results
        lengths = ()
        if use_causal_mask:
            lengths = length_of(query, -2), length_of(key, -2)
        if not return_logsumexp:
            return self.of_seeing(results, pairs.mask, *lengths)
        output, logsumexp = results
        return self.of_seeing(output, pairs.mask, *lengths), logsumexp

    def _attend(self, query, key, value, pairs, parts, needs_sum, training):
        """Attends at once, with parts of the queries one after the other."""
        # A bias may be learned, and then needs the gradients of the logits.
        if pairs.bias is None and self.needs_logits(needs_sum, training) is None:
            mask = pairs.mask
            bias = None if mask is None else mask_as_bias(query.dtype, mask)
            if can_attend(query, key, value, bias):
                keeps_weights = self.remat != "weights"
                return softmax_attention(query, key, value, bias, parts, keeps_weights)
        needs = needs_sum, training
        if len(parts) == 1:
            return self._attend_part(parts[0], query, key, value, pairs, *needs)
        results = [
            self._attend_part(part, *own, *of_keys, pairs.cut(part), *needs)
            for part, (own, of_keys) in zip(parts, cut(parts, [query], [key, value]))
        ]
        if not needs_sum:
            return joined(results)
        outputs, sums = zip(*results, strict=True)
        return joined(outputs), joined(sums, axis=-1)

    def _attend_part(self, part, query, key, value, pairs, needs_sum, training):
        """Attends with the queries of a `Part`, and the keys that they see."""
        logits = product(query, key, transpose_y=True)
        if self.relative_position is not None:
            is_causal = part.causal_mask is not None
            place = pairs.distances, pairs.offset, is_causal
            logits = logits + self._relative_logits(query, length_of(key, -2), *place)
        if self.logit_soft_cap is not None:
            logits = self.capped(logits)
        logits = self.masked(logits, pairs.mask, pairs.bias, part.causal_mask)
        logsumexp = None
        if needs_sum:
            weights, logsumexp = self.normalized_and_sums(logits)
        else:
            weights = self.normalized(logits)
        weights = self.dropout_layer(weights, training=training)
        output = product(weights, value)
        if self.relative_position is not None:
            sums = self._relative_sums(weights, *place)
            output = output + self._pad_to(sums, output.shape[-1])
        return (output, logsumexp) if needs_sum else output

    def _fused(self, query, key, value, pairs, use_causal_mask, needs_sum, training):
        """Attends by a kernel that keeps no logits; None where none can."""
        implementation = fused_attention.chosen(self.attention_implementation)
        if implementation == "plain":
            return None
        obstacle = fused_attention.obstacle(implementation, query, key, value)
        obstacle = obstacle or self.needs_logits(needs_sum, training)
        if obstacle is not None:
            return fused_attention.decline(implementation, obstacle)
        mask, num_queries, num_keys = pairs.mask, query.shape[-2], key.shape[-2]
        lengths = (num_queries, num_keys) if use_causal_mask else ()
        is_causal = use_causal_mask and num_queries == num_keys
        seen = mask
        if use_causal_mask and not is_causal:
            seen = combine_masks(causal_mask(*lengths), mask)
        output = fused_attention.attend(
            implementation,
            query,
            key,
            value,
            mask=seen,
            bias=pairs.bias,
            is_causal=is_causal,
        )
        if output is None or mask is None:
            return output
        return self.of_seeing(output, mask, *lengths)

    def needs_logits(self, needs_sum, training):
        """Returns why kernels that store no logits cannot be used, in words; or None.

        Args:
            needs_sum: whether the sums of exponentials are needed.
            training: whether dropout is on.
        """
        if self.relative_position is not None:
            return "relative positions need the logits of each pair"
        if self.logit_soft_cap is not None:
            return "a soft cap needs the logits of each pair"
        if needs_sum:
            return "the sums of exponentials are needed"
        if self.dropout and training:
            return "dropout needs the weight of each pair"
        return None

    def depends_on_place(self, training):
        """Returns whether results depend on the arrangement in the leading axes."""
        return bool(self.dropout and training)

    def normalized_and_sums(self, logits):
        """Returns the weights, and `<float32>[..., queries]` for `return_logsumexp`."""
        exact = ops.cast(logits, "float32")
        logsumexp = ops.logsumexp(exact, axis=-1, keepdims=True)
        weights = ops.cast(ops.exp(exact - logsumexp), logits.dtype)
        return weights, logsumexp[..., 0]

    def attention_weights(self, logits, mask, bias=None, training=None):
        """Returns the attention weights of logits that a head group computed itself."""
        if self.logit_soft_cap is not None:
            logits = self.capped(logits)
        weights = self.normalized(self.masked(logits, mask, bias))
        return self.dropout_layer(weights, training=training)

    def capped(self, logits):
        """Returns logits within the soft cap."""
        return ops.tanh(logits / self.logit_soft_cap) * self.logit_soft_cap

    def of_seeing(self, output, mask, *lengths):
        """Returns the output with zeros for queries that may see nothing.

        `lengths` are the numbers of queries and keys where there is also a causal mask.
        """
        if lengths:
            return ops.where(sees_some(mask, *lengths), output, 0)
        return ops.where(ops.any(mask, axis=-1, keepdims=True), output, 0)

    def masked(self, logits, mask, bias, causal_mask=None):
        """Adds the bias and all masks to logits `<float>[..., queries, keys]`."""
        bias = mask_as_bias(logits.dtype, mask, bias)
        logits = logits if bias is None else logits + bias
        if causal_mask is None:
            return logits
        return logits + causal_mask_as_bias(logits.dtype, causal_mask)

    def _relative_logits(self, query, num_keys, distances, offset, is_causal):
        if distances is not None:
            return self.relative_position.key_logits_at(query, distances)
        return self.relative_position.key_logits(query, num_keys, offset, is_causal)

    def _relative_sums(self, weights, distances, offset, is_causal):
        if distances is not None:
            return self.relative_position.value_sums_at(weights, distances)
        return self.relative_position.value_sums(weights, offset, is_causal)

    def _pad_to(self, sums, size):
        extra = size - self.value_dim
        return ops.pad(sums, [(0, 0)] * (len(sums.shape) - 1) + [(0, extra)])

    def compute_output_shape(self, query_shape, key_shape, value_shape):
        return (*query_shape[:-1], value_shape[-1])


def joined_parts(outputs, logsumexps):
    """Joins outputs `[..., parts, value_dim]` for parts of the keys by `logsumexps`."""
    shares = ops.cast(softmax(logsumexps), outputs.dtype)
    return ops.sum(shares[..., None] * outputs, axis=-2)
