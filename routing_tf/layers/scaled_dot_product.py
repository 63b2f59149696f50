"""Softmax attention inside a block, a cluster or a whole sequence."""

import keras
from keras import ops

from routing_tf.layers import fused_attention
from routing_tf.layers.axes import cut_pairs
from routing_tf.layers.axes import split_axis
from routing_tf.layers.lengths import is_known
from routing_tf.layers.lengths import length_of
from routing_tf.layers.masks import causal_mask
from routing_tf.layers.masks import causal_mask_as_bias
from routing_tf.layers.masks import combine_masks
from routing_tf.layers.masks import mask_as_bias
from routing_tf.layers.masks import sees_some
from routing_tf.layers.pieces import in_pieces
from routing_tf.layers.pieces import num_pieces
from routing_tf.layers.products import product
from routing_tf.layers.relative_position import RelativePosition
from routing_tf.layers.serialization import ConfiguredLayer
from routing_tf.layers.serialization import class_of_config
from routing_tf.layers.serialization import class_of_the_zoo
from routing_tf.layers.softmax_attention import can_attend
from routing_tf.layers.softmax_attention import softmax
from routing_tf.layers.softmax_attention import softmax_attention
from routing_tf.layers.validation import check_choice
from routing_tf.layers.validation import check_optional_number
from routing_tf.layers.validation import check_rate

