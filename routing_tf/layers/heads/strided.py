"""Strided attention: queries see the same place in every earlier block."""

import math

import keras
from keras import ops

from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.masks import segment_mask
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.validation import check_block_shape


@keras.saving.register_keras_serializable("routing_tf")
class StridedHeads(HeadGroup):
    """Heads whose queries see the keys at their own place in each block.

    With a causal mask, a query sees itself and the same place in all earlier blocks;
    without one, the same place in all blocks. Together with local heads, which see the
    rest of the block, every earlier token is two layers away. Other lengths than
    multiples of the block are padded and cut.

    Args:
        num_heads: number of heads in the group.
        block_shape: length of a block, in tokens, as a tuple of one integer, or of one
            for each axis of the positions. Defaults to `(256,)`.
        **kwargs: arguments of `HeadGroup`; relative positions are in blocks.

    Call arguments and Returns: as in `HeadGroup`. Relative positions are differences
    of block.

    Raises:
        ValueError: when called, if `use_causal_mask=True` and query and value differ in
            length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.StridedHeads(2, block_shape=(4,))
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: Child et al., "Generating Long Sequences with Sparse Transformers"
    (https://arxiv.org/abs/1904.10509), section 4.2; `strided_local_attention_helper`
    of the release.
    """

    has_one_softmax = True
    compares_by_products = True
    supports_segments = True
    remembers_key_heads = True

    block_shape = Argument(check_block_shape)

    def __init__(self, num_heads, block_shape=(256,), **kwargs):
        super().__init__(num_heads, **kwargs)
        self.block_shape = block_shape

    def attend(self, inputs, training=None):
        length = length_of(inputs.query, 2)
        mask, bias = self.mask_and_bias(inputs)
        own = segment_mask(inputs.segments, self.at_places, self.at_places)
        query = self.at_places(inputs.query)
        key = self.at_places(inputs.key)
        output = self.dot_product(
            query,
            key,
            self.at_places(inputs.value),
            attention_mask=combine_masks(mask, own),
            bias=bias,
            use_causal_mask=inputs.use_causal_mask,
            training=training,
        )
        return tensors.put_back_blocks(ops.swapaxes(output, 2, 3), length, axis=2)

    def sees(self, query, keys, cache):
        size = math.prod(self.block_shape)
        return keys % size == query % size, keys // size - query // size

    def mask_and_bias(self, inputs):
        """Returns which keys are real, and their bias or None, place by place."""
        real = known_mask(inputs.value, inputs.value_mask)
        mask = self.at_places(real)[..., None, :]
        if inputs.token_bias is None:
            return mask, None
        return mask, self.at_places(inputs.token_bias)[..., None, :]

    def at_places(self, x):
        """From `[batch, heads, length, ...]` to `[batch, heads, place, block, ...]`."""
        cut = tensors.break_into_blocks(x, math.prod(self.block_shape), axis=2)
        return ops.swapaxes(cut, 2, 3)
