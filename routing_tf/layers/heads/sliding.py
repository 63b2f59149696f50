"""Sliding attention: queries see the nearest tokens, and optionally every n-th one."""

import dataclasses
import functools

import keras
from keras import ops

from routing_tf.layers.heads import head_group
from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.masks import segment_mask
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_non_negative_integer


@keras.saving.register_keras_serializable("routing_tf")
class SlidingHeads(HeadGroup):
    """Heads whose queries see the tokens that are at most `radius` away.

    With a causal mask, a query sees itself and the `radius` tokens before it; without
    one, it also sees as many after it. So `radius=w - 1` is the `sliding_window=w` of
    `keras.layers.MultiHeadAttention` and of most models with causal windows. With
    `is_strided=True`, a query also sees, in the same softmax, every token that is a
    multiple of `radius` away: the merged head of the Sparse Transformer's strided
    pattern. Each query is compared with up to `2 * radius` neighbours (`3 * radius`
    without a causal mask), of which those out of reach are masked, and with
    `length / radius` strided tokens. On positions with two axes, neighbours are those
    in the order of the sequence.

    Args:
        num_heads: number of heads in the group.
        radius: largest distance of a token that a query sees, in tokens; 0 for a query
            that sees only itself. Defaults to 128.
        is_strided: whether a query also sees the tokens that are a multiple of
            `radius` away. Defaults to False.
        **kwargs: arguments of `HeadGroup`; relative positions are in tokens, and need
            `is_strided=False`.

    Call arguments and Returns: as in `HeadGroup`.

    Raises:
        ValueError: if `max_relative_position` is given with `is_strided=True`; when
            called, if query and value differ in length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.SlidingHeads(2, radius=4, is_strided=True)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: Child et al., "Generating Long Sequences with Sparse Transformers"
    (https://arxiv.org/abs/1904.10509), section 4.3, A(1) of strided attention, and its
    union with A(2). Tested only against NumPy code of this repository.
    """

    compares_by_products = True
    supports_segments = True
    remembers_key_heads = True
    # Each of them is compared with all that a cache holds.
    tokens_per_step = 256

    radius = Argument(check_non_negative_integer)
    is_strided = Argument(check_flag)

    def __init__(self, num_heads, radius=128, is_strided=False, **kwargs):
        super().__init__(num_heads, **kwargs)
        self.radius = radius
        if is_strided and not self.radius:
            raise ValueError(
                "`radius` must be at least 1 with `is_strided=True`, which shows "
                f"tokens at multiples of it. Received: radius={radius}. Leave "
                "`is_strided` out for queries that see only themselves"
            )
        self.is_strided = is_strided
        if is_strided and self.max_relative_position is not None:
            raise ValueError(
                "`max_relative_position` must be None with `is_strided=True`, because "
                "distant keys do not follow each other. Received: "
                f"max_relative_position={self.max_relative_position}. Leave one of the "
                "two out"
            )

    def attend(self, inputs, training=None):
        length = length_of(inputs.query, 2)
        inputs = head_group.of_one_length(
            inputs, "sliding heads pair places of the two"
        )
        real = known_mask(inputs.value, inputs.value_mask)
        inputs = dataclasses.replace(inputs, value_mask=real)
        size = max(self.radius, 1)
        size = min(size, length) if is_known(length) else size
        attend = self._attend_merged if self.is_strided else self._attend_near
        return tensors.put_back_blocks(attend(inputs, size, training), length, axis=2)

    def _attend_near(self, inputs, size, training):
        near = functools.partial(_near, size, inputs.use_causal_mask)
        bias = inputs.token_bias
        return self.dot_product(
            tensors.break_into_blocks(inputs.query, size, axis=2),
            near(inputs.key),
            near(inputs.value),
            attention_mask=self._near_mask(inputs, size),
            bias=None if bias is None else near(bias)[..., None, :],
            offset=size,
            training=training,
        )

    def _attend_merged(self, inputs, size, training):
        near = functools.partial(_near, size, inputs.use_causal_mask)
        far = functools.partial(_at_places, size)
        query = tensors.break_into_blocks(inputs.query, size, axis=2)
        num_blocks = length_of(query, 2)
        logits = [
            ops.matmul(query, ops.swapaxes(near(inputs.key), -1, -2)),
            _of_blocks(far(inputs.query), ops.swapaxes(far(inputs.key), -1, -2)),
        ]
        bias = inputs.token_bias
        if bias is not None:
            bias = _side_by_side(
                near(bias)[..., None, :] + ops.zeros((size, 1), bias.dtype),
                far(bias)[:, :, None] + ops.zeros((num_blocks, 1, 1), bias.dtype),
            )
        is_far = self._is_far(num_blocks, inputs.use_causal_mask)
        far_mask = ops.logical_and(far(inputs.value_mask)[:, :, None], is_far)
        if inputs.segments is not None:
            own = tensors.break_into_blocks(inputs.segments.query, size, axis=2)
            own = own[..., None] == far(inputs.segments.value)[:, :, None]
            far_mask = ops.logical_and(far_mask, own)
        mask = _side_by_side(self._near_mask(inputs, size), far_mask)
        weights = self.dot_product.attention_weights(
            _side_by_side(*logits), mask, bias, training=training
        )
        number = logits[0].shape[-1]
        output = ops.matmul(weights[..., :number], near(inputs.value))
        far_weights = ops.swapaxes(weights[..., number:], 2, 3)
        output = output + _of_blocks(far_weights, far(inputs.value))
        return self.dot_product.of_seeing(output, mask)

    def _near_mask(self, inputs, size):
        """Which neighbours are real and in reach, `<bool>[B, 1, blocks, size, slots]`.

        A query sees those of its own block and of the neighbouring ones.
        """
        causal = inputs.use_causal_mask
        real = _near(size, causal, inputs.value_mask)[..., None, :]
        distance = numbers(real.shape[-1]) - size - numbers(size)[:, None]
        in_reach = abs(distance) <= self.radius
        if causal:
            in_reach = in_reach & (distance <= 0)
        own = segment_mask(
            inputs.segments,
            lambda x: tensors.break_into_blocks(x, size, axis=2),
            functools.partial(_near, size, causal),
        )
        return combine_masks(real, in_reach, own)

    def _is_far(self, num_blocks, causal):
        """Which blocks have a strided token outside the neighbours, for each block."""
        block = numbers(num_blocks)
        distance = (block - block[:, None])[:, None]
        if causal:
            return distance < -1
        return (distance < -1) | (distance > 1)

    def cache_length(self, max_length, positions=None):
        return max_length if self.is_strided else self.radius + 1

    def max_positions(self, cache):
        return super().max_positions(cache) if self.is_strided else None

    def sees(self, query, keys, cache):
        distance = ops.abs(keys - query)
        visible = distance <= self.radius
        if self.is_strided:
            visible = ops.logical_or(visible, distance % self.radius == 0)
        return visible, keys - query


def _near(size, causal, x):
    """From `[batch, heads, length, ...]` to the neighbours of the queries of blocks."""
    cut = tensors.break_into_blocks(x, size, axis=2)
    return tensors.memory_windows(cut, (1,), (0 if causal else 1,), axis=2)


def _at_places(size, x):
    """From `[batch, heads, length, ...]` to `[batch, heads, place, block, ...]`."""
    return ops.swapaxes(tensors.break_into_blocks(x, size, axis=2), 2, 3)


def _of_blocks(of_places, other):
    """Multiplies matrices of places; returns `[batch, heads, block, place, ...]`."""
    return ops.swapaxes(ops.matmul(of_places, other), 2, 3)


def _side_by_side(near, far):
    return ops.concatenate([near, far], axis=-1)
