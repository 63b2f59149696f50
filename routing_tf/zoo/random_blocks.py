"""Random blocks: queries see a few distant blocks of keys, drawn at random."""

import keras
import numpy as np
from keras import ops

from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import static_length
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share
from routing_tf.zoo.parts.refusals import OneSequenceHeads

__all__ = ["RandomBlockHeads"]


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


def _settings(sizes):
    return {
        "block_length": share(sizes, 4),
        "num_random_blocks": 4,
        "seed": sizes.index,
    }


PATTERNS = {
    "random_blocks": Pattern(RandomBlockHeads, _settings, refuses=("entmax_alpha",))
}
