"""Local attention in blocks."""

import dataclasses
import functools
import math

import keras
from keras import ops

from routing_tf.layers.caches.rows import attend_to_rows
from routing_tf.layers.caches.rows import last_token
from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import segment_mask
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import larger
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import library
from routing_tf.layers.support.tensors import num_parts
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import smaller
from routing_tf.layers.support.validation import check_block_shape
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_positive_integer


def places_of_windows(mask, length, num_blocks, block, share, flange):
    """Returns places `<int32>[B, 1, blocks, window]` in a memory, and which exist.

    The blocks leave out padding after the last real token of the mask `<bool>[B, 1,
    L]`. A memory of the query's `length` has the query's blocks. A window has `share`
    slots of each block, and `flange` blocks on each side.
    """
    count = ops.expand_dims(last_token(mask) + 1, (-1, -2))
    own = ops.maximum(num_parts(count, num_blocks), 1)
    own = ops.where(count == length, block, own)
    distance = numbers((2 * flange + 1) * share) - flange * share
    is_near = ops.logical_and(distance >= -flange * own, distance < (flange + 1) * own)
    places = numbers(num_blocks)[:, None] * own + distance
    return places, ops.logical_and(is_near, places >= 0)


def gather_windows(places, is_place, x):
    """Returns `[batch, heads, memory length, ...]` at places, zero where there is none.

    The result has blocks and slots instead of the length.
    """
    memory_length = length_of(x, 2)
    is_place = ops.logical_and(is_place, places < memory_length)
    places = ops.clip(places, 0, memory_length - 1)
    batch, heads = ops.shape(places)[0], ops.shape(x)[1]
    x = ops.broadcast_to(x, (batch, *ops.shape(x)[1:])) if x.shape[0] == 1 else x
    places = ops.broadcast_to(places, (ops.shape(x)[0], heads, *ops.shape(places)[2:]))
    if len(x.shape) == 3:
        found = tensors.entries_at(x, places)
    else:
        found, is_place = tensors.gather(x, places), is_place[..., None]
    return ops.where(is_place, found, ops.zeros_like(found))


