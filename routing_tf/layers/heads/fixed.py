"""Fixed attention: queries see their block and the summaries of earlier ones."""

import math

import keras
import numpy as np
from keras import ops

from routing_tf.layers.heads import head_group
from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.masks import segment_mask
from routing_tf.layers.support.tensors import as_numbers
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import library
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_block_shape
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_positive_integer

ARRANGEMENTS = ("merged", "separate", "summaries")


@keras.saving.register_keras_serializable("routing_tf")
class FixedHeads(HeadGroup):
    """Heads whose queries see their own block and the last columns of every block.

    The last `num_summary_columns` tokens of each block are its summary. A query sees
    its own block and the summaries of all blocks; with a causal mask, only tokens up to
    itself. Work and memory of a query grow with the block and with the number of
    summaries. Other lengths than multiples of the block are padded and cut.

    Args:
        num_heads: number of heads in the group.
        block_shape: length of a block, in tokens, as a tuple of one integer, or of one
            for each axis of the positions. Defaults to `(128,)`.
        num_summary_columns: length of a summary, in tokens, at most that of a block.
            Defaults to 8.
        arrangement: `"merged"` (the default): every head sees both. `"separate"`: the
            first half of the heads sees the query's block, the others see the summaries
            and return zero if there is no earlier one. `"summaries"`: every head sees
            only the summaries, for layers that alternate with `LocalHeads` of the same
            blocks without a flange.
        distinct_summaries: whether heads have different summaries: the first head has
            the last columns of a block, the next one those before them, and so on
            through the block, and then again from the end. Defaults to False.
        **kwargs: arguments of `HeadGroup`, except those of relative positions.

    Call arguments and Returns: as in `HeadGroup`.

    Raises:
        ValueError: if a summary is longer than a block, or `arrangement` is
            `"separate"` with an odd number of heads; when called, if query and value
            differ in length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.FixedHeads(2, block_shape=(4,), num_summary_columns=1)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: Child et al., "Generating Long Sequences with Sparse Transformers"
    (https://arxiv.org/abs/1904.10509), sections 4.2 and 4.3.
    """

    has_one_softmax = True
    compares_by_products = True
    supports_segments = True
    remembers_key_heads = True

    block_shape = Argument(check_block_shape)
    arrangement = Argument(check_choice, ARRANGEMENTS)
    distinct_summaries = Argument(check_flag)

    def __init__(
        self,
        num_heads,
        block_shape=(128,),
        num_summary_columns=8,
        arrangement="merged",
        distinct_summaries=False,
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        num_summary_columns = check_positive_integer(
            "num_summary_columns", num_summary_columns
        )
        self.block_shape = block_shape
        if num_summary_columns > self.block_length:
            raise ValueError(
                "`num_summary_columns` must not exceed the block. Received: "
                f"num_summary_columns={num_summary_columns}, "
                f"block_shape={self.block_shape}"
            )
        if arrangement == "separate" and num_heads % 2:
            raise ValueError(
                '`num_heads` must be even with `arrangement="separate"`, half for '
                f"blocks and half for summaries. Received: num_heads={num_heads}"
            )
        if self.max_relative_position is not None:
            raise ValueError(
                "`max_relative_position` must be None: the keys of fixed heads "
                "do not follow each other. Received: "
                f"max_relative_position={self.max_relative_position}"
            )
        self.num_summary_columns = num_summary_columns
        self.arrangement = arrangement
        self.distinct_summaries = distinct_summaries

    @property
    def block_length(self):
        """Number of tokens in a block."""
        return math.prod(self.block_shape)

    def attend(self, inputs, training=None):
        length = length_of(inputs.query, 2)
        inputs = head_group.of_one_length(inputs, "fixed heads pair blocks of the two")
        bias = None
        if inputs.token_bias is not None:
            bias = self._slots(inputs.token_bias)[..., None, :]
        output = self.dot_product(
            self._blocks(inputs.query),
            self._slots(inputs.key),
            self._slots(inputs.value),
            attention_mask=self._mask(inputs),
            bias=bias,
            training=training,
        )
        return tensors.put_back_blocks(output, length, axis=2)

    def sees(self, query, keys, cache):
        size = self.block_length
        own = keys // size == query // size
        place = keys % size - as_numbers(self._first_columns())[:, None, None]
        summary = ops.logical_and(place >= 0, place < self.num_summary_columns)
        if self.arrangement == "merged":
            return ops.logical_or(own, summary), keys
        if self.arrangement == "summaries":
            return summary, keys
        is_local = numbers(self.num_heads)[:, None, None] < self.num_heads // 2
        return ops.where(is_local, own, summary), keys

    def _first_columns(self):
        """Where the summary of a block starts, for each head or for all heads."""
        columns = self.num_summary_columns
        last = self.block_length - columns
        if not self.distinct_summaries:
            return np.array([last], "int32")
        turn = np.arange(self.num_heads) % (self.block_length // columns)
        return (last - turn * columns).astype("int32")

    def _blocks(self, x):
        return tensors.break_into_blocks(x, self.block_length, axis=2)

    def _slots(self, x):
        """The keys of each block: its own tokens, if heads see them, and all summaries.

        From `[batch, heads, length, ...]` to `[batch, heads, block, slots, ...]`.
        """
        own, columns = self._blocks(x), self.num_summary_columns
        if self.distinct_summaries:
            own = ops.broadcast_to(
                own, (ops.shape(own)[0], self.num_heads, *ops.shape(own)[2:])
            )
            parts = [
                own[:, head : head + 1, :, first : first + columns]
                for head, first in enumerate(self._first_columns())
            ]
            summaries = ops.concatenate(parts, axis=1)
        else:
            summaries = own[:, :, :, -columns:]
        batch, heads, num_blocks, columns, *rest = ops.shape(summaries)
        flat = (batch, heads, 1, num_blocks * columns, *rest)
        everywhere = (batch, heads, num_blocks, num_blocks * columns, *rest)
        summaries = ops.broadcast_to(ops.reshape(summaries, flat), everywhere)
        if self.arrangement == "summaries":
            return summaries
        return ops.concatenate([own, summaries], axis=3)

    def _mask(self, inputs):
        real = known_mask(inputs.value, inputs.value_mask)
        real = self._slots(real)[..., None, :]
        num_blocks = length_of(real, 2)
        pattern = self._pattern(num_blocks, inputs.use_causal_mask)
        own = segment_mask(inputs.segments, self._blocks, self._slots)
        return combine_masks(real, pattern, own)

    def _pattern(self, num_blocks, causal):
        """Which slots each block and query sees, `<bool>[blocks, queries, slots]`.

        It has a leading axis of heads, of length 1 if all heads see the same.
        """
        size, columns = self.block_length, self.num_summary_columns
        block = numbers(num_blocks)[:, None, None]
        query = block * size + numbers(size)[:, None]
        slot = numbers(size + num_blocks * columns)
        if self.arrangement == "summaries":
            slot = slot[size:]
        is_own = slot < size
        of_block = (slot - size) // columns
        first = as_numbers(self._first_columns())[:, None, None, None]
        place = first + (slot - size) % columns
        lib = library(num_blocks)
        key = lib.where(is_own, block * size + slot, of_block * size + place)
        seen = key <= query if causal else key >= 0
        if self.arrangement == "merged":
            # The summary of the query's own block is included already.
            return seen & (is_own | (of_block != block))
        if self.arrangement == "summaries":
            return seen
        is_local = numbers(self.num_heads) < self.num_heads // 2
        return seen & (is_own == is_local[:, None, None, None])
