"""An encoder whose sequence becomes shorter from block to block, and its way back."""

import keras
import numpy as np
from keras import ops

from routing_tf import layers
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.keras_internals import mask_of
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.blocks import size_of_head
from routing_tf.zoo.parts.blocks import transformer_block

__all__ = ["FunnelBackbone"]

LONGEST_WAVE = 10_000


class _PooledHeads(layers.FullHeads):
    """Full attention with the relative positions of Transformer-XL, of pooled tokens.

    A logit is `(q + u) k + (q + v) W r`, where r are sines and cosines of the distance
    of a query and a key. Those of a distance are sums of products of those of its ends:
    so a query is turned by its position and multiplied by the waves of keys, and there
    is no tensor of distances ("factorized" in the authors' code).

    Args:
        num_heads: number of heads.
        query_stride: distance of adjacent queries in the sequence that came first.
        key_stride: the same of keys.
        separate_cls: whether the first token has no place.
        **kwargs: arguments of `FullHeads`.
    """

    def __init__(self, num_heads, query_stride, key_stride, separate_cls, **kwargs):
        super().__init__(num_heads, **kwargs)
        self.query_stride = query_stride
        self.key_stride = key_stride
        self.separate_cls = separate_cls

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        shape = (self.num_heads, 1, self.key_dim)
        self.content_bias = self.add_weight(shape, "zeros", name="content_bias")
        self.position_bias = self.add_weight(shape, "zeros", name="position_bias")
        self.position_kernel = self.add_weight(
            name="position_kernel", shape=(self.num_heads, self.input_dim, self.key_dim)
        )

    def attend(self, inputs, training=None):
        query, mask = inputs.query, inputs.value_mask
        # Queries are already multiplied by it.
        scale = self.key_dim**-0.5
        return self.dot_product(
            query + scale * self._as(self.content_bias, query),
            inputs.key,
            inputs.value,
            attention_mask=None if mask is None else mask[:, :, None],
            bias=self.position_logits(
                query + scale * self._as(self.position_bias, query),
                ops.shape(inputs.key)[2],
            ),
            training=training,
        )

    def position_logits(self, query, num_keys):
        """Returns logits of distances, `<float>[batch, heads, queries, keys]`."""
        kernel = self._as(self.position_kernel, query)
        projected = ops.einsum("bhqk,hdk->bhqd", query, kernel)
        of_sin, of_cos = ops.split(projected, 2, axis=-1)
        sin, cos = self._waves(ops.shape(query)[2], self.query_stride, query.dtype)
        turned = [of_sin * sin + of_cos * cos, of_cos * sin - of_sin * cos]
        sin, cos = self._waves(num_keys, self.key_stride, query.dtype)
        keys = ops.concatenate([cos, sin], axis=-1)
        return ops.matmul(ops.concatenate(turned, axis=-1), ops.transpose(keys))

    def _waves(self, length, stride, dtype):
        """Returns sines and cosines of positions, each `[length, input_dim / 2]`."""
        half = self.input_dim // 2
        frequencies = LONGEST_WAVE ** (-np.arange(half, dtype="float32") / half)
        numbers = ops.cast(ops.arange(length), "float32")[:, None]
        numbers = numbers - float(self.separate_cls)
        angles = ops.multiply(numbers * stride, frequencies)
        # The first token has the number -1 then, and is at no distance from others.
        has_place = ops.cast(numbers >= 0, "float32")
        waves = ops.sin(angles) * has_place, ops.cos(angles) * has_place
        return [ops.cast(wave, dtype) for wave in waves]

    def _as(self, weight, x):
        return ops.cast(ops.convert_to_tensor(weight), x.dtype)


