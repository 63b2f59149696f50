"""Mixture of block attention: queries see their block and those most like them."""

import keras
from keras import ops

from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.lengths import is_known
from routing_tf.layers.lengths import length_of
from routing_tf.layers.lengths import numbers
from routing_tf.layers.masks import combine_masks
from routing_tf.layers.validation import check_positive_integer
from routing_tf.zoo.parts import chosen_blocks
from routing_tf.zoo.parts import token_blocks
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share

__all__ = ["BlockTopKHeads"]


@keras.saving.register_keras_serializable("routing_tf")
class BlockTopKHeads(HeadGroup):
    """Heads whose queries see their own block and the blocks most like them.

    A query scores a block by its product with the mean of the block's keys. It sees
    its own block, with a causal mask up to itself, and of the other blocks, with a
    causal mask of those before its own, the `num_blocks - 1` that score highest. The
    own block counts as one of them, as in the code of the paper. In attention to
    another sequence without a causal mask no block is the query's own, and it sees the
    best `num_blocks` of that sequence.

    Work and memory of a query grow with `num_blocks * block_length`, and with the
    number of blocks for the scores. The choice itself has no gradient. Padding counts
    in no mean, and a block of padding alone is never chosen. Positions on two axes
    are cut into blocks in the order of their sequence.

    Args:
        num_heads: number of heads in the group.
        block_length: length of a block, in tokens. Defaults to 64.
        num_blocks: number of blocks that a query sees, the own block included.
            Defaults to 4.
        **kwargs: arguments of `HeadGroup`; relative positions are in tokens, and have
            no part in the scores of blocks, nor has a token bias. With `key_shift=1`
            the keys of a block are those that are read with its values.

    Call arguments and Returns: as in `HeadGroup`.

    Raises:
        ValueError: if `block_length` or `num_blocks` is not a positive integer, or an
            argument is refused by `HeadGroup`; when called, if `use_causal_mask=True`
            and query and value differ in length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.BlockTopKHeads(2, block_length=4, num_blocks=2)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs"
    (https://arxiv.org/abs/2502.13189), section 2.2; `moba_naive.py` of MoonshotAI/MoBA.
    """

    def __init__(self, num_heads, block_length=64, num_blocks=4, **kwargs):
        super().__init__(num_heads, **kwargs)
        self.block_length = check_positive_integer("block_length", block_length)
        self.num_blocks = check_positive_integer("num_blocks", num_blocks)

    def attend(self, inputs, training=None):
        memory_length, size = length_of(inputs.value, 2), self.block_length
        if is_known(memory_length):
            size = min(size, memory_length)
        memory = chosen_blocks.KeyBlocks.of(inputs, size)
        own = None if inputs.is_cross_attention else "whole"
        if inputs.use_causal_mask:
            own = "causal"
        count, chosen = self.num_blocks - (own is not None), None
        if count:
            candidates = self._candidates(inputs, memory, own is not None)
            scores, has_keys = self._scores(inputs, memory)
            chosen = chosen_blocks.best_blocks(
                scores, combine_masks(candidates, has_keys), count
            )
        return chosen_blocks.attend(
            self.dot_product, inputs.query, memory, chosen, own, training
        )

    def _scores(self, inputs, memory):
        """Scores of blocks `[B, H, L, G]`, and which have keys `[B, 1, 1, G]`."""
        sums, counts = chosen_blocks.key_sums(memory.key, memory.mask)
        means = chosen_blocks.key_means(sums, counts)
        query = ops.cast(inputs.query, "float32")
        scores = ops.matmul(query, ops.swapaxes(means, 2, 3))
        return scores, (counts > 0)[:, :, None]

    def _candidates(self, inputs, memory, has_own):
        """Which blocks a query may choose, `[L, G]`; None for all."""
        if not has_own:
            return None
        block = numbers(memory.num_blocks)
        own = numbers(length_of(inputs.query, 2))[:, None] // memory.key.shape[3]
        return block < own if inputs.use_causal_mask else block != own

    def make_cache(self, batch_size, max_length, grid=None):
        return token_blocks.make(self, batch_size, max_length, self.block_length)

    def fill_cache(self, cache, inputs):
        return token_blocks.fill(self, cache, inputs)

    def max_positions(self, cache):
        return token_blocks.num_places(cache) - self.key_shift

    def step(self, cache, index, inputs):
        cache = token_blocks.remember(self, cache, index, inputs)
        own = index // self.block_length
        scores, candidates = token_blocks.scores(cache, inputs.query)
        candidates = ops.logical_and(candidates, numbers(scores.shape[2]) < own)
        chosen = ops.zeros_like(scores[..., :1], dtype="int32") + own
        if self.num_blocks > 1:
            others = chosen_blocks.best_blocks(scores, candidates, self.num_blocks - 1)
            chosen = ops.concatenate([chosen, others], axis=2)
        output = token_blocks.attend(
            self, cache, index, inputs.query, chosen, last=index
        )
        return output, cache

    def make_memory(self, inputs, max_length):
        length = inputs.value.shape[2]
        size = min(self.block_length, length)
        empty = token_blocks.make(self, ops.shape(inputs.value)[0], length, size)
        return token_blocks.fill(self, empty, inputs)

    def read_memory(self, cache, index, inputs):
        scores, candidates = token_blocks.scores(cache, inputs.query)
        chosen = chosen_blocks.best_blocks(scores, candidates, self.num_blocks)
        return token_blocks.attend(self, cache, index, inputs.query, chosen), cache


def _settings(sizes):
    return {"block_length": share(sizes, 4), "num_blocks": 4}


PATTERNS = {"block_top_k": Pattern(BlockTopKHeads, _settings)}
