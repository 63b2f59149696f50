"""Transformer-XL: each segment reads the hidden states of the tokens before it."""

import keras
from keras import ops

from routing_tf import layers
from routing_tf.layers.blocks.transformer_block import LAYER_NORM_EPSILON
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.configs import serialize
from routing_tf.layers.support.keras_internals import OwnLosses
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate
from routing_tf.layers.support.validation import initializer
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.blocks import size_of_head
from routing_tf.zoo.recurrence.segments import RecurrentBlock
from routing_tf.zoo.recurrence.segments import TakesState
from routing_tf.zoo.recurrence.segments import checked_side_attention
from routing_tf.zoo.recurrence.segments import checked_state
from routing_tf.zoo.recurrence.segments import checked_states
from routing_tf.zoo.recurrence.segments import empty_memories
from routing_tf.zoo.recurrence.segments import relative_shift
from routing_tf.zoo.recurrence.segments import segments
from routing_tf.zoo.recurrence.segments import sinusoids

__all__ = ["TransformerXLAttention", "TransformerXLBackbone"]


STATE = ("memory", "memory_mask")

EMBEDDINGS_STDDEV = 0.02


@keras.saving.register_keras_serializable("routing_tf")
class TransformerXLAttention(ConfiguredLayer, TakesState, OwnLosses):
    """Causal attention to a segment and to a memory of the inputs before it.

    The memory holds earlier inputs of the layer, and no gradient flows into it. A logit
    is the product of a key with the query plus a learned content bias, and of a
    projected sinusoid of the distance with the query plus a learned position bias. All
    of these belong to the layer (`untie_r` in the authors' code).

    A call without a state begins a text, and splits it into segments if there is a
    `segment_length`, so `fit` trains with recurrence. A call with a state goes on with
    a text. A token reads its segment up to itself and the memory before the segment, so
    outputs depend on where segments end, unless the memory holds all earlier tokens.
    With `same_length` a token reads itself and `memory_length` tokens before it, and
    outputs are the same however a text is split, unless there is `side_attention`.

    Outputs depend on no later token, except with expert choice in `side_attention`,
    which leaks inside a segment.

    Args:
        num_heads: number of heads.
        key_dim: size of a query, key or value of one head.
        memory_length: number of positions that the memory holds.
        segment_length: number of positions of a segment; None (the default) for calls
            that are one segment each.
        same_length: whether all tokens read equally far back. Defaults to False.
        dropout: rate of dropped attention weights, in [0, 1). Defaults to 0.0.
        kernel_initializer: initializer of all projections. Defaults to
            `"glorot_uniform"`.
        side_attention: a `MixedAttention` or `RoutingAttention` layer that reads memory
            and segment as one sequence, and whose output is added. Training moves its
            centroids with the memory, too. None (the default) for none.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.
            Attention weights are computed in float32 under every policy.

    Call arguments:
        inputs: `<float>[batch, length, dim]`.
        mask: `<bool>[batch, length]`, True for real tokens; None for no padding.
            Defaults to the Keras mask of `inputs`. Padding has positions, but nobody
            reads it.
        training: whether dropout is on and centroids of `side_attention` move.
        state: what `make_state` or an earlier call returned; None (the default) for
            the beginning of a text.

    Returns:
        `<float>[batch, length, dim]`; with a state, a pair: this tensor, and the state
        after these tokens.

    Raises:
        ValueError: when called, if the state is of other inputs.

    Example:

    ```python
    import numpy as np
    from routing_tf import zoo

    attention = zoo.TransformerXLAttention(num_heads=2, key_dim=8, memory_length=16)
    x = np.random.default_rng(0).normal(size=(2, 24, 16)).astype("float32")
    assert attention(x).shape == (2, 24, 16)
    state = attention.make_state(batch_size=2)
    for start in range(0, 24, 8):
        output, state = attention(x[:, start : start + 8], state=state)
    assert output.shape == (2, 8, 16)
    ```

    Reference: Dai et al., "Transformer-XL: Attentive Language Models beyond a
    Fixed-Length Context" (https://arxiv.org/abs/1901.02860), section 3. Tested only
    against NumPy code of this repository.
    """

    num_heads = Argument(check_positive_integer)
    key_dim = Argument(check_positive_integer)
    memory_length = Argument(check_positive_integer)
    segment_length = Argument(check_optional_integer)
    same_length = Argument(check_flag)
    dropout = Argument(check_rate)
    kernel_initializer = Argument(initializer)

    def __init__(
        self,
        num_heads,
        key_dim,
        memory_length,
        segment_length=None,
        same_length=False,
        dropout=0.0,
        kernel_initializer="glorot_uniform",
        side_attention=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = num_heads
        self.key_dim = key_dim
        self.memory_length = memory_length
        self.segment_length = segment_length
        self.same_length = same_length
        self.dropout = dropout
        self.kernel_initializer = kernel_initializer
        self.side_attention = checked_side_attention(side_attention)
        self.dropout_layer = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, inputs_shape):
        refusals.tokens_shape(self, inputs_shape)
        self.dim, size = inputs_shape[-1], self.num_heads * self.key_dim
        self.query_dense = self._dense("query", self.dim, size)
        self.key_dense = self._dense("key", self.dim, size)
        self.value_dense = self._dense("value", self.dim, size)
        self.position_dense = self._dense("position", self.dim, size)
        self.output_dense = self._dense("output", size, self.dim)
        shape = (self.num_heads, 1, self.key_dim)
        self.content_bias = self.add_weight(shape, "zeros", name="content_bias")
        self.position_bias = self.add_weight(shape, "zeros", name="position_bias")
        if self.side_attention is not None and not self.side_attention.built:
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

    def _attend(self, x, rows, real, offset, window=None, training=None):
        """Lets tokens `x` read rows that are real, up to themselves.

        The first token is the row `offset`, an integer or a scalar tensor; with a
        `window` tokens read only so many rows before themselves. Returns outputs, and
        attention weights `<float32>[batch, heads, length, number of rows]`.
        """
        length, number = length_of(x, 1), length_of(rows, 1)
        query = self._heads(self.query_dense(x))
        key = self._heads(self.key_dense(rows))
        value = self._heads(self.value_dense(rows))
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
        weights = self._weights(logits, sees)
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

    def _heads(self, x):
        """Splits `[batch, length, size]` to `[batch, heads, length, key_dim]`."""
        shape = (-1, length_of(x, 1), self.num_heads, self.key_dim)
        return ops.swapaxes(ops.reshape(x, shape), 1, 2)

    def _weights(self, logits, sees):
        """Returns the softmax in float32 of what is seen, zero elsewhere."""
        logits = ops.cast(logits, "float32") * self.key_dim**-0.5
        weights = ops.softmax(ops.where(sees, logits, large_negative("float32")))
        return ops.where(sees, weights, 0.0)

    def _positions(self, largest, number):
        """Returns vectors `[heads, number, key_dim]` of distances that fall by one."""
        distances = largest - ops.arange(number, dtype="int32")
        waves = sinusoids(distances, self.dim)
        return self._heads(self.position_dense(waves)[None])[0]

    def make_state(self, batch_size, memory_length=None):
        """Makes the state of unread texts; None for the layer's `memory_length`."""
        check_positive_integer("batch_size", batch_size)
        length = self.memory_length if memory_length is None else memory_length
        return empty_memories(self, batch_size, memory=length)

    def call(self, inputs, mask=None, training=None, state=None):
        refusals.tokens_shape(self, inputs.shape, self.dim)
        x, real = refusals.without_padding(inputs, mask)
        if state is None:
            memory, seen = self._nothing(x, real)
            memory_length = self.memory_length
        else:
            state = checked_state(state, x, STATE)
            memory, seen = state["memory"], state["memory_mask"]
            memory_length = memory.shape[1]
        window = memory_length if self.same_length else None
        outputs = []
        for own, own_real in segments(x, real, self.segment_length):
            offset = length_of(memory, 1)
            rows = ops.concatenate([memory, own], axis=1)
            seen = ops.concatenate([seen, own_real], axis=1)
            output, _ = self._attend(own, rows, seen, offset, window, training)
            outputs.append(output)
            memory = ops.stop_gradient(rows[:, -memory_length:])
            seen = seen[:, -memory_length:]
        output = ops.concatenate(outputs, axis=1)
        if state is None:
            return output
        return output, {"memory": memory, "memory_mask": seen}

    def _nothing(self, x, real):
        """Returns the memory before a text, and its mask.

        Beside other attention it has as many rows as later.
        """
        if self.side_attention is None:
            return x[:, :0], real[:, :0]
        shape = (ops.shape(x)[0], self.memory_length)
        return ops.zeros((*shape, self.dim), x.dtype), ops.zeros(shape, "bool")

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


