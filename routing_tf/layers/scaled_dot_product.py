"""Softmax attention inside a block, a cluster or a whole sequence."""

import keras
from keras import ops

from routing_tf.layers.relative_position import RelativePosition
from routing_tf.layers.validation import check_rate


def large_negative(dtype):
    """Returns a logit that no softmax sees, finite in `dtype`."""
    return -3.0e4 if keras.backend.standardize_dtype(dtype) == "float16" else -1.0e9


@keras.saving.register_keras_serializable("routing_tf")
class ScaledDotProduct(keras.layers.Layer):
    """Attention of queries to keys with a mask, a bias and relative positions.

    Queries come already scaled. Every head group arranges its blocks or clusters as
    leading axes and leaves the arithmetic to this layer.

    Args:
        max_relative_position: largest distance with an embedding of its own, in
            slots (places along the `keys` axis); None (the default) for no relative
            positions.
        dropout: rate of dropped attention weights, in [0, 1). Defaults to 0.0.
        uniform_when_all_masked: what a query does that may see nothing: attend to
            all slots alike (True) or return zero (False). Defaults to False.
        embeddings_initializer: initializer of the relative position tables. Defaults
            to `"glorot_uniform"`.
        relative_key_initializer: initializer of the table of the keys, see
            `RelativePosition`; None (the default) for `embeddings_initializer`.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        query: `<float>[..., queries, key_dim]`.
        key: `<float>[..., keys, key_dim]`.
        value: `<float>[..., keys, value_dim]`; columns beyond the value size the
            layer was built with are averaged without relative positions.
        attention_mask: `<bool>`, broadcastable to `[..., queries, keys]`, True where
            a query may see a key; or None.
        bias: `<float>`, broadcastable likewise, added to the logits; or None. Large
            negative values, -inf too, hide a key as long as another is visible.
        offset: slot of the key at the first query's position, for distances that are
            differences of slots.
        distances: `<int>`, broadcastable to `[..., queries, keys]`, where they are
            others; None (the default) for differences of slots.
        training: whether dropout is on.

    Returns:
        `<float>[..., queries, value_dim]`.

    Raises:
        ValueError: if `dropout` is not in [0, 1) or `max_relative_position` is neither
            None nor a positive integer.

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

    def __init__(
        self,
        max_relative_position=None,
        dropout=0.0,
        uniform_when_all_masked=False,
        embeddings_initializer="glorot_uniform",
        relative_key_initializer=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_rate("dropout", dropout)
        self.max_relative_position = max_relative_position
        self.dropout = dropout
        self.uniform_when_all_masked = uniform_when_all_masked
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.relative_key_initializer = keras.initializers.get(relative_key_initializer)
        self.relative_position = None
        if max_relative_position is not None:
            self.relative_position = RelativePosition(
                max_relative_position,
                embeddings_initializer,
                relative_key_initializer,
                name="relative_position",
                dtype=self.dtype_policy,
            )
        self.dropout_layer = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

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
        training=None,
    ):
        logits = ops.matmul(query, ops.swapaxes(key, -1, -2))
        if self.relative_position is not None:
            logits += self._relative_logits(query, key.shape[-2], offset, distances)
        if bias is not None:
            # A bias may hide a key, but never below those that the mask hides.
            least = large_negative(logits.dtype) / 2
            logits += ops.maximum(ops.cast(bias, logits.dtype), least)
        if attention_mask is not None:
            logits = ops.where(attention_mask, logits, large_negative(logits.dtype))
        weights = self.dropout_layer(ops.softmax(logits), training=training)
        output = ops.matmul(weights, value)
        if self.relative_position is not None:
            sums = self._relative_sums(weights, offset, distances)
            output += self._pad_to(sums, output.shape[-1])
        if attention_mask is not None and not self.uniform_when_all_masked:
            sees_any = ops.any(attention_mask, axis=-1, keepdims=True)
            output = ops.where(sees_any, output, 0)
        return output

    def _relative_logits(self, query, num_keys, offset, distances):
        if distances is None:
            return self.relative_position.key_logits(query, num_keys, offset)
        return self.relative_position.key_logits_at(query, distances)

    def _relative_sums(self, weights, offset, distances):
        if distances is None:
            return self.relative_position.value_sums(weights, offset)
        return self.relative_position.value_sums_at(weights, distances)

    def _pad_to(self, sums, size):
        extra = size - self.value_dim
        return ops.pad(sums, [(0, 0)] * (len(sums.shape) - 1) + [(0, extra)])

    def get_config(self):
        return {
            **super().get_config(),
            "max_relative_position": self.max_relative_position,
            "dropout": self.dropout,
            "uniform_when_all_masked": self.uniform_when_all_masked,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
            "relative_key_initializer": keras.initializers.serialize(
                self.relative_key_initializer
            ),
        }

    def compute_output_shape(self, query_shape, key_shape, value_shape):
        return (*query_shape[:-1], value_shape[-1])