@keras.saving.register_keras_serializable("routing_tf")
class FunnelBackbone(ConfiguredLayer, keras.Model):
    """An encoder that halves the length between its blocks, and a decoder to the whole.

    Each block but the first begins with a layer whose queries are means of two adjacent
    hidden states, and whose keys and values are the states before. The decoder repeats
    the last states to the full length, adds those of the first block, and applies a few
    more layers. It is not causal: tokens read those after them, and share means with
    them.

    Means leave padding out, so it has no influence; in the authors' code a pair with
    one padding is padding. Attention has the relative positions of Transformer-XL, as
    in the paper, and no type of segments.

    Args:
        hidden_dim: size of the inputs and all hidden states, an even multiple of
            `num_heads`.
        num_heads: number of heads.
        block_sizes: tuple, number of layers in each block. Defaults to `(4, 4, 4)`.
        num_decoder_layers: number of layers of the full length in the end; 0 for no
            decoder, and outputs of the last block's length. Defaults to 2.
        separate_cls: whether the first token, `[CLS]`, is never part of a mean and has
            no relative positions. Defaults to True.
        intermediate_dim: inner size of the feed-forward parts; None (the default) for
            `4 * hidden_dim`.
        activation: that of `layers.FeedForward`. Defaults to `"sigmoid_gelu"`, which
            is close to the GELU of the paper.
        dropout: rate of dropped outputs of each part while training, in [0, 1).
            Defaults to 0.0.
        **kwargs: arguments of `keras.Model`, such as `name` and `dtype`.

    Call arguments:
        inputs: `<float>[batch, length, hidden_dim]`, embeddings without positions.
        mask: `<bool>[batch, length]`, True for real tokens; None for no padding.
            Defaults to the Keras mask of `inputs`.
        training: whether dropout is on.

    Returns:
        `<float>[batch, length, hidden_dim]`, with the mask of the inputs. Without a
        decoder `<float>[batch, pooled length, hidden_dim]`, where each pooling makes
        `ceil(n / 2)` states of n, besides that of `[CLS]`; with the mask of those that
        contain a real token.

    Raises:
        ValueError: if `num_heads` does not divide `hidden_dim` or that is odd.

    Example:

    ```python
    import numpy as np
    from routing_tf import zoo

    tokens = np.random.default_rng(0).normal(size=(2, 33, 16)).astype("float32")
    funnel = zoo.FunnelBackbone(16, num_heads=2, block_sizes=(1, 1, 1))
    assert funnel(tokens).shape == (2, 33, 16)
    assert [x.shape[1] for x in funnel.encode(tokens)] == [33, 17, 9]
    ```

    Reference: Dai et al., "Funnel-Transformer: Filtering out Sequential Redundancy for
    Efficient Language Processing" (https://arxiv.org/abs/2006.03236). Tested only
    against NumPy code of this repository.
    """

    hidden_dim = Argument(check_positive_integer)
    num_decoder_layers = Argument(check_non_negative_integer)
    separate_cls = Argument(check_flag)
    intermediate_dim = Argument(check_optional_integer)
    dropout = Argument(check_rate)

    def __init__(
        self,
        hidden_dim,
        num_heads,
        block_sizes=(4, 4, 4),
        num_decoder_layers=2,
        separate_cls=True,
        intermediate_dim=None,
        activation="sigmoid_gelu",
        dropout=0.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        size_of_head(self.hidden_dim, num_heads)
        if self.hidden_dim % 2:
            raise ValueError(
                "`hidden_dim` must be even, for sines and cosines of distances. "
                f"Received: hidden_dim={hidden_dim}"
            )
        self.block_sizes = _checked_sizes(block_sizes)
        self.num_decoder_layers = num_decoder_layers
        self.separate_cls = separate_cls
        self.intermediate_dim = intermediate_dim
        self.activation = activation
        self.dropout = dropout
        self.blocks = [
            [
                self._layer(f"block_{block}_layer_{i}", block, block > 0 and i == 0)
                for i in range(size)
            ]
            for block, size in enumerate(self.block_sizes)
        ]
        self.decoder_layers = [
            self._layer(f"decoder_layer_{i}", 0) for i in range(self.num_decoder_layers)
        ]

    def _layer(self, name, block, is_pooling=False):
        """Makes a layer of a block; a pooling one reads what the block before made."""
        heads = _PooledHeads(
            self.num_heads,
            query_stride=2**block,
            key_stride=2 ** (block - is_pooling),
            separate_cls=self.separate_cls,
            name="heads",
        )
        return transformer_block(
            [heads],
            self.hidden_dim,
            self.intermediate_dim or 4 * self.hidden_dim,
            self.activation,
            reads_memory=is_pooling,
            dropout=self.dropout,
            name=name,
            dtype=self.dtype_policy,
        )

    def build(self, inputs_shape):
        refusals.tokens_shape(self, inputs_shape)
        if inputs_shape[-1] != self.hidden_dim:
            raise ValueError(
                "Inputs must be of the size `hidden_dim`. Received: shape="
                f"{tuple(inputs_shape)}, hidden_dim={self.hidden_dim}. Project them to "
                "this size"
            )
        shape = (None, None, self.hidden_dim)
        for layer in (*sum(self.blocks, []), *self.decoder_layers):
            layer.build(shape)

    def call(self, inputs, mask=None, training=None):
        refusals.tokens_shape(self, inputs.shape, self.hidden_dim)
        mask = mask_of(inputs) if mask is None else mask
        states = self.encode(inputs, mask, training)
        if not self.decoder_layers:
            return states[-1]
        x = states[0] + self._repeated(states[-1], ops.shape(inputs)[1])
        for layer in self.decoder_layers:
            x = layer(x, padding_mask=mask, training=training)
        return x

    def encode(self, inputs, mask=None, training=None):
        """Returns the last hidden states of each block, a list from long to short.

        Args:
            inputs: as in a call.
            mask: as in a call; None (the default) for no padding.
            training: as in a call.
        """
        refusals.check_built(self, "encode")
        x, states = ops.convert_to_tensor(inputs, dtype=self.compute_dtype), []
        for block, (first, *rest) in enumerate(self.blocks):
            if block == 0:
                x = first(x, padding_mask=mask, training=training)
            else:
                memory, memory_mask = x, mask
                x, mask = self._pooled(memory, mask), self._pooled_mask(mask)
                x = first(
                    x,
                    memory=memory,
                    padding_mask=mask,
                    memory_mask=memory_mask,
                    training=training,
                )
            for layer in rest:
                x = layer(x, padding_mask=mask, training=training)
            states.append(x)
        return states

    def _pooled(self, x, mask):
        """Returns means of two adjacent states `[batch, length, dim]`, of real ones."""
        real = ops.ones_like(x[..., :1])
        if mask is not None:
            mask = ops.cast(mask, "bool")[..., None]
            real, x = ops.cast(mask, x.dtype), ops.where(mask, x, 0)
        (first, x), (_, real) = self._split(x), self._split(real)
        number = ops.sum(_pairs(real), axis=2)
        means = ops.sum(_pairs(x), axis=2) / ops.maximum(number, 1)
        return ops.concatenate([first, means], axis=1)

    def _pooled_mask(self, mask):
        """Returns which pairs `[batch, length]` have a real token."""
        if mask is None:
            return None
        first, rest = self._split(ops.cast(mask, "bool")[..., None])
        real = ops.any(_pairs(rest), axis=2)
        return ops.concatenate([first, real], axis=1)[..., 0]

    def _repeated(self, x, length):
        """Returns states of the last block, each once for all tokens of its mean."""
        first, rest = self._split(x)
        rest = ops.repeat(rest, 2 ** (len(self.blocks) - 1), axis=1)
        return ops.concatenate([first, rest], axis=1)[:, :length]

    def _split(self, x):
        """Returns what is apart from means, `[CLS]` or nothing, and the rest."""
        number = int(self.separate_cls)
        return x[:, :number], x[:, number:]

    def compute_output_shape(self, inputs_shape):
        batch, length, dim = inputs_shape
        if self.decoder_layers or length is None:
            return inputs_shape
        apart = int(self.separate_cls)
        for _ in self.block_sizes[1:]:
            length = apart + (length - apart + 1) // 2
        return (batch, length, dim)

    def compute_mask(self, inputs, mask=None):
        if not self.decoder_layers:
            for _ in self.block_sizes[1:]:
                mask = self._pooled_mask(mask)
        return mask


def _checked_sizes(block_sizes):
    """Returns a tuple of positive integers; raises a `ValueError` if it is none."""
    if not isinstance(block_sizes, (tuple, list)) or not block_sizes:
        raise ValueError(
            "`block_sizes` must be a tuple with the number of layers of each block. "
            f"Received: block_sizes={block_sizes!r}"
        )
    return tuple(check_positive_integer("block_sizes", size) for size in block_sizes)


def _pairs(x):
    """Puts adjacent rows side by side, `[B, pairs, 2, size]`; an odd one with zeros."""
    x = ops.pad(x, [(0, 0), (0, 1), (0, 0)])
    return ops.stack([x[:, :-1:2], x[:, 1::2]], axis=2)