@keras.saving.register_keras_serializable("routing_tf")
class TransformerXLBackbone(ConfiguredLayer, TakesState, keras.Model):
    """A causal transformer that reads texts of any length segment by segment.

    Maps token ids to hidden states. Each block has a `TransformerXLAttention`. With a
    state a call returns the next one, a value, for the parts of the texts that follow.
    A longer memory in evaluation needs no other weights. Through the blocks, an output
    depends on up to `num_layers * memory_length` tokens before its segment.

    Args:
        vocabulary_size: number of token ids.
        num_layers: number of blocks.
        num_heads: number of heads of a block.
        hidden_dim: size of a hidden state.
        intermediate_dim: size between the two linear maps of the feed-forward layers.
        memory_length: number of positions that a memory holds.
        segment_length: number of positions of a segment; None (the default) for calls
            that are one segment each.
        same_length: whether all tokens read equally far back. Defaults to False.
        key_dim: size of a head; None (the default) for `hidden_dim // num_heads`.
        activation: of the feed-forward layers, see `layers.FeedForward`. Defaults to
            `"relu"`.
        norm_position: `"post"` (the default, as in the paper) or `"pre"`, see
            `layers.TransformerBlock`. With `"pre"` memories hold normalized inputs.
        dropout: rate of dropped embeddings, and of dropped outputs of the parts of a
            block, in [0, 1). Defaults to 0.0.
        attention_dropout: rate of dropped attention weights. Defaults to 0.0.
        side_attention: a `MixedAttention` or `RoutingAttention` layer whose heads come
            beside those with a memory, and read the memory, too; each block has a copy
            with weights of its own. None (the default) for none.
        **kwargs: arguments of `keras.Model`, such as `name` and `dtype`.

    Call arguments:
        inputs: `<int>[batch, length]`, token ids; or a dict of them, `"token_ids"`, and
            of `"padding_mask"` `<bool>[batch, length]`, True for real tokens.
        training: whether dropout is on and centroids of `side_attention` move.
        state: what `make_state` or an earlier call returned; None (the default) for
            the beginning of texts.

    Returns:
        `<float>[batch, length, hidden_dim]`; with a state, a pair: this tensor, and the
        state after these tokens.

    Raises:
        ValueError: if `num_heads` does not divide `hidden_dim` and there is no
            `key_dim`; when called, if the state is of other inputs.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    routed = layers.RoutingAttention(2, 8, num_clusters=4, attention_window=16)
    backbone = zoo.TransformerXLBackbone(
        256, 2, 2, 16, 32, memory_length=16, side_attention=routed
    )
    ids = np.random.default_rng(0).integers(0, 256, (1, 24))
    state = backbone.make_state(batch_size=1)
    first, state = backbone(ids[:, :16], state=state)
    rest, state = backbone(ids[:, 16:], state=state)
    assert rest.shape == (1, 8, 16)
    ```

    Reference: Dai et al. (https://arxiv.org/abs/1901.02860).
    """

    _attention_class = TransformerXLAttention
    _attention_arguments = ("memory_length", "segment_length", "same_length")

    num_layers = Argument(check_positive_integer)
    num_heads = Argument(check_positive_integer)
    hidden_dim = Argument(check_positive_integer)
    memory_length = Argument(check_positive_integer)
    segment_length = Argument(check_optional_integer)
    key_dim = Argument(check_optional_integer)
    dropout = Argument(check_rate)

    def __init__(
        self,
        vocabulary_size,
        num_layers,
        num_heads,
        hidden_dim,
        intermediate_dim,
        memory_length,
        segment_length=None,
        same_length=False,
        key_dim=None,
        activation="relu",
        norm_position="post",
        dropout=0.0,
        attention_dropout=0.0,
        side_attention=None,
        **kwargs,
    ):
        # Ids that come as floats would be cast to half precision.
        super().__init__(autocast=False, **kwargs)
        self.vocabulary_size = vocabulary_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.hidden_dim = hidden_dim
        self.intermediate_dim = intermediate_dim
        self.key_dim = key_dim
        self.activation = activation
        self.norm_position = norm_position
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.memory_length = memory_length
        self.segment_length = segment_length
        self.same_length = same_length
        self._make_layers(checked_side_attention(side_attention))
        self.build((None, None))

    def _make_layers(self, side):
        own = {"dtype": self.dtype_policy}
        normal = keras.initializers.RandomNormal(stddev=EMBEDDINGS_STDDEV)
        self.token_embedding = layers.TokenEmbedding(
            self.vocabulary_size, self.hidden_dim, normal, True, name="embedding", **own
        )
        self.embedding_dropout = keras.layers.Dropout(self.dropout, **own)
        size = self.key_dim or size_of_head(self.hidden_dim, self.num_heads)
        options = {name: getattr(self, name) for name in self._attention_arguments}
        options |= {"dropout": self.attention_dropout, "name": "attention", **own}
        self.blocks = []
        for index in range(self.num_layers):
            # From its config, as each block has weights of its own.
            options["side_attention"] = None if side is None else serialize(side)
            feed_forward = layers.FeedForward(
                self.intermediate_dim, self.activation, name="feed_forward", **own
            )
            block = RecurrentBlock(
                self._attention_class(self.num_heads, size, **options),
                feed_forward,
                self.norm_position,
                self.dropout,
                name=f"block_{index}",
                **own,
            )
            self.blocks.append(block)
        self.final_norm = None
        if self.norm_position == "pre":
            self.final_norm = keras.layers.LayerNormalization(
                epsilon=LAYER_NORM_EPSILON, name="final_norm", **own
            )

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

        `lengths` are those of `make_state` of the attention layer.
        """
        return [
            block.attention.make_state(batch_size, **lengths) for block in self.blocks
        ]

    def call(self, inputs, training=None, state=None):
        inputs = inputs if isinstance(inputs, dict) else {"token_ids": inputs}
        _check_inputs(inputs)
        padding_mask = inputs.get("padding_mask")
        x = self.token_embedding(inputs["token_ids"])
        x = self.embedding_dropout(x, training=training)
        states, after = [None] * self.num_layers, []
        if state is not None:
            states = checked_states(state, self.num_layers)
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


def _check_inputs(inputs):
    """Raises a `ValueError` unless there are ids, and nothing unknown."""
    shape = getattr(inputs.get("token_ids"), "shape", ())
    if len(shape) != 2 or not set(inputs) <= {"token_ids", "padding_mask"}:
        raise ValueError(
            "Inputs must be token ids [batch, length], or a dict of them as "
            "'token_ids', and of a 'padding_mask'. Received: "
            f"{sorted(inputs)}, ids of the shape {tuple(shape)}"
        )
