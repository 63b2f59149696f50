"""The common part of heads that see a few keys for each block, and a window."""

import dataclasses

from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers import ScaledDotProduct
from routing_tf.layers.caches import recent_tokens
from routing_tf.layers.caches import rows
from routing_tf.layers.softmax.scaled_dot_product import joined_parts
from routing_tf.layers.support import blocks
from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.lengths import numbers
from routing_tf.layers.support.masks import known_mask
from routing_tf.zoo.parts import near_tokens
from routing_tf.zoo.parts import refusals

NO_WINDOW = "a window consists of places in the sequence of the queries"


class SummaryHeads(HeadGroup):
    """Heads whose queries see summaries of blocks, and a window of tokens.

    Under a causal mask, a query sees the summaries of the blocks that end at it or
    before it, and the last `attention_window` tokens; without one, all summaries, and
    as many tokens on each side. One softmax weighs them all. Subclasses implement
    `summarized` and have the attributes `block_length`, `num_summaries` of a block, and
    `attention_window`, None for none.

    Args and call arguments: as in `HeadGroup`.
    """

    tokens_per_step = 1

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
        """Returns keys and values of the summaries, `[B, H, blocks, summaries, ...]`.

        Args:
            key: `<float>[B, H, blocks, slots, key_dim]`.
            value: `<float>[B, H, blocks, slots, columns]`; columns after the value size
                show the weights of tokens.
            real: `<bool>[B, 1, blocks, slots]`, False for padding.
            bias: `<float>[B, 1 or H, blocks, slots]`, or None.
        """
        raise NotImplementedError

    def near(self, key, value):
        """Returns keys and values `[batch, heads, length, dim]` for a window."""
        return key, value

    def seen_by_all(self, key, value, visible):
        """May add keys, values and masks that every query sees before the summaries."""
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
        """Returns keys and values of all blocks, and which have real tokens.

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
            positions: `<int32>[length]`, positions of queries that see only blocks that
                end at them or before; None for queries that see all.
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

    def make_cache(self, batch_size, max_length, positions=None):
        """Returns an empty cache with room for `max_length` tokens.

        A dict with the rows of the last tokens, their `"positions"`, and `"summaries"`,
        see `to_rows`.
        """
        num_blocks = -(-max_length // self.block_length)
        num_places = num_blocks * self.block_length
        window = min(self.attention_window or 1, num_places)
        shape = (batch_size, self.num_heads, num_blocks * self.num_summaries)
        size = self.key_dim + self.value_dim + 1
        return {
            **recent_tokens.make(self, batch_size, max(window, self.block_length)),
            "summaries": ops.zeros((*shape, size), self.compute_dtype),
        }

    def fill_cache(self, cache, inputs):
        summaries, size = to_rows(self.summaries(inputs)), cache["summaries"].shape[2]
        missing = size - summaries.shape[2]
        summaries = ops.pad(summaries, [(0, 0), (0, 0), (0, missing), (0, 0)])
        return {**recent_tokens.fill(self, cache, inputs), "summaries": summaries}

    def step(self, cache, index, inputs):
        cache = self._remembered(cache, index, inputs)
        summaries = of_rows(self, cache["summaries"])
        position = ops.reshape(index, (1,))
        parts = [self.read_summaries(inputs.query, summaries, position)]
        if self.attention_window is not None:
            parts.append(self._read_window(cache, index, inputs.query))
        return self.joined(parts), cache

    def max_positions(self, cache):
        num_blocks = cache["summaries"].shape[2] // self.num_summaries
        return num_blocks * self.block_length

    def make_memory(self, inputs, max_length):
        return {"summaries": to_rows(self.summaries(inputs))}

    def read_memory(self, cache, index, inputs):
        summaries = of_rows(self, cache["summaries"])
        output, _ = self.read_summaries(inputs.query, summaries, None)
        return output, cache

    def _remembered(self, cache, index, inputs):
        """Returns the cache with a token, and with the block that it ends, if any."""
        slot = index % cache["rows"].shape[2]
        new = rows.of_inputs(self, inputs)
        real = known_mask(inputs.value, inputs.value_mask)
        # Padding takes no place: it may be room, and tokens before it be seen again.
        old, position = (
            ops.take(cache[name], ops.reshape(slot, (1,)), axis=axis)
            for name, axis in (("rows", 2), ("positions", 1))
        )
        new = ops.where(real[..., None], new, old)
        position = ops.where(real[:, 0], index, position)
        tokens = ops.slice_update(cache["rows"], (0, 0, slot, 0), new)
        positions = ops.slice_update(cache["positions"], (0, slot), position)
        return {
            "rows": tokens,
            "positions": positions,
            "summaries": self._summarized(cache["summaries"], tokens, positions, index),
        }

    def _summarized(self, summaries, tokens, positions, index):
        length, number = self.block_length, self.num_summaries
        places = index + 1 - length + numbers(length)
        slots = places % tokens.shape[2]
        key, value, bias, real = rows.split_rows(self, ops.take(tokens, slots, axis=2))
        is_there = ops.take(positions, slots, axis=1) == places
        real = ops.logical_and(real[:, :1], is_there[:, None])[:, :, None]
        new = self.summarized(
            key[:, :, None], value[:, :, None], real, bias[:, :, None]
        )
        has_real = ops.repeat(ops.any(real, axis=-1), number, axis=-1)
        new = to_rows((*(x[:, :, 0] for x in new), has_real))
        first = ops.minimum(index // length * number, summaries.shape[2] - number)
        old = ops.take(summaries, first + numbers(number), axis=2)
        new = ops.where((index + 1) % length == 0, new, old)
        return ops.slice_update(summaries, (0, 0, first, 0), new)

    def _read_window(self, cache, index, query):
        key, value, bias, real = rows.split_rows(self, cache["rows"])
        key, value = self.near(key, value)
        keys = cache["positions"][:, None]
        visible = ops.logical_and(keys > index - self.attention_window, keys <= index)
        visible = ops.logical_and(ops.logical_and(visible, keys >= 0), real)
        return self.dot_product(
            query,
            key,
            value,
            attention_mask=visible[..., None, :],
            bias=bias[..., None, :],
            distances=(keys - index)[..., None, :],
            return_logsumexp=True,
            training=False,
        )


def to_rows(summaries):
    """Joins keys, values and the mask of real tokens to `<float>[B, H, S, E]`."""
    key, value, real = summaries
    real = ops.broadcast_to(real, ops.shape(key)[:-1])
    return ops.concatenate([key, value, ops.cast(real, key.dtype)[..., None]], axis=-1)


def of_rows(group, x):
    """Undoes `to_rows`."""
    return x[..., : group.key_dim], x[..., group.key_dim : -1], x[:, :1, :, -1] > 0


def _flat(x):
    """From `[batch, heads, blocks, summaries, dim]` to one axis of summaries."""
    batch, heads, num_blocks, summaries, dim = ops.shape(x)
    return ops.reshape(x, (batch, heads, num_blocks * summaries, dim))
