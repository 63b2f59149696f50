"""What heads have in common that see blocks as a few keys each, and a window."""

import dataclasses

from keras import ops

from routing_tf.layers import blocks
from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.lengths import length_of
from routing_tf.layers.lengths import numbers
from routing_tf.layers.masks import known_mask
from routing_tf.layers.scaled_dot_product import ScaledDotProduct
from routing_tf.layers.scaled_dot_product import joined_parts
from routing_tf.zoo.parts import block_summaries
from routing_tf.zoo.parts import near_tokens
from routing_tf.zoo.parts import refusals

NO_WINDOW = "a window is one of places in the sequence of the queries"


class SummaryHeads(HeadGroup):
    """Heads whose queries see summaries of blocks, and a window of tokens themselves.

    Under a causal mask a query sees the summaries of the blocks that end at it or
    before it, and the last `attention_window` tokens; without one all summaries, and as
    many tokens on either side. One softmax weighs them all. Subclasses implement
    `summarized` and have the attributes `block_length`, `num_summaries` of a block, and
    `attention_window`, None for none.

    Args and call arguments: as in `HeadGroup`.
    """

    def __init__(self, num_heads, **kwargs):
        super().__init__(num_heads, **kwargs)
        # Summaries have no place: no relative positions.
        self.summary_product = ScaledDotProduct(
            dropout=self.dropout,
            seed=self.dropout_seed,
            name="summary_product",
            dtype=self.dtype_policy,
        )

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        self.summary_product.build(query_shape, key_shape, value_shape)

    def summarized(self, key, value, real, bias):
        """Returns the keys and the values of the summaries of blocks.

        Args:
            key: `<float>[batch, heads, blocks, slots, key_dim]`.
            value: `<float>[batch, heads, blocks, slots, columns]`; in columns behind
                the value size stands what tells the weights of tokens.
            real: `<bool>[batch, 1, blocks, slots]`, False for padding.
            bias: `<float>[batch, 1 or heads, blocks, slots]`, or None.

        Returns:
            `<float>[batch, heads, blocks, num_summaries, key_dim or columns]`.
        """
        raise NotImplementedError

    def near(self, key, value):
        """Returns keys and values `[batch, heads, length, dim]` for a window."""
        return key, value

    def seen_by_all(self, key, value, visible):
        """May put what every query sees before the summaries.

        `key` and `value` are those of summaries, `[batch, heads, summaries, dim]`;
        `visible` is broadcastable to `[batch, heads, length, summaries]`.
        """
        return key, value, visible

    def prepared(self, inputs):
        if self.attention_window is not None:
            refusals.refuse_another_sequence(inputs, NO_WINDOW)
        return super().prepared(inputs)

    def attend(self, inputs, training=None):
        positions = None
        if inputs.use_causal_mask:
            positions = numbers(length_of(inputs.query, 2))
        summaries = self.summaries(inputs)
        parts = [self.read_summaries(inputs.query, summaries, positions, training)]
        if self.attention_window is not None:
            key, value = self.near(inputs.key, inputs.value)
            near = dataclasses.replace(inputs, key=key, value=value)
            window = self.attention_window
            parts.append(near_tokens.attend(self.dot_product, near, window, training))
        return self.joined(parts)

    def summaries(self, inputs):
        """Returns keys, values and which are of real tokens, for all blocks.

        `<float>[batch, heads, summaries, dim]` and `<bool>[batch, 1, summaries]`.
        """
        block = self.block_length or length_of(inputs.value, 2)
        real = known_mask(inputs.value, inputs.value_mask)
        key, value, real, bias = (
            None if x is None else blocks.break_into_blocks(x, block, axis=2)
            for x in (inputs.key, inputs.value, real, inputs.token_bias)
        )
        key, value = self.summarized(key, value, real, bias)
        real = ops.repeat(ops.any(real, axis=-1), self.num_summaries, axis=-1)
        return _flat(key), _flat(value), real

    def read_summaries(self, query, summaries, positions, training=None):
        """Attends to summaries.

        Args:
            query: `<float>[batch, heads, length, key_dim]`.
            summaries: as of `summaries`.
            positions: `<int32>[length]`, those of queries that see only what ends at
                them or before; None for queries that see all.
            training: whether dropout is on.

        Returns:
            Outputs, and logarithms of sums of exponentials, see `ScaledDotProduct`.
        """
        key, value, real = summaries
        visible = real[:, :, None]
        if positions is not None:
            block = numbers(length_of(key, 2)) // self.num_summaries
            ends = (block + 1) * self.block_length - 1
            visible = ops.logical_and(visible, ends <= positions[:, None])
        key, value, visible = self.seen_by_all(key, value, visible)
        return self.summary_product(
            query,
            key,
            value,
            attention_mask=visible,
            return_logsumexp=True,
            training=training,
        )

    def joined(self, parts):
        """Joins outputs for parts of the keys, which come with their sums."""
        if len(parts) == 1:
            return parts[0][0]
        outputs, sums = zip(*parts, strict=True)
        return joined_parts(ops.stack(outputs, axis=-2), ops.stack(sums, axis=-1))

    def make_cache(self, batch_size, max_length, grid=None):
        return block_summaries.make(self, batch_size, max_length)

    def fill_cache(self, cache, inputs):
        return block_summaries.fill(self, cache, inputs)

    def step(self, cache, index, inputs):
        return block_summaries.step(self, cache, index, inputs)

    def max_positions(self, cache):
        num_blocks = cache["summaries"].shape[2] // self.num_summaries
        return num_blocks * self.block_length

    def make_memory(self, inputs, max_length):
        return {"summaries": block_summaries.to_rows(self.summaries(inputs))}

    def read_memory(self, cache, index, inputs):
        summaries = block_summaries.of_rows(self, cache["summaries"])
        output, _ = self.read_summaries(inputs.query, summaries, None)
        return output, cache


def _flat(x):
    """From `[batch, heads, blocks, summaries, dim]` to one axis of summaries."""
    batch, heads, num_blocks, summaries, dim = ops.shape(x)
    return ops.reshape(x, (batch, heads, num_blocks * summaries, dim))
