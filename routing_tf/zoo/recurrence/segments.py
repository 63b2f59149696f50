"""What transformers with recurrence over segments have in common."""

import keras
import numpy as np
from keras import ops

from routing_tf import layers
from routing_tf.layers.blocks.transformer_block import LAYER_NORM_EPSILON
from routing_tf.layers.blocks.transformer_block import STEPS
from routing_tf.layers.support.initializers import cloned
from routing_tf.layers.support.keras_internals import OwnLosses
from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.not_cast import NotCast
from routing_tf.layers.support.products import product
from routing_tf.layers.support.serialization import ConfiguredLayer
from routing_tf.layers.support.serialization import deserialize
from routing_tf.layers.support.serialization import serialize
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate
from routing_tf.layers.support.validation import static_length
from routing_tf.zoo.parts import arguments

WAVELENGTHS = 1.0e4
EMBEDDINGS_STDDEV = 0.02


class TakesState(keras.layers.Layer):
    """A layer whose call takes a `state` and returns it second, as a value."""

    def __call__(self, *args, state=None, **kwargs):
        if state is not None:
            # Keras would cast its float tensors.
            kwargs["state"] = state if isinstance(state, NotCast) else NotCast(state, 0)
        return super().__call__(*args, **kwargs)


class RecurrentAttention(ConfiguredLayer, TakesState, OwnLosses):
    """Heads with relative positions that read a memory and the segment itself.

    Subclasses keep the memory: they define `make_state` and `call`, which asks
    `attend`. Arguments are those of `TransformerXLAttention`.
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        memory_length,
        segment_length=None,
        max_distance=None,
        dropout=0.0,
        kernel_initializer="glorot_uniform",
        side_attention=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = check_positive_integer("num_heads", num_heads)
        self.key_dim = check_positive_integer("key_dim", key_dim)
        self.memory_length = check_positive_integer("memory_length", memory_length)
        self.segment_length = check_optional_integer("segment_length", segment_length)
        self.max_distance = check_optional_integer("max_distance", max_distance)
        check_rate("dropout", dropout)
        self.dropout = dropout
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.side_attention = _checked_side_attention(deserialize(side_attention))
        self.dropout_layer = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, inputs_shape):
        arguments.tokens_shape(self, inputs_shape)
        self.dim, size = inputs_shape[-1], self.num_heads * self.key_dim
        self.query_dense = self._dense("query", self.dim, size)
        self.key_dense = self._dense("key", self.dim, size)
        self.value_dense = self._dense("value", self.dim, size)
        self.position_dense = self._dense("position", self.dim, size)
        self.output_dense = self._dense("output", size, self.dim)
        self.content_bias = self._bias("content_bias")
        self.position_bias = self._bias("position_bias")
        if self.side_attention is not None:
            self.side_attention.build((None, None, self.dim))

    def _dense(self, name, input_dim, units):
        dense = keras.layers.Dense(
            units,
            use_bias=False,
            kernel_initializer=cloned(self.kernel_initializer),
            name=name,
            dtype=self.dtype_policy,
        )
        dense.build((None, input_dim))
        return dense

    def _bias(self, name):
        return self.add_weight(
            name=name, shape=(self.num_heads, 1, self.key_dim), initializer="zeros"
        )

    def attend(self, x, rows, real, offset, window=None, training=None):
        """Lets tokens read rows, of which they are some.

        Args:
            x: `<float>[batch, length, dim]`, the tokens.
            rows: `<float>[batch, number, dim]`, in the order of time.
            real: `<bool>[batch, number]`, the rows that may be read.
            offset: the row that is the first token, an integer or a scalar tensor.
            window: how many earlier rows a token reads; None (the default) for all.
            training: whether dropout is on and centroids of `side_attention` move.

        Returns:
            The outputs `<float>[batch, length, dim]`, and the attention weights
            `<float32>[batch, heads, length, number]`.
        """
        length, number = length_of(x, 1), length_of(rows, 1)
        query = self.heads(self.query_dense(x))
        key, value = (
            self.heads(dense(rows)) for dense in (self.key_dense, self.value_dense)
        )
        by_content = query + ops.cast(self.content_bias, query.dtype)
        by_position = query + ops.cast(self.position_bias, query.dtype)
        positions = self._positions(offset + length - 1, number)
        logits = product(by_content, key, transpose_y=True) + relative_shift(
            product(by_position, positions, transpose_y=True)
        )
        distances = offset + ops.arange(length, dtype="int32")[:, None]
        distances = distances - ops.arange(number, dtype="int32")
        sees = distances >= 0
        if window is not None:
            sees = ops.logical_and(sees, distances <= window)
        weights = self.weights_of(logits, ops.logical_and(sees, real[:, None, None, :]))
        dropped = self.dropout_layer(weights, training=training)
        output = self._joined(product(ops.cast(dropped, value.dtype), value))
        if self.side_attention is not None:
            output = output + self._beside(rows, real, offset, length, training)
        return output, weights

    def heads(self, x):
        """Splits `[batch, length, size]` to `[batch, heads, length, key_dim]`."""
        shape = (-1, length_of(x, 1), self.num_heads, self.key_dim)
        return ops.swapaxes(ops.reshape(x, shape), 1, 2)

    def weights_of(self, logits, sees):
        """Returns the softmax of scaled logits in float32, zero where nothing is seen.

        Args:
            logits: `<float>[batch, heads, length, number]`.
            sees: `<bool>`, broadcastable to them.
        """
        logits = ops.cast(logits, "float32") * self.key_dim**-0.5
        weights = ops.softmax(ops.where(sees, logits, large_negative("float32")))
        return ops.where(sees, weights, 0.0)

    def _joined(self, x):
        x = ops.swapaxes(x, 1, 2)
        size = self.num_heads * self.key_dim
        return self.output_dense(ops.reshape(x, (-1, length_of(x, 1), size)))

    def _positions(self, largest, number):
        """Returns vectors `[heads, number, key_dim]` of distances that fall by one."""
        distances = ops.cast(largest - ops.arange(number, dtype="int32"), "float32")
        if self.max_distance is not None:
            distances = ops.minimum(distances, float(self.max_distance))
        half = -(-self.dim // 2)
        exponents = np.arange(half, dtype="float32") / half
        frequencies = ops.convert_to_tensor((WAVELENGTHS**-exponents).astype("float32"))
        angles = distances[:, None] * frequencies
        waves = ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)
        vectors = self.position_dense(waves[:, : self.dim])
        return self.heads(vectors[None])[0]

    def _beside(self, rows, real, offset, length, training):
        """Returns what the tokens have of `side_attention`, which reads all rows."""
        output = self.side_attention(
            rows, query_mask=real, use_causal_mask=True, training=training
        )
        places = offset + ops.arange(length, dtype="int32")
        return ops.cast(ops.take(output, places, axis=1), self.compute_dtype)

    def check_built(self):
        """Raises a `ValueError` if the layer does not know the size of its inputs."""
        if not self.built:
            raise ValueError(
                "`make_state` needs a layer that is built. Received: built=False with "
                f"name={self.name!r}. Call it before, or `build((None, None, dim))`"
            )

    def check_state(self, memory, x):
        """Raises a `ValueError` if a memory does not fit the inputs."""
        if len(memory.shape) == 3 and memory.shape[-1] == self.dim:
            if None in (memory.shape[0], x.shape[0]) or memory.shape[0] == x.shape[0]:
                return
        raise ValueError(
            "`state` must be what `make_state` or an earlier call returned for as many "
            f"sequences. Received: memory of shape {tuple(memory.shape)}, inputs of "
            f"shape {tuple(x.shape)}"
        )

    def empty(self, batch_size, length):
        """Returns a memory of a length that holds nothing, and its mask."""
        memory = ops.zeros((batch_size, length, self.dim), dtype=self.compute_dtype)
        return memory, ops.zeros((batch_size, length), dtype="bool")

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


@keras.saving.register_keras_serializable("routing_tf")
class RecurrentBlock(ConfiguredLayer, TakesState):
    """A `RecurrentAttention` and a feed-forward layer, each with a residual."""

    def __init__(
        self, attention, feed_forward, norm_position="post", dropout=0.0, **kwargs
    ):
        super().__init__(**kwargs)
        check_choice("norm_position", norm_position, tuple(STEPS))
        self.attention = deserialize(attention)
        self.feed_forward = deserialize(feed_forward)
        self.norm_position = norm_position
        self.dropout = dropout
        for part in ("attention", "feed_forward"):
            for side, steps in zip(("input", "output"), STEPS[norm_position]):
                name = f"{part}_{side}"
                layer = layers.SublayerSteps(
                    steps, dropout, name=name, dtype=self.dtype_policy
                )
                setattr(self, name, layer)

    def build(self, inputs_shape):
        for part in ("attention", "feed_forward"):
            for name in (f"{part}_input", part, f"{part}_output"):
                getattr(self, name).build(inputs_shape)

    def call(self, inputs, padding_mask=None, training=None, state=None):
        normal = self.attention_input(inputs, training=training)
        attended = self.attention(
            normal, mask=padding_mask, training=training, state=state
        )
        if state is not None:
            attended, state = attended
        x = self.attention_output(attended, residual=inputs, training=training)
        y = self.feed_forward(self.feed_forward_input(x), training=training)
        y = self.feed_forward_output(y, residual=x, training=training)
        return y if state is None else (y, state)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


class RecurrentBackbone(ConfiguredLayer, TakesState, keras.Model):
    """Embeddings and blocks of attention with a memory.

    Subclasses pass `make_attention`, a function that makes the attention of a block
    from the arguments that all have. The others are those of `TransformerXLBackbone`.
    """

    def __init__(
        self,
        make_attention,
        vocabulary_size,
        num_layers,
        num_heads,
        hidden_dim,
        intermediate_dim,
        key_dim=None,
        activation="relu",
        norm_position="post",
        dropout=0.0,
        attention_dropout=0.0,
        side_attention=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.vocabulary_size = check_positive_integer(
            "vocabulary_size", vocabulary_size
        )
        self.num_layers = check_positive_integer("num_layers", num_layers)
        self.num_heads = check_positive_integer("num_heads", num_heads)
        self.hidden_dim = check_positive_integer("hidden_dim", hidden_dim)
        self.intermediate_dim = intermediate_dim
        self.key_dim = check_optional_integer("key_dim", key_dim)
        self.activation = activation
        self.norm_position = norm_position
        check_rate("dropout", dropout)
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        own = {"dtype": self.dtype_policy}
        self.token_embedding = layers.TokenEmbedding(
            self.vocabulary_size,
            self.hidden_dim,
            keras.initializers.RandomNormal(stddev=EMBEDDINGS_STDDEV),
            scale=True,
            name="token_embedding",
            **own,
        )
        self.embedding_dropout = keras.layers.Dropout(dropout, **own)
        side = _checked_side_attention(deserialize(side_attention))
        self.blocks = [
            self._block(index, make_attention, side) for index in range(self.num_layers)
        ]
        self.final_norm = None
        if norm_position == "pre":
            self.final_norm = keras.layers.LayerNormalization(
                epsilon=LAYER_NORM_EPSILON, name="final_norm", **own
            )
        self._build_layers()

    def _block(self, index, make_attention, side):
        own = {"dtype": self.dtype_policy}
        attention = make_attention(
            self.num_heads,
            self._size_of_key(),
            dropout=self.attention_dropout,
            # Each block has its own weights.
            side_attention=None if side is None else serialize(side),
            name="attention",
            **own,
        )
        feed_forward = layers.FeedForward(
            self.intermediate_dim, self.activation, name="feed_forward", **own
        )
        return RecurrentBlock(
            attention,
            feed_forward,
            self.norm_position,
            self.dropout,
            name=f"block_{index}",
            **own,
        )

    def _size_of_key(self):
        if self.key_dim is not None:
            return self.key_dim
        if self.hidden_dim % self.num_heads:
            raise ValueError(
                "`num_heads` must divide `hidden_dim`. Received: "
                f"num_heads={self.num_heads}, hidden_dim={self.hidden_dim}. Set "
                "`key_dim` for heads of another size"
            )
        return self.hidden_dim // self.num_heads

    def _build_layers(self):
        shape = (None, None, self.hidden_dim)
        self.token_embedding.build(shape[:2])
        for block in self.blocks:
            block.build(shape)
        if self.final_norm is not None:
            self.final_norm.build(shape)
        self.build(None)

    def build(self, inputs_shape):
        """Does nothing: a new backbone has all its weights."""

    @property
    def side_attention(self):
        """The attention beside the heads with a memory in the first block, or None."""
        return self.blocks[0].attention.side_attention

    def make_state(self, batch_size, **lengths):
        """Makes the state of texts of which nothing was read.

        Args:
            batch_size: number of texts.
            **lengths: numbers of positions, for other memories than those of the
                constructor, see `make_state` of the attention layer.

        Returns:
            A structure of tensors of fixed sizes with the batch on axis 0.

        Raises:
            ValueError: if a number is not a positive integer, or does not fit.
        """
        return [
            block.attention.make_state(batch_size, **lengths) for block in self.blocks
        ]

    def call(self, inputs, training=None, state=None):
        is_dict = isinstance(inputs, dict)
        token_ids = inputs["token_ids"] if is_dict else inputs
        padding_mask = inputs.get("padding_mask") if is_dict else None
        x = self.token_embedding(token_ids)
        x = self.embedding_dropout(x, training=training)
        states = [None] * self.num_layers if state is None else state.cache
        after = []
        for block, own in zip(self.blocks, states, strict=True):
            x = block(x, padding_mask=padding_mask, training=training, state=own)
            if own is not None:
                x, own = x
                after.append(own)
        x = x if self.final_norm is None else self.final_norm(x)
        return x if state is None else (x, after)

    def compute_output_shape(self, inputs_shape):
        ids = inputs_shape
        if isinstance(inputs_shape, dict):
            ids = inputs_shape["token_ids"]
        return (*ids, self.hidden_dim)


def without_padding(x, mask):
    """Returns tokens with zeros at padding, and which of them are real."""
    if mask is None:
        return x, ops.ones(ops.shape(x)[:2], dtype="bool")
    real = ops.cast(mask, "bool")
    return ops.where(real[..., None], x, ops.zeros_like(x)), real


def segments(x, real, length):
    """Yields the tokens and the mask of each segment; None for one segment."""
    if length is None:
        yield x, real
        return
    for start in range(0, static_length("inputs", x), length):
        yield x[:, start : start + length], real[:, start : start + length]


def relative_shift(x):
    """Moves row i of `[batch, heads, length, number]` by `length - 1 - i` to the left.

    What comes in on the right belongs to other rows, and must be masked.
    """
    heads, (length, number) = x.shape[1], (length_of(x, axis) for axis in (2, 3))
    x = ops.pad(x, [[0, 0], [0, 0], [0, 0], [1, 0]])
    x = ops.reshape(x, (-1, heads, number + 1, length))[:, :, 1:]
    return ops.reshape(x, (-1, heads, length, number))


def joined(outputs):
    """Returns the outputs of segments as one tensor."""
    return outputs[0] if len(outputs) == 1 else ops.concatenate(outputs, axis=1)


def _checked_side_attention(layer):
    if layer is None or isinstance(layer, layers.MixedAttention):
        return layer
    raise ValueError(
        "`side_attention` must be a `MixedAttention` or `RoutingAttention` layer, or "
        f"None. Received: side_attention={layer!r}"
    )
