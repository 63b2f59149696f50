"""Distant blocks: queries see those of a permutation, or a few drawn at random."""

import keras
import numpy as np
from keras import ops

from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import library
from routing_tf.layers.support.tensors import num_parts
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import is_integer
from routing_tf.layers.support.validation import static_length
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share
from routing_tf.zoo.parts.refusals import OneSequenceHeads

__all__ = ["BlockPairHeads", "RandomBlockHeads"]


NO_CAUSAL_FORM = (
    "every permutation except the identity assigns a later block to some block, and "
    "the identity is `LocalHeads` with `flange_blocks=0`"
)


@keras.saving.register_keras_serializable("routing_tf")
class BlockPairHeads(OneSequenceHeads):
    """Heads whose queries see the keys of one block, a different one in each head.

    A sequence is cut into `num_blocks` blocks, and the queries of block b see only the
    keys of block `permutation[b]`. With the identity, a head is local; with all other
    permutations, tokens see distant tokens. Work and memory are those of full attention
    divided by the number of blocks.

    If the length is not a multiple of the number of blocks, blocks differ by at most
    one token. With fewer tokens than blocks, some blocks are empty, and queries that
    see one of these get zero. Padding counts: queries that see a block of only padding
    also get zero, so pad as little as possible.

    Args:
        num_heads: number of heads in the group.
        num_blocks: number of blocks. Defaults to 2.
        permutations: a permutation of the numbers from 0 to `num_blocks` - 1 for each
            head; None (the default) for random ones.
        seed: integer seed of random permutations. Defaults to 0.
        **kwargs: arguments of `HeadGroup`, without `key_shift`; relative positions are
            in tokens.

    Call arguments and Returns: as in `HeadGroup`.

    Raises:
        ValueError: when called, with a causal mask or another sequence as value.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.BlockPairHeads(2, num_blocks=2, permutations=[(0, 1), (1, 0)])
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16))).shape == (1, 10, 16)
    ```

    Reference: Qiu et al., "Blockwise Self-Attention for Long Document Understanding"
    (https://arxiv.org/abs/1911.02972), section 3.1, equations 3 and 4; tested only
    against NumPy code of this repository.
    """

    compares_by_products = True

    num_blocks = Argument(check_positive_integer)
    seed = Argument(check_non_negative_integer)

    def __init__(self, num_heads, num_blocks=2, permutations=None, seed=0, **kwargs):
        super().__init__(num_heads, **kwargs)
        refusals.refuse_arguments(self, NO_CAUSAL_FORM, "key_shift")
        self.num_blocks = num_blocks
        self.seed = seed
        self.permutations = permutations
        if permutations is not None:
            self.permutations = _check_permutations(
                permutations, self.num_heads, self.num_blocks
            )

    def prepared(self, inputs):
        refusals.refuse_causal_mask(inputs, NO_CAUSAL_FORM)
        return super().prepared(inputs)

    def attend(self, inputs, training=None):
        length = length_of(inputs.query, 2)
        blocks = numbers(self.num_blocks + 1)
        starts = (blocks * length + self.num_blocks - 1) // self.num_blocks
        # The slots of each block; the last one of a shorter block is not one of its
        # tokens.
        size = num_parts(length, self.num_blocks)
        places = starts[:-1, None] + numbers(size)
        filled = places < starts[1:, None]
        places = library(length).minimum(places, length - 1)
        seen = self.permutation_of_each_head()
        batch = ops.shape(inputs.query)[0]

        def of_batch(table):
            """From `[blocks, slots]` to that of each head's keys and batch row."""
            table = ops.take(ops.convert_to_tensor(table), seen, axis=0)
            return ops.broadcast_to(table, (batch, *ops.shape(table)))

        keys, mask = of_batch(places), of_batch(filled)
        queries = ops.broadcast_to(places, (batch, self.num_heads, *ops.shape(places)))
        bias = None
        if inputs.value_mask is not None:
            real = tensors.gather_entries(inputs.value_mask, keys, length)
            mask = combine_masks(mask, real)
        if inputs.token_bias is not None:
            bias = tensors.gather_entries(inputs.token_bias, keys, length)
            bias = bias[..., None, :]
        distances = None
        if self.max_relative_position is not None:
            distances = keys[..., None, :] - queries[..., None]
        output = self.dot_product(
            tensors.gather(inputs.query, queries),
            tensors.gather(inputs.key, keys),
            tensors.gather(inputs.value, keys),
            attention_mask=mask[..., None, :],
            bias=bias,
            distances=distances,
            training=training,
        )
        position = numbers(length)
        block = position * self.num_blocks // length
        start = (block * length + self.num_blocks - 1) // self.num_blocks
        slot = block * size + position - start
        slot = ops.broadcast_to(slot, (batch, self.num_heads, length))
        shape = (batch, self.num_heads, self.num_blocks * size, output.shape[-1])
        return tensors.gather(ops.reshape(output, shape), slot)

    def permutation_of_each_head(self):
        """Returns which block the queries of each block see, in NumPy.

        `<int32>[heads, blocks]`.
        """
        if self.permutations is not None:
            return np.array(self.permutations, "int32")
        generator = np.random.default_rng(self.seed)
        heads = [generator.permutation(self.num_blocks) for _ in range(self.num_heads)]
        return np.array(heads, "int32")

    def make_cache(self, batch_size, max_length, positions=None):
        refusals.refuse_cache(self, NO_CAUSAL_FORM)


