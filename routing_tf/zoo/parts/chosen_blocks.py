"""Attention of each query to blocks of keys that it chooses by their content.

This builds no matrix of all pairs, and copies no key for a single query: the pairs of
query and block are sorted by block, and each chunk of them reads its block once.
Letters: B batch, H heads, L length, G blocks, S slots of a block, K chosen blocks, N
chunks of pairs, C pairs of a chunk, D dim.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from keras import ops

from routing_tf.layers.caches import rows
from routing_tf.layers.routing import membership
from routing_tf.layers.routing.cluster_order import ClusterOrder
from routing_tf.layers.softmax.scaled_dot_product import joined_parts
from routing_tf.layers.support import backends
from routing_tf.layers.support import tensors
from routing_tf.layers.support.head_inputs import HeadInputs
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.tensors import break_into_blocks
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.tensors import put_back_blocks

# A fraction of a query's largest score. It exceeds the differences that rounding, which
# depends on shapes, makes between equal blocks in one pass and in pieces.
NEAR_TIE = 2e-6
# Scores are clipped to it, and its negative means none.
LARGEST = float(np.finfo("float32").max)


def is_among(places, length):
    """Returns which places of an axis are among those that were chosen.

    Args:
        places: `<int>[..., K]`, places on an axis, or `length` for none.
        length: length of the axis, an integer or a tensor.

    Returns:
        `<bool>[..., length]`.
    """
    *shape, count = ops.shape(places)
    places = ops.reshape(ops.cast(places, "int32"), (-1, count))
    num_rows = ops.shape(places)[0]
    row = ops.arange(num_rows, dtype="int32")[:, None] + ops.zeros_like(places)
    # Two numbers for each place, because one may exceed 32-bit integers.
    index = ops.reshape(ops.stack([row, places], axis=-1), (-1, 2))
    ones = ops.ones_like(index[:, 0], dtype="float32")
    found = backends.scatter(index, ones, (num_rows, length + 1))
    return ops.reshape(found[:, :length] > 0, (*shape, length))


def side_by_side(parts, leading):
    """Joins what is broadcastable to `[*leading, slots]` along the last axis."""
    parts = [ops.broadcast_to(x, (*leading, length_of(x, -1))) for x in parts]
    return ops.concatenate(parts, axis=-1)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FeatureInputs(HeadInputs):
    """Inputs of heads that read features.

    Args:
        features: `<float>[batch, length, dim]`, the tokens that queries are made from,
            in the order of their positions.
    """

    features: Any = None

    @property
    def differentiated(self):
        return [*super().differentiated, "features"]

    def tokens(self, first, number):
        features = ops.take(self.features, first + numbers(number), axis=1)
        return dataclasses.replace(super().tokens(first, number), features=features)


class ReadsFeatures:
    """The part of a `HeadGroup` that gets features, before it in the base classes."""

    def __call__(self, query=None, key=None, value=None, *, features=None, **options):
        if "inputs" in options:
            return super().__call__(**options)
        if features is None:
            raise ValueError(
                "`features` must be given, because the heads read the inputs of the "
                "queries. Received: features=None. Call the `MixedAttention` that "
                "holds the group"
            )
        self.input_dim = features.shape[-1]
        return super().__call__(query, key, value, source=features, **options)

    def dim_of_features(self, features_shape):
        """Returns the size of a token, when the group is built."""
        return self.input_dim if features_shape is None else features_shape[-1]

    def with_features(self, inputs):
        """Returns `FeatureInputs`, given `HeadInputs` as `prepared` returns them."""
        features, positions = inputs.source, inputs.positions
        if positions is not None:
            features = positions.arrange(features[:, None])[:, 0]
        features = ops.cast(features, self.compute_dtype)
        fields = {x.name: getattr(inputs, x.name) for x in dataclasses.fields(inputs)}
        return FeatureInputs(**fields, features=features)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KeyBlocks:
    """Keys and values of a sequence in blocks.

    Args:
        key: `<float>[B, H, G, S, D]`.
        value: `<float>[B, H, G, S, E]`.
        mask: `<bool>[B, 1, G, S]`, True for real tokens.
        bias: `<float>[B, 1, G, S]`, added to the logits; or None.
    """

    key: Any
    value: Any
    mask: Any
    bias: Any

    @classmethod
    def of(cls, inputs, block_length):
        """Returns the blocks of `HeadInputs` whose keys stand at their values."""

        def cut(x):
            return break_into_blocks(x, block_length, axis=2)

        mask = cut(known_mask(inputs.value, inputs.value_mask))
        bias = None if inputs.token_bias is None else cut(inputs.token_bias)
        return cls(cut(inputs.key), cut(inputs.value), mask, bias)

    @property
    def num_blocks(self):
        """Number of blocks, an integer if it is known."""
        return length_of(self.key, 2)


def key_sums(key, mask):
    """Returns sums `[..., D]` of the real keys of blocks, and their numbers."""
    key = ops.cast(key, "float32")
    sums = ops.sum(ops.where(mask[..., None], key, 0), axis=-2)
    return sums, ops.sum(ops.cast(mask, "float32"), axis=-1)


def key_means(sums, counts):
    """Returns the means `<float32>[..., D]` of `key_sums`."""
    return sums / ops.maximum(counts, 1)[..., None]


def comparable(query):
    """Scales queries to a largest entry of 1: products neither vanish nor overflow."""
    query = ops.cast(query, "float32")
    length = tensors.largest(ops.abs(query), axis=-1, keepdims=True)
    return query / ops.where(length > 0, length, 1)


def best_blocks(scores, candidates, count, training=None):
    """Returns the `count` blocks with the highest scores of each query.

    From `<float32>[..., G]` and a mask of those that may be chosen, broadcastable to
    it, to `<int32>[..., K]`: G if there is no block left. K is `count`, or G if it is
    known and less. Of blocks that are equal up to rounding, the earlier ones are
    chosen. In training, rounding may decide among them, which is faster.
    """
    num_blocks = length_of(scores, -1)
    # Infinities would become NaN in ONNX files, which multiply instead of choosing.
    scores = ops.clip(ops.stop_gradient(scores), -LARGEST, LARGEST)
    scores = ops.where(candidates, scores, -LARGEST)
    if is_known(num_blocks):
        count = min(count, num_blocks)
    else:
        padding = [(0, 0)] * (len(scores.shape) - 1) + [(0, count)]
        scores = ops.pad(scores, padding, constant_values=-LARGEST)
    if not training:
        sizes = ops.abs(scores)
        sizes = ops.where(sizes < LARGEST, sizes, 0)
        near_tie = NEAR_TIE * tensors.largest(sizes, axis=-1, keepdims=True)
        scores = membership.settled(scores, count, near_tie)
    best, blocks = backends.top_k(scores, count)
    return ops.where(best > -LARGEST, ops.cast(blocks, "int32"), num_blocks)


def own_scores(query, blocks, is_causal):
    """Returns products of queries with the mean keys of their blocks, `[B, H, L]`.

    Means are those of real keys, with `is_causal` of those up to the query. A query
    that sees no key has a large negative score.
    """
    own = break_into_blocks(query, blocks.key.shape[3], axis=2)
    own, key = ops.cast(own, "float32"), ops.cast(blocks.key, "float32")
    products, visible = product(own, key, transpose_y=True), blocks.mask[..., None, :]
    if is_causal:
        slots = numbers(key.shape[3])
        visible = ops.logical_and(visible, slots <= slots[:, None])
    count = ops.sum(ops.cast(visible, "float32"), axis=-1)
    means = ops.sum(ops.where(visible, products, 0), axis=-1) / ops.maximum(count, 1)
    means = ops.where(count > 0, means, large_negative("float32"))
    return put_back_blocks(means, length_of(query, 2), axis=2)


def entries_of(scores, blocks):
    """Returns the scores of some blocks.

    From `<float32>[B, H, ..., G]` and `<int32>[B, H, ..., K]`, G for none, to the shape
    of the latter, large and negative for none.
    """
    batch, heads, *rest, num_blocks = ops.shape(scores)
    leading = (batch, heads * math.prod(rest))
    table = ops.reshape(scores, (*leading, num_blocks))
    places = ops.reshape(blocks, (*leading, ops.shape(blocks)[-1]))
    found = tensors.entries_at(table, ops.minimum(places, num_blocks - 1))
    found = ops.reshape(found, ops.shape(blocks))
    return ops.where(blocks < num_blocks, found, large_negative("float32"))


def attend(
    dot_product, query, blocks, chosen, own=None, training=None, mixing_scores=None
):
    """Lets each query attend to its chosen blocks and its own block.

    Relative positions are in tokens. `chosen` is as from `best_blocks`, or None. `own`
    is `"causal"` if a query also sees its own block up to itself, `"whole"` for all of
    it. With `mixing_scores` (`[B, H, L, K + 1]`, the own block first), softmaxes inside
    each block are mixed by that of these scores; otherwise there is one softmax.
    Outputs do not depend on later queries.
    """
    parts = []
    if own is not None:
        parts.append(_own_block(dot_product, query, blocks, own == "causal", training))
    if chosen is not None:
        parts.append(_chosen_blocks(dot_product, query, blocks, chosen, training))
    outputs, sums = zip(*parts, strict=True)
    if mixing_scores is None:
        mixing_scores = ops.concatenate(sums, axis=3)
    return joined_parts(ops.concatenate(outputs, axis=3), mixing_scores)


def _own_block(dot_product, query, blocks, is_causal, training):
    """Returns `<float>[B, H, L, 1, E]` and `<float32>[B, H, L, 1]`."""
    length = length_of(query, 2)
    results = dot_product(
        break_into_blocks(query, blocks.key.shape[3], axis=2),
        blocks.key,
        blocks.value,
        attention_mask=blocks.mask[..., None, :],
        bias=None if blocks.bias is None else blocks.bias[..., None, :],
        use_causal_mask=is_causal,
        return_logsumexp=True,
        training=training,
    )
    output, logsumexp = (put_back_blocks(x, length, axis=2) for x in results)
    return output[..., None, :], logsumexp[..., None]


def _chosen_blocks(dot_product, query, blocks, chosen, training):
    """Returns `<float>[B, H, L, K, E]` and `<float32>[B, H, L, K]`."""
    batch, heads, length, number = ops.shape(chosen)
    num_blocks, size = blocks.num_blocks, blocks.key.shape[3]
    pairs = ops.reshape(chosen, (batch, heads, length * number))
    order = ClusterOrder(pairs, num_blocks + 1, size)
    # Repeated first, so that the copies' gradients are summed in a fixed order.
    query = ops.repeat(query, number, axis=2)
    own = order.cluster_of_chunk
    block = ops.minimum(own, num_blocks - 1)

    def read(x):
        """From `[B, 1 or H, G, S, ...]` to `[B, H, N, S, ...]`."""
        x = ops.broadcast_to(x, (batch, heads, *ops.shape(x)[2:]))
        return tensors.gather_blocks(x, block)

    distances = None
    if dot_product.max_relative_position is not None:
        slots = numbers(size)
        keys = (block[..., None] * size + slots)[..., None, :]
        distances = keys - order.tokens[..., None] // number
    mask = ops.logical_and(read(blocks.mask), (own < num_blocks)[..., None])
    output, logsumexp = dot_product(
        order.arrange(query),
        read(blocks.key),
        read(blocks.value),
        attention_mask=mask[..., None, :],
        bias=None if blocks.bias is None else read(blocks.bias)[..., None, :],
        distances=distances,
        return_logsumexp=True,
        training=training,
    )
    output = order.restore(output)
    shape = (batch, heads, length, number)
    return (
        ops.reshape(output, (*shape, output.shape[-1])),
        ops.reshape(order.restore(logsumexp[..., None]), shape),
    )


def step(group, tokens, query, chosen, size, index):
    """Lets a query attend to its own block, up to itself, and to those it chooses.

    `tokens` are rows `[B, H, G * S, row]`, see `caches.rows`, in blocks of `size`; the
    query, `<float>[B, H, 1, D]`, is at position `index`. `chosen` blocks are those of
    `best_blocks`, `<int32>[B, H, 1, K]`; None for no other block.
    """
    batch, heads, _, row = ops.shape(tokens)
    num_blocks = tokens.shape[2] // size
    block = ops.zeros((batch, heads, 1), "int32") + index // size
    if chosen is not None:
        block = ops.concatenate([block, chosen[:, :, 0]], axis=-1)
    blocks = ops.reshape(tokens, (batch, heads, num_blocks, size, row))
    read = tensors.gather_blocks(blocks, ops.minimum(block, num_blocks - 1))
    places = block[..., None] * size + numbers(size)
    shape = (batch, heads, block.shape[2] * size)
    places, read = ops.reshape(places, shape), ops.reshape(read, (*shape, row))
    distances = (places - index)[:, :, None]
    return rows.attend_to_rows(group, query, read, distances <= 0, distances)
