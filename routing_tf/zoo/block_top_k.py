"""Mixture of block attention: queries see their block and the most similar blocks."""

import keras
from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers.caches import rows
from routing_tf.layers.softmax.scaled_dot_product import joined_parts
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.zoo.parts import chosen_blocks
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share

__all__ = ["BlockTopKHeads"]

MIXES = ("softmax", "scores")


@keras.saving.register_keras_serializable("routing_tf")
class BlockTopKHeads(HeadGroup):
    """Heads whose queries see their own block and the most similar blocks.

    A query scores a block by its product with the mean of the block's keys. It sees its
    own block and the `num_blocks - 1` other blocks that score highest; with a causal
    mask, its own block up to itself, and only earlier blocks. Its own block counts as
    one of `num_blocks`, as in the code of the paper. In attention to another sequence,
    a query has no own block, and sees the best `num_blocks` of that sequence.

    With `mix="softmax"`, one softmax is over all tokens of these blocks, and the choice
    has no gradient. With `mix="scores"`, there is a softmax over the tokens of each
    block, and the results are mixed by the softmax of the blocks' scores: so gradients
    tell which blocks to choose (HSA). The score of the query's own block is then that
    of the mean of the keys that it sees there. In HSA, a window stands for the own
    block, and blocks are scored by projections of their own.

    Work and memory of a query grow with `num_blocks * block_length`, and with the
    number of blocks for the scores. Means leave out padding, and a block of only
    padding is never chosen. Positions on two axes are cut into blocks in the order of
    their sequence.

    Args:
        num_heads: number of heads in the group.
        block_length: length of a block, in tokens. Defaults to 64.
        num_blocks: number of blocks that a query sees, including its own. Defaults to
            4.
        mix: `"softmax"` (the default) or `"scores"`, see above.
        **kwargs: arguments of `HeadGroup`; relative positions are in tokens. Neither
            they nor a token bias influence the scores of blocks. With `key_shift=1`,
            the keys of a block are those that are read with its values.

    Call arguments and Returns: as in `HeadGroup`.

    Raises:
        ValueError: when called, if `use_causal_mask=True` and query and value differ in
            length.

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
    Hu et al., "Hardware-aligned Hierarchical Sparse Attention for Efficient Long-term
    Memory Access" (https://arxiv.org/abs/2504.16795), for `mix="scores"`.
    """

    compares_by_products = True
    tokens_per_step = 1
    queries_per_step = 1

    block_length = Argument(check_positive_integer)
    num_blocks = Argument(check_positive_integer)
    mix = Argument(check_choice, MIXES)

    def __init__(
        self, num_heads, block_length=64, num_blocks=4, mix="softmax", **kwargs
    ):
        super().__init__(num_heads, **kwargs)
        self.block_length = block_length
        self.num_blocks = num_blocks
        self.mix = mix

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
            scores, has_keys = self._scores(
                chosen_blocks.comparable(inputs.query), memory
            )
            chosen = chosen_blocks.best_blocks(
                scores, combine_masks(candidates, has_keys), count, training
            )
        mixing_scores = None
        if self.mix == "scores":
            mixing_scores = self._mixing_scores(inputs.query, memory, chosen, own)
        return chosen_blocks.attend(
            self.dot_product, inputs.query, memory, chosen, own, training, mixing_scores
        )

    def _scores(self, query, memory):
        """Scores of blocks `[B, H, L, G]`, and which have keys `[B, 1, 1, G]`."""
        sums, counts = chosen_blocks.key_sums(memory.key, memory.mask)
        means = chosen_blocks.key_means(sums, counts)
        scores = ops.matmul(query, ops.swapaxes(means, 2, 3))
        return scores, (counts > 0)[:, :, None]

    def _mixing_scores(self, query, memory, chosen, own):
        """Scores of the own block, if any, and the chosen ones: `[B, H, L, 1 + K]`."""
        parts = []
        if own is not None:
            scores = chosen_blocks.own_scores(query, memory, own == "causal")
            parts.append(scores[..., None])
        if chosen is not None:
            scores, _ = self._scores(ops.cast(query, "float32"), memory)
            parts.append(chosen_blocks.entries_of(scores, chosen))
        return ops.concatenate(parts, axis=-1)

    def _candidates(self, inputs, memory, has_own):
        """Which blocks a query may choose, `[L, G]`; None for all."""
        if not has_own:
            return None
        block = numbers(memory.num_blocks)
        own = numbers(length_of(inputs.query, 2))[:, None] // memory.key.shape[3]
        return block < own if inputs.use_causal_mask else block != own

    def make_cache(self, batch_size, max_length, positions=None):
        return self._make_blocks(batch_size, max_length, self.block_length)

    def _make_blocks(self, batch_size, num_tokens, block_length):
        """Returns an empty cache with room for `num_tokens` tokens.

        A dict of `keys` `[B, H, G, S, D + 1]` and `values` `[B, H, G, S, E + 2]`, of
        `sums` `<float32>[B, H, G, D]` and of `counts` `<float32>[B, H, G]`. A row of
        keys holds a key and whether it is that of a token; a row of values a value, its
        bias and whether it is that of a token. With shifted keys, a key stands one row
        after its own value, with the value that is read with it.
        """
        # With shifted keys, the newest key waits for the next value.
        num_blocks = -(-(num_tokens + self.key_shift) // block_length)
        shape = (batch_size, self.num_heads, num_blocks)
        sizes = {"keys": self.key_dim + 1, "values": self.value_dim + 2}
        cache = {
            name: ops.zeros((*shape, block_length, size), self.compute_dtype)
            for name, size in sizes.items()
        }
        return {
            **cache,
            "sums": ops.zeros((*shape, self.key_dim), "float32"),
            "counts": ops.zeros(shape, "float32"),
        }

    def fill_cache(self, cache, inputs):
        keys, values = self._rows(inputs)
        filled = {
            "keys": _in_blocks(keys, cache["keys"], self.key_shift),
            "values": _in_blocks(values, cache["values"], 0),
        }
        sums, counts = self._sums(filled["keys"], filled["values"])
        return {**filled, "sums": sums, "counts": counts}

    def max_positions(self, cache):
        return cache["keys"].shape[2] * cache["keys"].shape[3] - self.key_shift

    def step(self, cache, index, inputs):
        cache = self._remember(cache, index, inputs)
        own = index // self.block_length
        scores, candidates = _cached_scores(
            cache, chosen_blocks.comparable(inputs.query)
        )
        candidates = ops.logical_and(candidates, numbers(scores.shape[2]) < own)
        chosen = ops.zeros_like(scores[..., :1], dtype="int32") + own
        if self.num_blocks > 1:
            others = chosen_blocks.best_blocks(scores, candidates, self.num_blocks - 1)
            chosen = ops.concatenate([chosen, others], axis=2)
        output = self._attend_step(cache, index, inputs.query, chosen, last=index)
        return output, cache

    def make_memory(self, inputs, max_length):
        length = inputs.value.shape[2]
        size = min(self.block_length, length)
        empty = self._make_blocks(ops.shape(inputs.value)[0], length, size)
        return self.fill_cache(empty, inputs)

    def read_memory(self, cache, index, inputs):
        scores, candidates = _cached_scores(
            cache, chosen_blocks.comparable(inputs.query)
        )
        chosen = chosen_blocks.best_blocks(scores, candidates, self.num_blocks)
        return self._attend_step(cache, index, inputs.query, chosen), cache

    def _remember(self, cache, index, inputs):
        """Returns the cache with the token at `index`."""
        new = dict(zip(("keys", "values"), self._rows(inputs), strict=True))
        size = cache["keys"].shape[3]
        own = index // size
        cache = dict(cache)
        for name, place in (("keys", index + self.key_shift), ("values", index)):
            cache[name] = ops.slice_update(
                cache[name],
                (0, 0, place // size, place % size, 0),
                new[name][:, :, None],
            )
        keys, values = (
            ops.take(cache[n], own[None], axis=2) for n in ("keys", "values")
        )
        # Later places may hold tokens of before a start, or the key of this one.
        is_there = own * size + numbers(size) <= index
        sums, counts = self._sums(keys, values, is_there)
        return {
            **cache,
            "sums": ops.slice_update(cache["sums"], (0, 0, own, 0), sums),
            "counts": ops.slice_update(cache["counts"], (0, 0, own), counts),
        }

    def _attend_step(self, cache, index, query, blocks, last=None):
        """Attends with the query at position `index` to some blocks.

        `blocks` are `<int32>[B, H, K]`, the number of blocks for none. Positions after
        `last` are not seen; None for a memory, which is seen completely.
        """
        num_blocks, size = cache["keys"].shape[2:4]
        batch, heads, count = ops.shape(blocks)
        block = ops.minimum(blocks, num_blocks - 1)
        keys, values = (_read(cache[name], block) for name in ("keys", "values"))
        key, is_key = keys[..., :-1], keys[..., -1:]
        read = ops.concatenate(
            [key, values[..., :-1], values[..., -1:] * is_key], axis=-1
        )
        places = block[..., None] * size + numbers(size)
        visible = ops.broadcast_to((blocks < num_blocks)[..., None], ops.shape(places))
        if last is not None:
            visible = ops.logical_and(visible, places <= last)
        if self.mix == "scores":
            return self._mix_step(cache, query, read, blocks, visible, places - index)
        shape = (batch, heads, count * size)
        return rows.attend_to_rows(
            self,
            query,
            read,
            ops.reshape(visible, shape)[:, :, None],
            ops.reshape(places - index, shape)[:, :, None],
        )

    def _mix_step(self, cache, query, read, blocks, visible, distances):
        """Attends inside each block, and mixes the results by the scores of blocks."""
        batch, heads, count, size = ops.shape(distances)
        outputs = rows.attend_to_rows(
            self,
            ops.repeat(query[:, :, None], count, axis=2),
            ops.reshape(read, (batch, heads, count, size, read.shape[-1])),
            visible[..., None, :],
            distances[..., None, :],
        )
        scores, has_keys = _cached_scores(cache, ops.cast(query, "float32"))
        scores = ops.where(has_keys, scores, large_negative("float32"))
        scores = chosen_blocks.entries_of(scores, blocks)
        return joined_parts(outputs[:, :, :, 0], scores)[:, :, None]

    def _rows(self, inputs):
        """Returns keys and values, each followed by its other entries."""
        new = rows.of_inputs(self, inputs)
        mask = ops.ones_like(new[..., :1])
        if inputs.key_mask is not None:
            mask = mask * ops.cast(inputs.key_mask, mask.dtype)[..., None]
        key, rest = new[..., : self.key_dim], new[..., self.key_dim :]
        return ops.concatenate([key, mask], axis=-1), rest

    def _sums(self, keys, values, is_there=None):
        mask = ops.logical_and(keys[..., -1] > 0, values[..., -1] > 0)
        if is_there is not None:
            mask = ops.logical_and(mask, is_there)
        return chosen_blocks.key_sums(keys[..., :-1], mask)


def _cached_scores(cache, query):
    """Returns products with mean keys `[B, H, G]`, and which blocks have a token."""
    means = chosen_blocks.key_means(cache["sums"], cache["counts"])
    return ops.einsum("bhld,bhgd->bhg", query, means), cache["counts"] > 0


def _in_blocks(x, like, first):
    """Puts `[B, H, L, D]` into empty blocks of the shape of `like`, from a place on."""
    batch, heads, num_blocks, size, dim = like.shape
    length = x.shape[2]
    after = num_blocks * size - length - first
    x = ops.pad(x, [(0, 0), (0, 0), (first, after), (0, 0)])
    return ops.reshape(x, (ops.shape(x)[0], heads, num_blocks, size, dim))


def _read(x, blocks):
    """From `[B, H, G, S, D]` to `[B, H, K * S, D]`, given the blocks `[B, H, K]`."""
    read = tensors.gather_blocks(x, blocks)
    batch, heads, count, size, dim = ops.shape(read)
    return ops.reshape(read, (batch, heads, count * size, dim))


def _settings(sizes):
    return {"block_length": share(sizes, 4), "num_blocks": 4}


PATTERNS = {
    "block_top_k": Pattern(BlockTopKHeads, _settings, refuses=("entmax_alpha",))
}