def _check_permutations(permutations, num_heads, num_blocks):
    """Returns permutations as lists of integers; raises a `ValueError` otherwise."""
    message = (
        f"`permutations` must have one permutation for each of {num_heads} heads, with "
        f"each number from 0 to {num_blocks - 1} once. Received: "
        f"permutations={permutations!r}"
    )
    if isinstance(permutations, str) or not hasattr(permutations, "__len__"):
        raise ValueError(message)
    if len(permutations) != num_heads:
        raise ValueError(message)
    for each in permutations:
        if isinstance(each, str) or not hasattr(each, "__len__"):
            raise ValueError(message)
        if not all(map(is_integer, each)) or sorted(each) != list(range(num_blocks)):
            raise ValueError(message)
    return [[int(block) for block in each] for each in permutations]


def _block_pair(sizes):
    num_blocks = -(-sizes.max_length // sizes.attention_window)
    return {"num_blocks": num_blocks, "seed": sizes.index}


@keras.saving.register_keras_serializable("routing_tf")
class RandomBlockHeads(OneSequenceHeads):
    """Heads whose queries see random blocks of keys, the same ones for a whole block.

    Each block of queries has `num_random_blocks` blocks of keys, drawn from `seed` for
    each head. By BigBird's rule, it never draws itself, its neighbours, or the first
    and the last block, which are for the windows and the global tokens of other heads,
    see `bigbird_heads`. With a causal mask, it draws among the blocks from the second
    one up to the second last one before itself, and the draws do not depend on the
    length. If there are fewer blocks to draw from, all of them are seen; if there are
    none, queries get zero. Padding counts: a query whose blocks contain only padding
    also gets zero, so pad as little as possible.

    `RandomHeads` are different: they have random clusters of single tokens, whose
    members see each other.

    Args:
        num_heads: number of heads in the group.
        block_length: length of a block, in tokens. Defaults to 64.
        num_random_blocks: number of blocks that a query sees. Defaults to 3.
        seed: non-negative integer that decides the blocks. Layers with the same seed
            draw the same blocks. Defaults to 0.
        **kwargs: arguments of `HeadGroup`; relative positions are in tokens.

    Call arguments and Returns: as in `HeadGroup`.

    Raises:
        ValueError: when called, if query and value are different sequences or differ in
            length, or a length is unknown while TensorFlow traces the call.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.RandomBlockHeads(2, block_length=2, num_random_blocks=1)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 12, 16)), use_causal_mask=True).shape == (1, 12, 16)
    ```

    Reference: Zaheer et al., "Big Bird: Transformers for Longer Sequences"
    (https://arxiv.org/abs/2007.14062), section 2 and appendix D. Tested only against
    NumPy code of this repository.
    """

    compares_by_products = True

    block_length = Argument(check_positive_integer)
    num_random_blocks = Argument(check_positive_integer)
    seed = Argument(check_non_negative_integer)

    def __init__(
        self, num_heads, block_length=64, num_random_blocks=3, seed=0, **kwargs
    ):
        super().__init__(num_heads, **kwargs)
        self.block_length = block_length
        self.num_random_blocks = num_random_blocks
        self.seed = seed

    def random_blocks(self, num_blocks, use_causal_mask=False):
        """Returns the blocks that each block of queries sees.

        Args:
            num_blocks: number of blocks of the sequence.
            use_causal_mask: whether only earlier blocks are drawn.

        Returns:
            NumPy array `<int32>[heads, num_blocks, num_random_blocks]`, -1 where there
            are fewer blocks to draw from.
        """
        drawn = np.full((self.num_heads, num_blocks, self.num_random_blocks), -1)
        for block in range(num_blocks):
            others = np.arange(1, num_blocks - 1)
            if use_causal_mask:
                others = np.arange(1, max(block - 1, 1))
            others = others[np.abs(others - block) > 1]
            # The scores of a block do not depend on how many blocks follow.
            generator = np.random.default_rng([self.seed, block])
            scores = generator.random((num_blocks, self.num_heads))[others]
            best = others[np.argsort(scores, axis=0, kind="stable")]
            best = best[: self.num_random_blocks]
            drawn[:, block, : len(best)] = best.T
        return drawn.astype("int32")

    def attend(self, inputs, training=None):
        length = static_length("query", inputs.query, axis=2)
        size, num_blocks = self.block_length, -(-length // self.block_length)
        table = self.random_blocks(num_blocks, inputs.use_causal_mask)
        # Rows of all heads in one list.
        heads = np.arange(self.num_heads, dtype="int32")[:, None, None]
        rows = np.ravel(heads * num_blocks + np.maximum(table, 0))

        def drawn(x):
            """From `[batch, heads or 1, length, ...]` to `[..., block, slots, ...]`."""
            x = ops.broadcast_to(x, (ops.shape(x)[0], self.num_heads, *x.shape[2:]))
            cut = tensors.break_into_blocks(x, size, axis=2)
            batch, _, _, _, *rest = ops.shape(cut)
            cut = ops.reshape(cut, (batch, self.num_heads * num_blocks, size, *rest))
            slots = self.num_random_blocks * size
            shape = (batch, self.num_heads, num_blocks, slots, *rest)
            return ops.reshape(ops.take(cut, rows, axis=1), shape)

        # The mask also hides what pads the last block.
        real = combine_masks(np.ones((1, 1, length), "bool"), inputs.value_mask)
        is_drawn = np.repeat(table >= 0, size, axis=-1)
        mask = combine_masks(drawn(real), is_drawn[None])[..., None, :]
        bias, distances = inputs.token_bias, None
        if self.max_relative_position is not None:
            queries = np.arange(num_blocks * size, dtype="int32")
            keys = np.reshape(queries, (num_blocks, size))[table]
            keys = np.reshape(keys, (self.num_heads, num_blocks, 1, -1))
            queries = np.reshape(queries, (num_blocks, size, 1))
            distances = ops.subtract(keys, queries)
        output = self.dot_product(
            tensors.break_into_blocks(inputs.query, size, axis=2),
            drawn(inputs.key),
            drawn(inputs.value),
            attention_mask=mask,
            bias=None if bias is None else drawn(bias)[..., None, :],
            distances=distances,
            training=training,
        )
        return tensors.put_back_blocks(output, length, axis=2)

    def make_cache(self, batch_size, max_length, positions=None):
        cache = super().make_cache(batch_size, max_length, positions)
        table = self.random_blocks(-(-max_length // self.block_length), True)
        return {**cache, "blocks": ops.broadcast_to(table, (batch_size, *table.shape))}

    def sees(self, query, keys, cache):
        own = ops.minimum(query // self.block_length, cache["blocks"].shape[2] - 1)
        drawn = ops.take(cache["blocks"], own[:, 0], axis=2)[..., None, :]
        block = (keys // self.block_length)[..., None]
        return ops.any(block == drawn, axis=-1), keys - query


def _random_blocks(sizes):
    return {
        "block_length": share(sizes, 4),
        "num_random_blocks": 4,
        "seed": sizes.index,
    }


PATTERNS = {
    "block_pair": Pattern(
        BlockPairHeads,
        _block_pair,
        of_decoders=False,
        refuses=("entmax_alpha", "key_shift"),
    ),
    "random_blocks": Pattern(
        RandomBlockHeads, _random_blocks, refuses=("entmax_alpha",)
    ),
}
