"""Native sparse attention: compressed blocks, chosen blocks and a sliding window."""

import dataclasses

import keras
from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers.caches import rows
from routing_tf.layers.softmax.softmax_attention import softmax
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import initializer
from routing_tf.zoo.parts import chosen_blocks
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.chosen_blocks import ReadsFeatures
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share
from routing_tf.zoo.parts.summaries import BlockCompression
from routing_tf.zoo.parts.summaries import attend_near
from routing_tf.zoo.parts.summaries import of_rows
from routing_tf.zoo.parts.summaries import step_near
from routing_tf.zoo.parts.summaries import to_rows

__all__ = ["NativeSparseHeads"]

BRANCHES = ("compressed", "selected", "window")
MANY_TOKENS = "a compressed block has one key and one logit for many tokens"
REFUSED = ("entmax_alpha", "key_shift", "rotary_positions")


@keras.saving.register_keras_serializable("routing_tf")
class NativeSparseHeads(ReadsFeatures, HeadGroup):
    """Heads that join coarse, chosen and near attention by gates.

    The compressed branch attends to one key and value, made by a network, for each
    block of `compression_length` tokens that starts at a multiple of
    `compression_stride`; a query sees the blocks that end at it or before it. The
    selected branch attends to all tokens up to the query of `num_blocks` blocks: the
    query's own, the first `num_initial_blocks`, the last `num_local_blocks`, and those
    with most weight in the compressed branch, where a compressed block counts once for
    each stride of tokens that it shares with them. The window branch attends to the
    last `attention_window` tokens. The output is the sum of the three results, each
    times a gate: a sigmoid of a linear function of the query's features, separate for
    each head.

    Work of a query: `length / compression_stride` compressed keys, and
    `num_blocks * block_length` and `attention_window` tokens. Each head chooses for
    itself, because it has its own keys. The choice itself has no gradient.

    Only for self-attention under a causal mask. No query sees padding, and the network
    sees zeros there.

    Args:
        num_heads: number of heads in the group.
        compression_length: length of a compressed block, in tokens, a multiple of the
            stride. Defaults to 32.
        compression_stride: distance of the starts of consecutive compressed blocks, in
            tokens. Defaults to 16.
        block_length: length of a block that may be chosen, in tokens, a multiple of
            the stride and at least `compression_length`. Defaults to 64.
        num_blocks: number of blocks of the selected branch, including those that a
            query always sees. Defaults to 16.
        num_initial_blocks: number of first blocks that are always seen. Defaults to 1.
        num_local_blocks: number of last blocks that are always seen, including the
            query's own; at least 1. Defaults to 2.
        attention_window: length of the window, in tokens, including the query's own.
            Defaults to 512.
        compression_dim: size of the hidden layer of the networks, one for keys and one
            for values; None (the default) for four times that of a key or value.
        share_branches: whether all branches read the keys and values of the layer.
            False (the default): the compressed and the selected branch have their own
            projections, as in the paper.
        kernel_initializer: initializer of gates, networks and projections. Defaults to
            `"glorot_uniform"`.
        **kwargs: arguments of `HeadGroup`, without `key_shift`, `rotary_positions` and
            `token_bias_weight`; relative positions are in tokens, in the selected and
            the window branch. `BlockTopKHeads` have all of them.

    Call arguments and Returns: as in `HeadGroup`; `features` are required, and
    `MixedAttention` passes them.

    Raises:
        ValueError: if the lengths are not multiples of the stride, `compression_length`
            exceeds `block_length`, `num_blocks` is less than the number of blocks that
            are always seen, or an argument has no meaning; when called, without a
            causal mask or features, or with another sequence as value, a `token_bias`
            or attention scores.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.NativeSparseHeads(
        2,
        compression_length=4,
        compression_stride=2,
        block_length=4,
        num_blocks=3,
        attention_window=4,
    )
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 20, 16)), use_causal_mask=True).shape == (1, 20, 16)
    ```

    Reference: Yuan et al., "Native Sparse Attention: Hardware-Aligned and Natively
    Trainable Sparse Attention" (https://arxiv.org/abs/2502.11089), section 3, equations
    5 to 12.
    """

    tokens_per_step = 1

    compression_length = Argument(check_positive_integer)
    compression_stride = Argument(check_positive_integer)
    block_length = Argument(check_positive_integer)
    num_blocks = Argument(check_positive_integer)
    num_initial_blocks = Argument(check_non_negative_integer)
    num_local_blocks = Argument(check_positive_integer)
    attention_window = Argument(check_positive_integer)
    compression_dim = Argument(check_optional_integer)
    share_branches = Argument(check_flag)
    kernel_initializer = Argument(initializer)

    def __init__(
        self,
        num_heads,
        compression_length=32,
        compression_stride=16,
        block_length=64,
        num_blocks=16,
        num_initial_blocks=1,
        num_local_blocks=2,
        attention_window=512,
        compression_dim=None,
        share_branches=False,
        kernel_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        self.compression_length = compression_length
        self.compression_stride = compression_stride
        self.block_length = block_length
        self.num_blocks = num_blocks
        self.num_initial_blocks = num_initial_blocks
        self.num_local_blocks = num_local_blocks
        self.attention_window = attention_window
        self.compression_dim = compression_dim
        self.share_branches = share_branches
        self.kernel_initializer = kernel_initializer
        self._check_sizes()
        refusals.refuse_arguments(
            self, MANY_TOKENS, "key_shift", "rotary_positions", "token_bias_weight"
        )
        self.key_compression, self.value_compression = (
            BlockCompression(
                self.compression_length,
                self.compression_stride,
                self.compression_dim,
                kernel_initializer,
                name=f"{name}_compression",
                dtype=self.dtype_policy,
            )
            for name in ("key", "value")
        )

    def _check_sizes(self):
        stride = self.compression_stride
        for name in ("compression_length", "block_length"):
            if getattr(self, name) % stride:
                raise ValueError(
                    f"`{name}` must be a multiple of `compression_stride`. Received: "
                    f"{name}={getattr(self, name)}, compression_stride={stride}"
                )
        if self.compression_length > self.block_length:
            raise ValueError(
                "`compression_length` must not exceed `block_length`. Received: "
                f"compression_length={self.compression_length}, "
                f"block_length={self.block_length}"
            )
        if self.num_blocks < self.num_initial_blocks + self.num_local_blocks:
            raise ValueError(
                "`num_blocks` must also count the first and the last blocks, which are "
                f"always seen. Received: num_blocks={self.num_blocks}, "
                f"num_initial_blocks={self.num_initial_blocks}, "
                f"num_local_blocks={self.num_local_blocks}"
            )

    def build(self, query_shape, key_shape, value_shape, features_shape=None):
        super().build(query_shape, key_shape, value_shape)
        dim, heads = self.dim_of_features(features_shape), self.num_heads
        shape = (None, heads, None)
        self.key_compression.build((*shape, self.key_dim))
        self.value_compression.build((*shape, self.value_dim))
        self.gate_kernel = self.add_weight(
            name="gate_kernel",
            shape=(dim, heads * len(BRANCHES)),
            initializer=cloned(self.kernel_initializer),
        )
        self.gate_bias = self.add_weight(
            name="gate_bias", shape=(heads * len(BRANCHES),), initializer="zeros"
        )
        if not self.share_branches:
            self.branch_kernel = self.add_weight(
                name="branch_kernel",
                shape=(dim, 2 * heads * (self.key_dim + self.value_dim)),
                initializer=cloned(self.kernel_initializer),
            )

    def prepared(self, inputs):
        if inputs.is_cross_attention or not inputs.use_causal_mask:
            raise ValueError(
                "Native sparse heads need self-attention under a causal mask: "
                "`use_causal_mask` must be True and `value` None. Received: "
                f"use_causal_mask={inputs.use_causal_mask}, "
                f"is_cross_attention={inputs.is_cross_attention}. Use "
                "`BlockTopKHeads` elsewhere"
            )
        refusals.refuse_bias(inputs, MANY_TOKENS)
        if inputs.value.shape[-1] != self.value_dim:
            raise ValueError(
                "`return_attention_scores` must be False: compressed values are not "
                "weighted sums of values. Received: values of size "
                f"{inputs.value.shape[-1]} instead of {self.value_dim}"
            )
        return self.with_features(super().prepared(inputs))

    def attend(self, inputs, training=None):
        branches = self.branches(inputs)
        positions = numbers(length_of(inputs.query, 2))
        summary = self.summaries(branches["compressed"])
        compressed, importance = self.read_summaries(
            inputs.query, summary, positions, training
        )
        selected = chosen_blocks.attend(
            self.dot_product,
            inputs.query,
            chosen_blocks.KeyBlocks.of(branches["selected"], self.block_length),
            self.choose(importance, positions),
            "causal",
            training,
        )
        window, _ = attend_near(
            self.dot_product, branches["window"], self.attention_window, training
        )
        return self.gated(inputs, (compressed, selected, window))

    def branches(self, inputs):
        """Returns the `HeadInputs` of each branch by its name."""
        if self.share_branches:
            return dict.fromkeys(BRANCHES, inputs)
        features = inputs.features
        kernel = ops.cast(ops.convert_to_tensor(self.branch_kernel), features.dtype)
        batch, length, _ = ops.shape(features)
        size = self.key_dim + self.value_dim
        own = ops.reshape(
            ops.matmul(features, kernel), (batch, length, 2, self.num_heads, size)
        )
        own = ops.transpose(own, (2, 0, 3, 1, 4))
        branches = {"window": inputs}
        for number, name in enumerate(BRANCHES[:2]):
            branches[name] = dataclasses.replace(
                inputs,
                key=own[number][..., : self.key_dim],
                value=own[number][..., self.key_dim :],
            )
        return branches

    def summaries(self, inputs):
        """Compresses blocks of a sequence.

        Returns a key and a value for each, `<float>[batch, heads, blocks, dim]`, and
        which of them have real tokens, `<bool>[batch, 1, blocks]`.
        """
        mask = known_mask(inputs.value, inputs.value_mask)
        # As many strides as in all whole blocks to choose from.
        key, value, mask = (
            tensors.pad_to_multiple(x, self.block_length, axis=2)
            for x in (inputs.key, inputs.value, mask)
        )
        mask = self.key_compression.blocks_of(mask)
        key, value = (
            compression(compression.blocks_of(x), mask)
            for compression, x in (
                (self.key_compression, key),
                (self.value_compression, value),
            )
        )
        return key, value, ops.any(mask, axis=-1)

    def read_summaries(self, query, summaries, positions, training=None):
        """The compressed branch, for queries at some positions.

        Returns outputs and the importance of each block that may be chosen,
        `<float32>[batch, heads, length, blocks]`.
        """
        key, value, real = summaries
        ends = numbers(length_of(key, 2)) * self.compression_stride
        ends = ends + self.compression_length - 1
        visible = ops.logical_and(real[:, :, None], ends <= positions[:, None])
        logits = ops.cast(ops.matmul(query, ops.swapaxes(key, 2, 3)), "float32")
        weights = softmax(ops.where(visible, logits, large_negative("float32")))
        weights = ops.where(visible, weights, 0)
        dropped = ops.cast(weights, value.dtype)
        dropped = self.dot_product.dropout_layer(dropped, training=training)
        return ops.matmul(dropped, value), self._importance(weights)

    def _importance(self, weights):
        """Adds up weights of compressed blocks for blocks that share their tokens."""
        stride = self.compression_stride
        count = length_of(weights, -1)
        overlap = self.compression_length // stride
        padded = ops.pad(weights, [(0, 0)] * 3 + [(overlap - 1, 0)])
        # For each stride of tokens, the blocks that start with it, or up to it.
        of_strides = sum(padded[..., n : n + count] for n in range(overlap))
        per_block = self.block_length // stride
        shape = (*ops.shape(weights)[:3], count // per_block, per_block)
        return ops.sum(ops.reshape(of_strides, shape), axis=-1)

    def choose(self, importance, positions):
        """Returns the blocks besides that of the query; None for none.

        `<int32>[batch, heads, length, blocks]`, as of `best_blocks`.
        """
        if self.num_blocks == 1:
            return None
        block = numbers(length_of(importance, -1))
        own = positions[:, None] // self.block_length
        initial = block < self.num_initial_blocks
        forced = ops.logical_or(initial, block > own - self.num_local_blocks)
        scores = ops.where(forced, chosen_blocks.LARGEST, importance)
        return chosen_blocks.best_blocks(scores, block < own, self.num_blocks - 1)

    def gated(self, inputs, outputs):
        """Adds up the outputs of the branches, each times its gate."""
        features = inputs.features
        kernel, bias = (
            ops.cast(ops.convert_to_tensor(weight), features.dtype)
            for weight in (self.gate_kernel, self.gate_bias)
        )
        gates = ops.sigmoid(ops.matmul(features, kernel) + bias)
        batch, length, _ = ops.shape(features)
        gates = ops.reshape(gates, (batch, length, self.num_heads, len(BRANCHES)))
        gates = ops.transpose(gates, (3, 0, 2, 1))[..., None]
        return sum(gates[i] * output for i, output in enumerate(outputs))

    def make_cache(self, batch_size, max_length, positions=None):
        """Returns an empty cache with room for `max_length` tokens.

        A dict with the rows `[B, H, P, E]` of `"tokens"`, for each branch one after the
        other on the last axis unless they share them, and with `"summaries"`, the
        compressed keys and values and whether there is one, `[B, H, C, D]`.
        """
        num_blocks = -(-max_length // self.block_length)
        num_places = num_blocks * self.block_length
        num_summaries = num_places // self.compression_stride
        shape, dtype = (batch_size, self.num_heads), self.compute_dtype
        size = rows.row_size(self) * (1 if self.share_branches else 3)
        summary_size = self.key_dim + self.value_dim + 1
        return {
            "tokens": ops.zeros((*shape, num_places, size), dtype),
            "summaries": ops.zeros((*shape, num_summaries, summary_size), dtype),
        }

    def fill_cache(self, cache, inputs):
        branches = self.branches(inputs)
        summaries = to_rows(self.summaries(branches["compressed"]))
        new = {"tokens": self._tokens(branches), "summaries": summaries}
        padded = tensors.pad_to_multiple
        return {name: padded(x, cache[name].shape[2], 2) for name, x in new.items()}

    def step(self, cache, index, inputs):
        branches = self.branches(inputs)
        token = self._tokens(branches)
        tokens = ops.slice_update(cache["tokens"], (0, 0, index, 0), token)
        of_branch = dict(zip(branches, self._split(tokens), strict=True))
        summaries = self._summarized(cache["summaries"], of_branch["compressed"], index)
        cache = {"tokens": tokens, "summaries": summaries}
        query, positions = inputs.query, ops.reshape(index, (1,))
        compressed, importance = self.read_summaries(
            query, of_rows(self, summaries), positions, training=False
        )
        chosen = self.choose(importance, positions)
        selected = chosen_blocks.step(
            self, of_branch["selected"], query, chosen, self.block_length, index
        )
        window = step_near(
            self, of_branch["window"], query, self.attention_window, index
        )
        return self.gated(inputs, (compressed, selected, window)), cache

    def max_positions(self, cache):
        return cache["tokens"].shape[2]

    def _tokens(self, branches):
        if self.share_branches:
            return rows.of_inputs(self, branches["window"])
        return ops.concatenate(
            [rows.of_inputs(self, own) for own in branches.values()], axis=-1
        )

    def _split(self, tokens):
        """Returns the rows of each branch."""
        if self.share_branches:
            return [tokens] * 3
        return ops.split(tokens, 3, axis=-1)

    def _summarized(self, summaries, tokens, index):
        """Returns the summaries with that of the block that ends at `index`, if any."""
        start = index + 1 - self.compression_length
        number = ops.maximum(start, 0) // self.compression_stride
        ends = ops.logical_and(start >= 0, start % self.compression_stride == 0)
        places = start + numbers(self.compression_length)
        places = ops.clip(places, 0, tokens.shape[2] - 1)
        key, value, _, real = rows.split_rows(self, ops.take(tokens, places, axis=2))
        mask = real[:, :1, None]
        key = self.key_compression(key[:, :, None], mask)
        value = self.value_compression(value[:, :, None], mask)
        new = to_rows((key, value, ops.any(mask, axis=-1)))
        number = ops.minimum(number, summaries.shape[2] - 1)
        old = ops.take(summaries, ops.reshape(number, (1,)), axis=2)
        return ops.slice_update(summaries, (0, 0, number, 0), ops.where(ends, new, old))


def _settings(sizes):
    stride = share(sizes, 16)
    return {
        "compression_length": 2 * stride,
        "compression_stride": stride,
        "block_length": 2 * stride,
        "num_blocks": 4,
        "attention_window": share(sizes, 2),
    }


PATTERNS = {
    "native_sparse": Pattern(
        NativeSparseHeads, _settings, of_encoders=False, refuses=REFUSED
    )
}
