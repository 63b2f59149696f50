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
        if isinstance(state, NotCast):
            kwargs["state"] = state
        elif state is not None:
            # Keras would cast its float tensors.
            state = keras.tree.map_structure(ops.convert_to_tensor, state)
            kwargs["state"] = NotCast(state, None)
        return super().__call__(*args, **kwargs)


class RecurrentAttention(ConfiguredLayer, TakesState, OwnLosses):
    """Heads with relative positions that read a memory and the segment itself.

    Subclasses keep the memory: they define `make_state`, and a `call` that asks
    `attend`. `TransformerXLAttention` tells what the arguments are.
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        memory_length,
        segment_length=None,
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
        check_rate("dropout", dropout)
        self.dropout = dropout
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.side_attention = _checked_side_attention(side_attention)
        self.dropout_layer = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, inputs_shape):
        arguments.tokens_shape(self, inputs_shape)
        self.dim, size = inputs_shape[-1], self.num_heads * self.key_dim
        for name in ("query", "key", "value", "position"):
            setattr(self, f"{name}_dense", self._dense(name, self.dim, size))
        self.output_dense = self._dense("output", size, self.dim)
        shape = (self.num_heads, 1, self.key_dim)
        self.content_bias = self.add_weight(shape, "zeros", name="content_bias")
        self.position_bias = self.add_weight(shape, "zeros", name="position_bias")
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

    def attend(self, x, rows, real, offset, window=None, training=None):
        """Lets tokens `x` read rows that are real, up to themselves.

        The first token is the row `offset`, an integer or a scalar tensor; with a
        `window` tokens read only so many rows before themselves. Returns outputs, and
        attention weights `<float32>[batch, heads, length, number of rows]`.
        """
        length, number = length_of(x, 1), length_of(rows, 1)
        query = self.heads(self.query_dense(x))
        key = self.heads(self.key_dense(rows))
        value = self.heads(self.value_dense(rows))
        position = self._positions(offset + length - 1, number)
        by_content = query + ops.cast(self.content_bias, query.dtype)
        by_position = query + ops.cast(self.position_bias, query.dtype)
        logits = product(by_content, key, transpose_y=True) + relative_shift(
            product(by_position, position, transpose_y=True)
        )
        places = offset + ops.arange(length, dtype="int32")
        distances = places[:, None] - ops.arange(number, dtype="int32")
        sees = ops.logical_and(distances >= 0, real[:, None, None])
        if window is not None:
            sees = ops.logical_and(sees, distances <= window)
        weights = self.weights_of(logits, sees)
        dropped = self.dropout_layer(weights, training=training)
        attended = product(ops.cast(dropped, value.dtype), value)
        attended = ops.reshape(
            ops.swapaxes(attended, 1, 2), (-1, length, self.num_heads * self.key_dim)
        )
        output = self.output_dense(attended)
        if self.side_attention is not None:
            beside = self.side_attention(
                rows, query_mask=real, use_causal_mask=True, training=training
            )
            beside = ops.take(beside, places, axis=1)
            output = output + ops.cast(beside, output.dtype)
        return output, weights

    def heads(self, x):
        """Splits `[batch, length, size]` to `[batch, heads, length, key_dim]`."""
        shape = (-1, length_of(x, 1), self.num_heads, self.key_dim)
        return ops.swapaxes(ops.reshape(x, shape), 1, 2)

    def weights_of(self, logits, sees):
        """Returns the softmax in float32 of what is seen, zero elsewhere."""
        logits = ops.cast(logits, "float32") * self.key_dim**-0.5
        weights = ops.softmax(ops.where(sees, logits, large_negative("float32")))
        return ops.where(sees, weights, 0.0)

    def _positions(self, largest, number):
        """Returns vectors `[heads, number, key_dim]` of distances that fall by one."""
        distances = ops.cast(largest - ops.arange(number, dtype="int32"), "float32")
        half = -(-self.dim // 2)
        exponents = np.arange(half, dtype="float32") / half
        frequencies = ops.convert_to_tensor((WAVELENGTHS**-exponents).astype("float32"))
        angles = distances[:, None] * frequencies
        waves = ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)
        vectors = self.position_dense(waves[:, : self.dim])
        return self.heads(vectors[None])[0]

    def empty_memories(self, batch_size, **lengths):
        """Returns memories that hold nothing, and their masks, by name."""
        if not self.built:
            raise ValueError(
                "`make_state` needs a layer that is built. Received: built=False with "
                f"name={self.name!r}. Call it before, or `build((None, None, dim))`"
            )
        state = {}
        for name, length in lengths.items():
            check_positive_integer(f"{name}_length", length)
            shape = (batch_size, length, self.dim)
            state[name] = ops.zeros(shape, dtype=self.compute_dtype)
            state[f"{name}_mask"] = ops.zeros(shape[:2], dtype="bool")
        return state

    def checked_state(self, state, x):
        """Returns the dict of a state; a `ValueError` if it is of other inputs."""
        shape = state.cache["memory"].shape
        if shape[-1] == x.shape[-1] and {shape[0], x.shape[0]} <= {None, shape[0]}:
            return state.cache
        raise ValueError(
            "`state` must be what `make_state` or an earlier call returned for as many "
            f"texts. Received: a memory of shape {tuple(shape)} with inputs of shape "
            f"{tuple(x.shape)}"
        )

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


@keras.saving.register_keras_serializable("routing_tf")
class RecurrentBlock(ConfiguredLayer, TakesState):
    """A `RecurrentAttention` and a feed-forward layer, each with a residual."""

    def __init__(self, attention, feed_forward, norm_position, dropout, **kwargs):
        super().__init__(**kwargs)
        check_choice("norm_position", norm_position, tuple(STEPS))
        self.supports_masking = True
        self.attention = deserialize(attention)
        self.feed_forward = deserialize(feed_forward)
        self.norm_position = norm_position
        self.dropout = dropout
        self.attention_input = self._steps("attention_input", 0)
        self.attention_output = self._steps("attention_output", 1)
        self.feed_forward_input = self._steps("feed_forward_input", 0)
        self.feed_forward_output = self._steps("feed_forward_output", 1)

    def _steps(self, name, side):
        steps, own = STEPS[self.norm_position][side], {"dtype": self.dtype_policy}
        return layers.SublayerSteps(steps, self.dropout, name=name, **own)

    def build(self, inputs_shape):
        for part in ("attention", "feed_forward"):
            for name in (f"{part}_input", part, f"{part}_output"):
                getattr(self, name).build(inputs_shape)

    def call(self, inputs, padding_mask=None, training=None, state=None):
        x = self.attention_input(inputs, training=training)
        x = self.attention(x, mask=padding_mask, training=training, state=state)
        if state is not None:
            x, state = x
        x = self.attention_output(x, residual=inputs, training=training)
        y = self.feed_forward(self.feed_forward_input(x), training=training)
        y = self.feed_forward_output(y, residual=x, training=training)
        return y if state is None else (y, state)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


class RecurrentBackbone(ConfiguredLayer, TakesState, keras.Model):
    """Embeddings, and blocks whose attention has a memory.

    Subclasses pass the class of the attention and a dict of its arguments, which become
    attributes. `TransformerXLBackbone` tells what the others are.
    """

    def __init__(
        self,
        attention_class,
        attention_arguments,
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
        self.vocabulary_size = vocabulary_size
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
        for name, value in attention_arguments.items():
            setattr(self, name, value)
        self._make_layers(
            lambda **options: attention_class(**attention_arguments, **options),
            _checked_side_attention(side_attention),
        )
        self.build(None)

    def _make_layers(self, make_attention, side):
        own = {"dtype": self.dtype_policy}
        normal = keras.initializers.RandomNormal(stddev=EMBEDDINGS_STDDEV)
        self.token_embedding = layers.TokenEmbedding(
            self.vocabulary_size, self.hidden_dim, normal, True, name="embedding", **own
        )
        self.embedding_dropout = keras.layers.Dropout(self.dropout, **own)
        self.blocks = []
        for index in range(self.num_layers):
            attention = make_attention(
                num_heads=self.num_heads,
                key_dim=self._size_of_key(),
                dropout=self.attention_dropout,
                # From its config, as each block has weights of its own.
                side_attention=None if side is None else serialize(side),
                name="attention",
                **own,
            )
            feed_forward = layers.FeedForward(
                self.intermediate_dim, self.activation, name="feed_forward", **own
            )
            self.blocks.append(
                RecurrentBlock(
                    attention,
                    feed_forward,
                    self.norm_position,
                    self.dropout,
                    name=f"block_{index}",
                    **own,
                )
            )
        self.final_norm = None
        if self.norm_position == "pre":
            self.final_norm = keras.layers.LayerNormalization(
                epsilon=LAYER_NORM_EPSILON, name="final_norm", **own
            )

    def _size_of_key(self):
        if self.key_dim is None and self.hidden_dim % self.num_heads:
            raise ValueError(
                "`num_heads` must divide `hidden_dim`. Received: "
                f"num_heads={self.num_heads}, hidden_dim={self.hidden_dim}. Set "
                "`key_dim` for heads of another size"
            )
        return self.key_dim or self.hidden_dim // self.num_heads

    def build(self, inputs_shape):
        if self.built:
            return  # a new backbone has its weights
        self.token_embedding.build((None, None))
        for layer in filter(None, [*self.blocks, self.final_norm]):
            layer.build((None, None, self.hidden_dim))

    @property
    def side_attention(self):
        """The attention beside the heads with a memory in the first block, or None."""
        return self.blocks[0].attention.side_attention

    def make_state(self, batch_size, **lengths):
        """Makes the state of texts of which nothing was read.

        Args:
            batch_size: number of texts.
            **lengths: lengths of memories other than those of the constructor, as in
                `make_state` of the attention layer.

        Returns:
            A structure of tensors of fixed sizes with the batch on axis 0.

        Raises:
            ValueError: if a number is not a positive integer, or does not fit.
        """
        return [
            block.attention.make_state(batch_size, **lengths) for block in self.blocks
        ]

    def call(self, inputs, training=None, state=None):
        inputs = inputs if isinstance(inputs, dict) else {"token_ids": inputs}
        padding_mask = inputs.get("padding_mask")
        x = self.token_embedding(inputs["token_ids"])
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
        if isinstance(inputs_shape, dict):
            inputs_shape = inputs_shape["token_ids"]
        return (*inputs_shape, self.hidden_dim)


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


def _checked_side_attention(layer):
    layer = deserialize(layer)
    if layer is None or isinstance(layer, layers.MixedAttention):
        return layer
    raise ValueError(
        "`side_attention` must be a `MixedAttention` or `RoutingAttention` layer, or "
        f"None. Received: side_attention={layer!r}"
    )
