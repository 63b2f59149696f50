"""Pairs of blocks: queries see the block that a permutation assigns to their block."""

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
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.refusals import OneSequenceHeads

__all__ = ["BlockPairHeads"]

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


def _settings(sizes):
    num_blocks = -(-sizes.max_length // sizes.attention_window)
    return {"num_blocks": num_blocks, "seed": sizes.index}


PATTERNS = {
    "block_pair": Pattern(
        BlockPairHeads,
        _settings,
        of_decoders=False,
        refuses=("entmax_alpha", "key_shift"),
    )
}
