"""Transformer-XL: each segment reads the hidden states of the tokens before it."""

import keras
from keras import ops

from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.zoo.parts import arguments
from routing_tf.zoo.recurrence.segments import RecurrentAttention
from routing_tf.zoo.recurrence.segments import RecurrentBackbone
from routing_tf.zoo.recurrence.segments import segments

__all__ = ["TransformerXLAttention", "TransformerXLBackbone"]


@keras.saving.register_keras_serializable("routing_tf")
class TransformerXLAttention(RecurrentAttention):
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
    outputs are the same however a text is split.

    Args:
        num_heads: number of heads.
        key_dim: size of a query, key or value of one head.
        memory_length: number of positions that the memory holds.
        same_length: whether all tokens read equally far back. Defaults to False.
        segment_length: number of positions of a segment; None (the default) for calls
            that are one segment each.
        dropout: rate of dropped attention weights, in [0, 1). Defaults to 0.0.
        kernel_initializer: initializer of all projections. Defaults to
            `"glorot_uniform"`.
        side_attention: a `MixedAttention` or `RoutingAttention` layer that reads memory
            and segment as one sequence, and whose output is added. Training moves its
            centroids with the memory, too. None (the default) for none.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`. Attention
            weights are computed in float32 under every policy.

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
        ValueError: if an argument is out of its range; when called, if inputs do not
            have three axes, or the state is of other inputs.

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

    def __init__(self, num_heads, key_dim, memory_length, same_length=False, **kwargs):
        super().__init__(num_heads, key_dim, memory_length, **kwargs)
        check_choice("same_length", same_length, (False, True))
        self.same_length = same_length

    def make_state(self, batch_size, memory_length=None):
        """Makes the state of texts of which nothing was read.

        Args:
            batch_size: number of texts.
            memory_length: number of positions that the memory holds, which may differ
                from that in training; None (the default) for that of the layer.

        Returns:
            A dict of `"memory"`, `<float>[batch, memory_length, dim]`, and
            `"memory_mask"`, `<bool>[batch, memory_length]`.

        Raises:
            ValueError: if a number is not a positive integer, or the layer is not
                built.
        """
        check_positive_integer("batch_size", batch_size)
        length = self.memory_length if memory_length is None else memory_length
        return self.empty_memories(batch_size, memory=length)

    def call(self, inputs, mask=None, training=None, state=None):
        x, real = arguments.without_padding(inputs, mask)
        if state is None:
            memory, seen, memory_length = x[:, :0], real[:, :0], self.memory_length
        else:
            state = self.checked_state(state, x)
            memory, seen = state["memory"], state["memory_mask"]
            memory_length = memory.shape[1]
        window = memory_length if self.same_length else None
        outputs = []
        for own, own_real in segments(x, real, self.segment_length):
            offset = length_of(memory, 1)
            rows = ops.concatenate([memory, own], axis=1)
            seen = ops.concatenate([seen, own_real], axis=1)
            output, _ = self.attend(own, rows, seen, offset, window, training)
            outputs.append(output)
            memory = ops.stop_gradient(rows[:, -memory_length:])
            seen = seen[:, -memory_length:]
        output = ops.concatenate(outputs, axis=1)
        if state is None:
            return output
        return output, {"memory": memory, "memory_mask": seen}


@keras.saving.register_keras_serializable("routing_tf")
class TransformerXLBackbone(RecurrentBackbone):
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
        ValueError: if an argument is out of its range, or `num_heads` does not divide
            `hidden_dim` and there is no `key_dim`; when called, if the state is of
            other inputs.

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
        **kwargs,
    ):
        own = {
            "memory_length": memory_length,
            "segment_length": segment_length,
            "same_length": same_length,
        }
        sizes = (vocabulary_size, num_layers, num_heads, hidden_dim, intermediate_dim)
        super().__init__(TransformerXLAttention, own, *sizes, **kwargs)