# Fewer queries than this make matrix products slow.
MIN_PART_SIZE = 32


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
        entmax_alpha: None (the default) for the softmax. A number or `"learned"` makes
            `zoo.EntmaxDotProduct`, most of whose weights are zero.
        attention_implementation: how attention is computed. `"plain"` (the default):
            products, a softmax, products, on any device. `"auto"`: on JAX with a GPU
            (compute capability 8.0 or more) the kernel of cuDNN, which keeps no weights
            of pairs, where its constraints hold: float16 or bfloat16, keys and values
            of at most 128, even numbers of queries and keys, no relative positions, no
            dropout while training, no entmax, no soft cap and no sums of exponentials.
            Where they do not, a message says why, once, and `"plain"` computes. Results
            are equal up to rounding. A mask that differs between blocks or clusters
            stays in memory, as a number for each pair. On a TPU it is the splash kernel
            for token choice and hashed heads, whose queries are routed as their keys
            are; all else is `"plain"` there. `keras.config.disable_flash_attention()`
            makes `"plain"` of `"auto"` in all layers. For tests and benchmarks:
            `"cudnn"`, and `"splash"` for these heads, raise an error in place of the
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
        ValueError: if `dropout` is not in [0, 1), `max_relative_position` is neither
            None nor a positive integer, `logit_soft_cap` is not a positive number, or
            `attention_implementation` is none of the above; when called, if `"cudnn"`
            or `"xla"` cannot compute the attention. (`"splash"` raises it in heads with
            clusters, and is `"plain"` here.)

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

    def __new__(cls, *args, **kwargs):
        alpha = kwargs.get("entmax_alpha", args[5] if len(args) > 5 else None)
        if alpha is not None and cls is ScaledDotProduct:
            cls = class_of_the_zoo("EntmaxDotProduct")
        return super().__new__(cls, *args, **kwargs)

    def __init__(
        self,
        max_relative_position=None,
        dropout=0.0,
        embeddings_initializer="glorot_uniform",
        relative_key_initializer=None,
        seed=None,
        entmax_alpha=None,
        attention_implementation="plain",
        logit_soft_cap=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_rate("dropout", dropout)
        check_choice(
            "attention_implementation",
            attention_implementation,
            fused_attention.IMPLEMENTATIONS,
        )
        self.attention_implementation = attention_implementation
        self.entmax_alpha = entmax_alpha
        self.logit_soft_cap = check_optional_number("logit_soft_cap", logit_soft_cap)
        self.max_relative_position = max_relative_position
        self.dropout = dropout
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.relative_key_initializer = keras.initializers.get(relative_key_initializer)
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
            dropout, seed=seed, dtype=self.dtype_policy
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
        pairs = {"mask": attention_mask, "bias": bias, "distances": distances}
        pairs = {
            name: None if x is None else ops.convert_to_tensor(x)
            for name, x in pairs.items()
        }
        options = {"needs_sum": return_logsumexp, "training": training}
        implementation = fused_attention.chosen(self.attention_implementation)
        if implementation not in ("plain", "splash"):
            output = self._fused(
                implementation, query, key, value, pairs, use_causal_mask, **options
            )
            if output is not None:
                return output
        number = self._num_pieces(query, key, value, pairs, training)
        options["offset"], lengths = offset, ()
        options["causal_masks"] = []
        if use_causal_mask:
            lengths = length_of(query, -2), length_of(key, -2)
            # Pieces are small already, and share their masks.
            options["causal_masks"] = _causal_masks(*lengths, 4 if number == 1 else 2)
        results = in_pieces(
            lambda *tensors, **own: self._attend_piece(*tensors, own, **options),
            number,
            (query, key, value),
            pairs,
        )
        if attention_mask is None:
            return results
        seen = sees_some(pairs["mask"], *lengths)
        if not return_logsumexp:
            return self.of_seeing(results, seen)
        output, logsumexp = results
        return self.of_seeing(output, seen), logsumexp

    def _num_pieces(self, query, key, value, pairs, training):
        if self.depends_on_place(training):
            return 1
        return num_pieces(query, key, value, pairs.values())

    def _attend_piece(self, query, key, value, pairs, causal_masks, **options):
        """Attends; `pairs` holds mask, bias and distances."""
        output = self._by_softmax_alone(
            query,
            key,
            value,
            pairs,
            causal_masks,
            options["needs_sum"],
            options["training"],
        )
        if output is not None:
            return output
        if len(causal_masks) > 1:
            return self._attend_in_parts(
                query, key, value, pairs, causal_masks, **options
            )
        if causal_masks:
            pairs["causal_mask"] = causal_masks[0]
        return self._attend(query, key, value, pairs, **options)

    def _attend_in_parts(
        self, query, key, value, pairs, causal_masks, offset, **options
    ):
        """Attends with parts of the queries, and the keys that each of them sees."""
        parts, num_keys = len(causal_masks), key.shape[-2]
        size = query.shape[-2] // parts
        queries = split_axis(query, [size] * parts, axis=-2)
        earlier = num_keys - query.shape[-2]
        # Units of the keys have equal sizes, if the keys before the first query allow
        # it.
        sizes = [earlier, *[size] * parts] if earlier else [size] * parts
        if earlier % size == 0:
            sizes = [size] * (num_keys // size)
        units = [split_axis(x, sizes, axis=-2) for x in (key, value)]
        outputs = []
        for i in range(parts):
            start, end = i * size, earlier + (i + 1) * size
            num_units = len(sizes) - parts + i + 1
            own = {name: cut_pairs(x, start, size, end) for name, x in pairs.items()}
            own["causal_mask"] = causal_masks[i]
            # The last part sees all of them, so they need not be joined.
            seen = [key, value]
            if end < num_keys:
                seen = [_joined(x[:num_units]) for x in units]
            outputs.append(
                self._attend(queries[i], *seen, own, offset + start, **options)
            )
        if not options["needs_sum"]:
            return ops.concatenate(outputs, axis=-2)
        outputs, sums = zip(*outputs, strict=True)
        return ops.concatenate(outputs, axis=-2), ops.concatenate(sums, axis=-1)

    def _fused(
        self,
        implementation,
        query,
        key,
        value,
        pairs,
        use_causal_mask,
        needs_sum,
        training,
    ):
        """Attends by a kernel that keeps no logits; None where none can."""
        obstacle = fused_attention.obstacle(implementation, query, key, value)
        obstacle = obstacle or self.needs_logits(needs_sum, training)
        if obstacle is not None:
            return fused_attention.decline(implementation, obstacle)
        mask, num_queries, num_keys = pairs["mask"], query.shape[-2], key.shape[-2]
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
            bias=pairs["bias"],
            is_causal=is_causal,
        )
        if output is None or mask is None:
            return output
        return self.of_seeing(output, sees_some(mask, *lengths))

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
        """Whether results depend on how blocks and clusters lie in the leading axes.

        Args:
            training: whether dropout is on, which then draws other numbers.
        """
        return bool(self.dropout and training)

    def _attend(self, query, key, value, pairs, offset, needs_sum, training):
        """Attends with some queries; `pairs` holds mask, bias and distances."""
        distances, logsumexp = pairs.pop("distances"), None
        place = {"offset": offset, "is_causal": "causal_mask" in pairs}
        logits = product(query, key, transpose_y=True)
        if self.relative_position is not None:
            num_keys = length_of(key, -2)
            logits = logits + self._relative_logits(query, num_keys, distances, **place)
        logits = self.masked(self.capped(logits), **pairs)
        if needs_sum:
            weights, logsumexp = self.normalized_and_sums(logits)
        else:
            weights = self.normalized(logits)
        weights = self.dropout_layer(weights, training=training)
        output = product(weights, value)
        if self.relative_position is not None:
            sums = self._relative_sums(weights, distances, **place)
            output = output + self._pad_to(sums, output.shape[-1])
        return (output, logsumexp) if needs_sum else output

    def _by_softmax_alone(
        self, query, key, value, pairs, causal_masks, needs_sum, training
    ):
        """Attends with a gradient of its own; None if there is more than a softmax."""
        # A bias may be learned, and then needs the gradients of the logits.
        if pairs["bias"] is not None or self.needs_logits(needs_sum, training):
            return None
        bias = mask_as_bias(query.dtype, pairs["mask"])
        if not can_attend(query, key, value, bias):
            return None
        causal_biases = [causal_mask_as_bias(query.dtype, x) for x in causal_masks]
        return softmax_attention(query, key, value, bias, causal_biases)

    def normalized(self, logits):
        """Returns the weights of keys, `<float>[..., queries, keys]`.

        Args:
            logits: `<float>[..., queries, keys]`.
        """
        return softmax(logits)

    def normalized_and_sums(self, logits):
        """Returns the weights, and `<float32>[..., queries]` for `return_logsumexp`.

        Args:
            logits: as in `normalized`.
        """
        exact = ops.cast(logits, "float32")
        logsumexp = ops.logsumexp(exact, axis=-1, keepdims=True)
        weights = ops.cast(ops.exp(exact - logsumexp), logits.dtype)
        return weights, logsumexp[..., 0]

    def attention_weights(self, logits, mask, bias=None, training=None):
        """Returns the attention weights of logits that a head group computed itself.

        Args:
            logits: `<float>[..., queries, keys]`.
            mask: as `attention_mask` in a call.
            bias: as in a call.
            training: whether dropout is on.
        """
        weights = self.normalized(self.masked(self.capped(logits), mask, bias))
        return self.dropout_layer(weights, training=training)

    def capped(self, logits):
        """Returns logits within the soft cap, if there is one."""
        if self.logit_soft_cap is None:
            return logits
        return ops.tanh(logits / self.logit_soft_cap) * self.logit_soft_cap

    def of_seeing(self, output, mask):
        """Returns the output with zeros for queries that may see nothing."""
        return ops.where(sees_some(mask), output, 0)

    def masked(self, logits, mask, bias, causal_mask=None):
        """Adds the bias and all masks to the logits.

        Args:
            logits: `<float>[..., queries, keys]`.
            mask: as `attention_mask` in a call.
            bias: as in a call.
            causal_mask: `<bool>[queries, keys]`; None (the default) for none.
        """
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

    @classmethod
    def from_config(cls, config):
        found, config = class_of_config(cls, config)
        return super(ScaledDotProduct, found).from_config(config)

    def compute_output_shape(self, query_shape, key_shape, value_shape):
        return (*query_shape[:-1], value_shape[-1])


def joined_parts(outputs, logsumexps):
    """Joins the outputs for parts of the keys to the outputs for all keys.

    Args:
        outputs: `<float>[..., parts, value_dim]`, of calls with
            `return_logsumexp=True`.
        logsumexps: `<float32>[..., parts]`, of the same calls.

    Returns:
        `<float>[..., value_dim]`.
    """
    shares = ops.cast(softmax(logsumexps), outputs.dtype)
    return ops.sum(shares[..., None] * outputs, axis=-2)


def _joined(units):
    """Joins parts of the keys."""
    return units[0] if len(units) == 1 else ops.concatenate(units, axis=-2)


def _causal_masks(num_queries, num_keys, most):
    """Returns the causal masks of successive parts of the queries.

    Four parts save three quarters of the masked products; more would be too small.

    Args:
        num_queries: number of queries.
        num_keys: number of keys.
        most: number of parts, if possible; otherwise 2 or 1.

    Returns:
        List of `<bool>[queries of the part, keys up to its last one]`.
    """
    parts = 1
    if is_known(num_queries, num_keys) and num_keys >= num_queries:
        fits = [
            x
            for x in (most, 2)
            if num_queries % x == 0 and num_queries // x >= MIN_PART_SIZE
        ]
        parts = max(fits, default=1)
    if parts == 1:
        return [causal_mask(num_queries, num_keys)]
    size, earlier = num_queries // parts, num_keys - num_queries
    return [causal_mask(size, earlier + (i + 1) * size) for i in range(parts)]