@keras.saving.register_keras_serializable("routing_tf")
class LocalHeads(HeadGroup):
    """Heads whose queries see their own block and the blocks beside it.

    The neighbouring blocks on one side are the flange. With a causal mask, a query sees
    its block up to itself and the `flange_blocks` blocks before it; without one, it
    also sees as many after it. Other lengths than multiples of the block are padded and
    cut; a block longer than the sequence is cut to it.

    On positions with two axes (images), blocks are rectangles, and the flange is a
    frame of blocks around the query's block; with a causal mask, only its earlier
    blocks, row by row.

    In attention to another sequence, a query sees the block at the place of its own
    block, and the neighbours of that block. Each row of the memory is cut into as many
    blocks as the query has, up to its last real token, so padding of the memory has no
    influence. Padding of the query counts as tokens, because decoding cannot know how
    many follow.

    With a `dilation` of d, the sequence is split into d sequences of every d-th token,
    and a query sees its block and the neighbouring blocks of its own sequence: a window
    d times as wide for the same work.

    In packed documents, blocks lie at the positions of the row, wherever documents
    start.

    Args:
        num_heads: number of heads in the group.
        block_shape: length of a block, in tokens, as a tuple of one integer, or of one
            for each axis of the positions. Defaults to `(256,)`.
        flange_blocks: number of neighbouring blocks on each side, at least 0; a tuple
            for different numbers along the axes. Defaults to 1.
        memory_block_shape: length of a block of the memory, in tokens, for attention to
            another sequence with as many blocks; None (the default) for the length that
            gives as many blocks.
        dilation: distance of consecutive tokens of a block. Defaults to 1, for blocks
            of neighbours.
        **kwargs: arguments of `HeadGroup`; relative positions are in tokens (with a
            dilation, in tokens of the query's own sequence), on two axes in places of
            the window.

    Call arguments and Returns: as in `HeadGroup`.

    Raises:
        ValueError: if `dilation` is not 1 for blocks on two axes; when called, if the
            positions do not have the axes of the block, if query and value have
            different numbers of blocks (with `memory_block_shape` or on two axes), if
            there is a dilation and `value` is another sequence, or if
            `use_causal_mask=True` and query and value differ in length or blocks.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.LocalHeads(2, block_shape=(4,), max_relative_position=8)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)

    heads = layers.LocalHeads(2, block_shape=(2, 4))
    attention = layers.MixedAttention([heads], key_dim=8)
    image = np.ones((1, 6, 8, 16))
    assert attention(image, use_causal_mask=True).shape == (1, 6, 8, 16)
    ```

    Reference: paper, section 3.2; the local branch of `attention_nd` in the release.
    Dilation is that of Beltagy et al., "Longformer" (https://arxiv.org/abs/2004.05150),
    section 3.1, with blocks instead of sliding windows.
    """

    has_one_softmax = True
    compares_by_products = True
    supports_segments = True
    remembers_key_heads = True
    # Each of them is compared with all that a cache holds.
    tokens_per_step = 256
    # Each of them reads a copy of its window.
    queries_per_step = 32
    # Whether the padding of a memory is also cut into blocks.
    shares_padding = False

    block_shape = Argument(check_block_shape)
    dilation = Argument(check_positive_integer)

    def __init__(
        self,
        num_heads,
        block_shape=(256,),
        flange_blocks=1,
        memory_block_shape=None,
        dilation=1,
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        self.block_shape = block_shape
        self.memory_block_shape = memory_block_shape
        if memory_block_shape is not None:
            self.memory_block_shape = _check_memory_block(
                memory_block_shape, self.block_shape
            )
        self.flange_blocks = _check_flange(flange_blocks, self.block_shape)
        self.dilation = dilation
        if dilation > 1 and len(self.block_shape) > 1:
            raise ValueError(
                "`dilation` must be 1 for blocks on two axes. Received: "
                f"dilation={dilation} with block_shape={self.block_shape}. Use blocks "
                "with one entry"
            )

    def prepared(self, inputs):
        inputs = super().prepared(inputs)
        if self.dilation > 1 and inputs.is_cross_attention:
            raise ValueError(
                "`dilation` must be 1 in attention to another sequence, whose places "
                f"are not those of the query. Received: dilation={self.dilation} with "
                "is_cross_attention=True"
            )
        return inputs

    def attend(self, inputs, training=None):
        if self.dilation == 1:
            return self._attend_in_blocks(inputs, training)
        length, batch = length_of(inputs.query, 2), ops.shape(inputs.query)[0]
        real = self._real(length_of(inputs.value, 2), inputs.value_mask)

        def deal_out(x):
            if x is None:
                return None
            x = ops.broadcast_to(x, (batch, *ops.shape(x)[1:]))
            cut = tensors.break_into_blocks(x, self.dilation, axis=2)
            first = ops.moveaxis(cut, 3, 1)
            return ops.reshape(first, (-1, *ops.shape(first)[2:]))

        segments = inputs.segments
        if segments is not None:
            query, value = (deal_out(x) for x in (segments.query, segments.value))
            segments = dataclasses.replace(segments, query=query, value=value)
        parts = dataclasses.replace(
            inputs,
            query=deal_out(inputs.query),
            key=deal_out(inputs.key),
            value=deal_out(inputs.value),
            value_mask=deal_out(real),
            token_bias=deal_out(inputs.token_bias),
            segments=segments,
        )
        output = self._attend_in_blocks(parts, training)
        shape = (batch, self.dilation, *ops.shape(output)[1:])
        output = ops.moveaxis(ops.reshape(output, shape), 1, 3)
        return tensors.put_back_blocks(output, length, axis=2)

    def _attend_in_blocks(self, inputs, training):
        length = length_of(inputs.query, 2)
        memory_length = length_of(inputs.value, 2)
        grid, block, memory_block = self._layout(inputs, length)
        window = self._windows(inputs, length, grid, block, memory_block)
        differs = self.memory_block_shape not in (None, self.block_shape)
        if is_known(block, memory_block):
            differs = block != memory_block
        if inputs.use_causal_mask and differs:
            raise ValueError(
                "`memory_block_shape` must equal `block_shape` under a causal mask, "
                "which compares positions in one sequence. Received: "
                f"memory_block_shape={self.memory_block_shape} with "
                f"block_shape={self.block_shape}. Leave it out"
            )
        is_causal = inputs.use_causal_mask
        bias = None
        if inputs.token_bias is not None:
            bias = window(inputs.token_bias)[..., None, :]
        real = self._real(memory_length, inputs.value_mask)
        real = window(real)
        num_slots = length_of(real, -1)
        mask = self.padding_mask(real)[..., None, :]
        if is_causal and len(grid) > 1:
            mask = ops.logical_and(mask, self._earlier(block, num_slots))
        in_blocks = functools.partial(
            tensors.break_into_blocks, block_length=block, axis=2
        )
        own = segment_mask(inputs.segments, in_blocks, window)
        output = self.dot_product(
            in_blocks(inputs.query),
            window(inputs.key),
            window(inputs.value),
            attention_mask=combine_masks(mask, own),
            bias=bias,
            offset=self.offset(memory_block, block, num_slots),
            use_causal_mask=is_causal and len(grid) == 1,
            training=training,
        )
        return tensors.put_back_blocks(output, length, axis=2)

    def cache_length(self, max_length, positions=None):
        rows, across = (*self._flange(), 0)[:2]
        columns = positions.grid[-1] if len(self.block_shape) > 1 else 1
        num_blocks = rows * columns + across + 1
        return num_blocks * math.prod(self.block_shape) * self.dilation

    def make_cache(self, batch_size, max_length, positions=None):
        cache = super().make_cache(batch_size, max_length, positions)
        if len(self.block_shape) > 1:
            columns = positions.grid[-1]
            cache["columns"] = ops.full((batch_size,), columns, dtype="int32")
        return cache

    def max_positions(self, cache):
        return None

    def sees(self, query, keys, cache):
        size, flange = math.prod(self.block_shape), (*self._flange(), 0)[:2]
        columns = cache["columns"][:, None, None, None] if "columns" in cache else 1
        is_own_part = keys % self.dilation == query % self.dilation
        keys, query = keys // self.dilation, query // self.dilation
        block, own_block = keys // size, query // size
        rows = block // columns - own_block // columns
        across = block % columns - own_block % columns
        visible = ops.logical_and(
            rows >= -flange[0],
            ops.logical_and(across >= -flange[1], across <= flange[1]),
        )
        visible = ops.logical_and(visible, is_own_part)
        # Places in a window of whole rows of blocks, the query's own row the last.
        width = 2 * flange[1] + 1
        place = ((rows + flange[0]) * width + across + flange[1]) * size
        window = (flange[0] + 1) * width * size
        offset = self.offset(size, size, window)
        return visible, place + keys % size - offset - query % size

    def make_memory(self, inputs, max_length):
        grid, block, memory_block = self._layout(inputs, max_length)
        window = self._windows(inputs, max_length, grid, block, memory_block)
        rows = window(super().make_memory(inputs, max_length)["rows"])
        offset = self.offset(memory_block, block, rows.shape[3])
        batch = ops.shape(rows)[0]
        return {
            "rows": rows,
            "block": ops.full((batch,), block, dtype="int32"),
            "offset": ops.full((batch,), offset, dtype="int32"),
        }

    def read_memory(self, cache, index, inputs):
        block, offset = (cache[name][:, None, None] for name in ("block", "offset"))
        _, heads, num_blocks, window, _ = cache["rows"].shape
        number = inputs.query.shape[2]
        place = index + numbers(number)
        own = ops.minimum(place // block, num_blocks - 1)
        own = ops.broadcast_to(own, (ops.shape(block)[0], heads, number))
        distances = numbers(window) - (offset + place % block)[..., None]
        output = attend_to_rows(
            self,
            inputs.query[:, :, :, None],
            tensors.gather_blocks(cache["rows"], own),
            None,
            distances[:, :, :, None],
        )
        return output[:, :, :, 0], cache

    def _windows(self, inputs, length, grid, block, memory_block):
        """Returns the function that arranges `[batch, heads, memory length, ...]`."""
        if self._shares_real_tokens(inputs) and inputs.value_mask is not None:
            sizes = length, *grid, block, memory_block, self._flange()[0]
            places = places_of_windows(inputs.value_mask, *sizes)
            return functools.partial(gather_windows, *places)
        before = self._flange()
        after = (0, *before[1:]) if inputs.use_causal_mask else before

        def window(x):
            x = tensors.pad_to_multiple(x, math.prod(grid) * memory_block, axis=2)
            batch, heads, _, *rest = ops.shape(x)
            x = ops.reshape(x, (batch, heads, *grid, memory_block, *rest))
            x = tensors.memory_windows(x, before, after, axis=2)
            window = ops.shape(x)[2 + len(grid)]
            return ops.reshape(x, (batch, heads, math.prod(grid), window, *rest))

        return window

    def _shares_real_tokens(self, inputs):
        """Returns whether a memory is cut into as many blocks as the query has."""
        return (
            inputs.is_cross_attention
            and not inputs.use_causal_mask
            and self.memory_block_shape is None
            and len(self.block_shape) == 1
            and not self.shares_padding
        )

    def _layout(self, inputs, length):
        """Numbers of blocks along each axis, and of tokens in their blocks."""
        memory_length = length_of(inputs.value, 2)
        if len(self.block_shape) > 1:
            return self._layout_nd(inputs)
        block = smaller(self.block_shape[0], length)
        num_blocks = num_parts(length, block)
        known = is_known(length, memory_length)
        if self.memory_block_shape is None:
            share = num_parts(memory_length, num_blocks)
            if known:
                share = block if length == memory_length else share
            elif not inputs.is_cross_attention:
                share = block
            else:
                share = ops.where(length == memory_length, block, share)
            if self._shares_real_tokens(inputs) and inputs.value_mask is not None:
                # Without its padding a memory may be as long as the query.
                share = larger(share, smaller(block, memory_length))
            return (num_blocks,), block, share
        memory_block = smaller(self.memory_block_shape[0], memory_length)
        if known and num_blocks != num_parts(memory_length, memory_block):
            raise ValueError(
                "Local heads pair each block of `query` with the block of `value` at "
                "the same place, so both must have the same number of blocks. "
                f"Received: length {length} in blocks of {block}, value length "
                f"{memory_length} in blocks of {memory_block}. Leave "
                "`memory_block_shape` out, or choose it in proportion to the lengths."
            )
        return (num_blocks,), block, memory_block

    def _layout_nd(self, inputs):
        axes = len(self.block_shape)
        grid, memory_grid = (
            x and x.grid for x in (inputs.positions, inputs.memory_positions)
        )
        if grid is None or len(grid) != axes:
            raise ValueError(
                f"`block_shape` must have an entry for each axis of the positions. "
                f"Received: block_shape={self.block_shape} with positions on "
                f"{len(grid or (1,))} axes. Pass `query` as (batch, height, "
                "width, dim), or blocks with one entry."
            )
        if grid != memory_grid:
            raise ValueError(
                "Local heads pair each block of `query` with the block of `value` at "
                "the same place, so both must have the same number of blocks. "
                f"Received: {grid} and {memory_grid} blocks. Use routed "
                "or full heads for attention to positions of another shape."
            )
        size = math.prod(self.block_shape)
        return grid, size, size

    def _flange(self):
        if isinstance(self.flange_blocks, int):
            return (self.flange_blocks,) * len(self.block_shape)
        return tuple(self.flange_blocks)

    def _real(self, memory_length, value_mask):
        # Also distinguishes tokens from blocks outside the sequence.
        if value_mask is not None:
            return value_mask
        return library(memory_length).ones((1, 1, memory_length), "bool")

    def _earlier(self, block, window):
        """Returns which slots of a window precede a query, `[block, window]`."""
        slots = numbers(window) - self._first_own_slot(block)
        return slots <= numbers(block)[:, None]

    def _first_own_slot(self, block):
        """Where the query's own block starts in a window; all before is earlier."""
        flange = self._flange()
        axes = [2 * f + 1 for f in flange]
        return sum(f * math.prod(axes[i + 1 :]) for i, f in enumerate(flange)) * block

    def offset(self, memory_block, block, window):
        """Returns the slot of a window from which the distances of a block count."""
        return self._first_own_slot(memory_block)


def _check_memory_block(memory_block_shape, block_shape):
    shape = check_block_shape("memory_block_shape", memory_block_shape)
    if len(shape) != len(block_shape) or (len(shape) > 1 and shape != block_shape):
        raise ValueError(
            "`memory_block_shape` must have as many entries as `block_shape`, and "
            "equal it if there are two. Received: "
            f"memory_block_shape={memory_block_shape!r} with block_shape={block_shape}"
        )
    return shape


def _check_flange(flange_blocks, block_shape):
    if isinstance(flange_blocks, (tuple, list)):
        if len(flange_blocks) != len(block_shape):
            raise ValueError(
                "`flange_blocks` must be one integer, or one for each axis of the "
                f"block. Received: flange_blocks={flange_blocks!r} with "
                f"block_shape={block_shape}"
            )
        return tuple(
            check_non_negative_integer("flange_blocks", number)
            for number in flange_blocks
        )
    flange_blocks = check_non_negative_integer("flange_blocks", flange_blocks)
    return flange_blocks
