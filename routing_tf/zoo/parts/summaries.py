"""Heads that see a few keys for each block, and the nearest tokens."""

import dataclasses

from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers import ScaledDotProduct
from routing_tf.layers.caches import recent_tokens
from routing_tf.layers.caches import rows
from routing_tf.layers.routing.cluster_order import chunk_size_for
from routing_tf.layers.softmax.scaled_dot_product import joined_parts
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.tensors import break_into_blocks
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import memory_windows
from routing_tf.layers.support.tensors import numbers
from routing_tf.zoo.parts import refusals

NO_WINDOW = "a window consists of places in the sequence of the queries"


def attend_near(dot_product, inputs, window, training=None):
    """Lets each query attend to the tokens near it.

    Args:
        dot_product: `ScaledDotProduct`.
        inputs: `HeadInputs` of self-attention.
        window: number of tokens that a query sees, including its own: the last ones
            under a causal mask, otherwise as many on each side.
        training: whether dropout is on.

    Returns:
        `<float>[batch, heads, length, value_dim]`, and the logarithms of sums of
        exponentials `<float32>[batch, heads, length]`, see `ScaledDotProduct`.
    """
    length = length_of(inputs.query, 2)
    if is_known(length):
        window = min(window, length)
    size = chunk_size_for(window)
    before = -(-(window - 1) // size)
    after = 0 if inputs.use_causal_mask else before

    def windows(x):
        cut = tensors.break_into_blocks(x, size, axis=2)
        return tensors.memory_windows(cut, (before,), (after,), axis=2)

    real = windows(known_mask(inputs.value, inputs.value_mask))
    back = numbers(size)[:, None] + before * size
    back = back - numbers((before + 1 + after) * size)
    is_near = (back >= (1 - window if after else 0)) & (back < window)
    bias = inputs.token_bias
    results = dot_product(
        tensors.break_into_blocks(inputs.query, size, axis=2),
        windows(inputs.key),
        windows(inputs.value),
        attention_mask=ops.logical_and(real[..., None, :], is_near),
        bias=None if bias is None else windows(bias)[..., None, :],
        offset=before * size,
        return_logsumexp=True,
        training=training,
    )
    return [tensors.put_back_blocks(x, length, axis=2) for x in results]


def step_near(group, tokens, query, window, index):
    """Lets a query `[B, H, 1, D]` at `index` see the last `window` rows up to it."""
    window = min(window, tokens.shape[2])
    places = index - (window - 1) + numbers(window)
    read = ops.take(tokens, ops.maximum(places, 0), axis=2)
    return rows.attend_to_rows(group, query, read, places >= 0, places - index)


class BlockCompression(ConfiguredLayer):
    """Maps overlapping blocks of vectors to one vector each.

    A vector for its place in the block, one for each head, is added to each vector;
    those of a block, side by side, pass through a network with one hidden layer (ReLU),
    the same for all heads. Padding counts as zeros.

    Letters: B batch, H heads, C blocks, S vectors of a block, D dim.

    Args:
        block_length: length of a block, in tokens.
        stride: distance of the starts of consecutive blocks, in tokens; the length of a
            block is a multiple of it.
        hidden_dim: size of the hidden layer; None (the default) for four times that of
            a vector.
        kernel_initializer: initializer of the network. Defaults to `"glorot_uniform"`.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        blocks: `<float>[B, H, C, S, D]`.
        mask: `<bool>[B, 1, C, S]`, True for real tokens.

    Returns:
        `<float>[B, H, C, D]`.

    Reference: Yuan et al. (2025), "Native Sparse Attention", equation 7.
    """

    def __init__(
        self,
        block_length,
        stride,
        hidden_dim=None,
        kernel_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.block_length = block_length
        self.stride = stride
        self.hidden_dim = hidden_dim
        self.kernel_initializer = kernel_initializer

    def build(self, shape):
        _, heads, _, dim = shape
        joined, hidden = self.block_length * dim, self.hidden_dim or 4 * dim
        places = (heads, 1, self.block_length, dim)
        self.places = self.add_weight(places, "zeros", name="places")
        self.hidden_kernel = self.add_weight(
            (joined, hidden), cloned(self.kernel_initializer), name="hidden_kernel"
        )
        self.hidden_bias = self.add_weight((hidden,), "zeros", name="hidden_bias")
        self.output_kernel = self.add_weight(
            (hidden, dim), cloned(self.kernel_initializer), name="output_kernel"
        )
        self.output_bias = self.add_weight((dim,), "zeros", name="output_bias")

    def blocks_of(self, x):
        """Cuts into overlapping blocks `[B, heads, C, S, ...]`, one for each stride."""
        parts = break_into_blocks(x, self.stride, axis=2)
        after = self.block_length // self.stride - 1
        return memory_windows(parts, before=(0,), after=(after,), axis=2)

    def call(self, blocks, mask):
        places, first, first_bias, last, last_bias = (
            ops.cast(ops.convert_to_tensor(weight), blocks.dtype)
            for weight in (
                self.places,
                self.hidden_kernel,
                self.hidden_bias,
                self.output_kernel,
                self.output_bias,
            )
        )
        blocks = ops.where(mask[..., None], blocks + places, 0)
        *shape, slots, dim = ops.shape(blocks)
        joined = ops.reshape(blocks, (*shape, slots * dim))
        hidden = ops.relu(ops.matmul(joined, first) + first_bias)
        return ops.matmul(hidden, last) + last_bias


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
            parts.append(attend_near(self.dot_product, near, window, training))
        return self.joined(parts)

    def summaries(self, inputs):
        """Returns keys and values of all blocks, and which have real tokens.

        `<float>[batch, heads, summaries, dim]` and `<bool>[batch, 1, summaries]`.
        """
        block = self.block_length or length_of(inputs.value, 2)
        real = known_mask(inputs.value, inputs.value_mask)
        key, value, real, bias = (
            None if x is None else tensors.break_into_blocks(x, block, axis=2)
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
