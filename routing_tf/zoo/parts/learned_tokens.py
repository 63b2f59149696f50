"""Keys and values that are weights, beside those of a sequence."""

from keras import ops

from routing_tf.layers.initializers import cloned
from routing_tf.layers.scaled_dot_product import ScaledDotProduct


class LearnedTokens(ScaledDotProduct):
    """Softmax attention in which every query also sees learned keys and values.

    They take part in the one softmax, no mask hides them, and they have no relative
    position. The group that owns the layer sets their number.
    """

    #: Number of learned keys and values of each head.
    num_learned_tokens = 0

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        if not self.num_learned_tokens:
            return
        shape = (key_shape[1], self.num_learned_tokens)
        for name, size in (("keys", key_shape[-1]), ("values", value_shape[-1])):
            weight = self.add_weight(
                name=f"learned_{name}",
                shape=(*shape, size),
                initializer=cloned(self.embeddings_initializer),
            )
            setattr(self, f"learned_{name}", weight)

    def call(
        self,
        query,
        key,
        value,
        attention_mask=None,
        bias=None,
        distances=None,
        training=None,
        **kwargs,
    ):
        """See `ScaledDotProduct`; heads are on axis 1."""
        # Keras hands `training` only to a layer that names it.
        if self.num_learned_tokens:
            key = self._behind(key, self.learned_keys)
            value = self._behind(value, self.learned_values)
            attention_mask = self._with_columns(attention_mask, True)
            bias = self._with_columns(bias, 0)
        return super().call(
            query,
            key,
            value,
            attention_mask,
            bias,
            distances=distances,
            training=training,
            **kwargs,
        )

    def _behind(self, x, learned):
        """Puts learned vectors behind those on the last axis but one."""
        heads, number, size = learned.shape
        *leading, _, wanted = ops.shape(x)
        learned = ops.cast(learned, x.dtype)
        # An identity matrix behind the values tells the weights of a sequence alone.
        learned = ops.pad(learned, [(0, 0), (0, 0), (0, wanted - size)])
        between = [1] * (len(leading) - 2)
        learned = ops.reshape(learned, (1, heads, *between, number, wanted))
        learned = ops.broadcast_to(learned, (*leading, number, wanted))
        return ops.concatenate([x, learned], axis=-2)

    def _with_columns(self, x, value):
        """Adds a column for each learned token, alike for all queries."""
        if x is None:
            return None
        padding = [(0, 0)] * (len(x.shape) - 1) + [(0, self.num_learned_tokens)]
        return ops.pad(x, padding, constant_values=value)
