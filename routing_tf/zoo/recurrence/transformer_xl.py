"""Transformer-XL: each segment reads the hidden states of the tokens before it."""

import keras

from routing_tf import layers
from routing_tf.layers.blocks.transformer_block import LAYER_NORM_EPSILON
from routing_tf.layers.support.argument import Argument
from routing_tf.layers.support.serialization import ConfiguredLayer
from routing_tf.layers.support.serialization import serialize
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate
from routing_tf.zoo.parts.blocks import size_of_head
from routing_tf.zoo.recurrence.segments import RecurrentBlock
from routing_tf.zoo.recurrence.segments import TakesState
from routing_tf.zoo.recurrence.segments import checked_side_attention
from routing_tf.zoo.recurrence.segments import checked_states
from routing_tf.zoo.recurrence.transformer_xl_attention import TransformerXLAttention

__all__ = ["TransformerXLBackbone"]

EMBEDDINGS_STDDEV = 0.02


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
