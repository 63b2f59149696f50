"""A few keys for each block: memory compressed attention and long-short attention."""

import keras
from keras import ops

from routing_tf.layers.softmax.softmax_attention import softmax
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import initializer
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.learned import HeadNorm
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share
from routing_tf.zoo.parts.summaries import SummaryHeads

__all__ = ["CompressedHeads", "LongShortHeads"]


COMPRESSIONS = ("convolution", "mean", "max")
MANY_TOKENS = "a compressed key stands for several tokens"

NO_PLACE = "landmarks are mixtures of tokens, which have no next token"


@keras.saving.register_keras_serializable("routing_tf")
class CompressedHeads(SummaryHeads):
    """Heads whose queries see one key and value for each block of `ratio` tokens.

    Work and memory are those of full attention, divided by `ratio`. Under a causal
    mask, a query sees the blocks that end at it or before it. With an
    `attention_window`, it also sees the tokens near it, each with its own key, in the
    same softmax, and still all blocks. Without a window, each head has a learned key
    and value, zero at first, which every query sees besides the blocks, because the
    first queries would see nothing else.

    The compressions, of keys and of values:

    - `"convolution"` (Liu et al.): a convolution with a kernel and a stride of `ratio`,
      separate for each head; padding counts as zeros.
    - `"mean"` and `"max"`: pooling of the real tokens, as in the second level of
      Poolingformer, whose first level is the window.

    Tensor2Tensor adds the first token of the sequence instead of a learned key, and
    hides a block from its last token.

    Args:
        num_heads: number of heads in the group.
        compression: `"convolution"` (the default), `"mean"` or `"max"`.
        ratio: length of a block, in tokens. Defaults to 3.
        attention_window: number of tokens, including the query's own, that it sees with
            their own keys: the last ones under a causal mask, otherwise as many on each
            side; None (the default) for none.
        kernel_initializer: initializer of the kernels of the convolutions. Defaults to
            `"glorot_uniform"`.
        **kwargs: arguments of `HeadGroup`, without `key_shift`, `rotary_positions` and
            `token_bias_weight`; relative positions are in tokens, and need a window.

    Call arguments and Returns: as in `HeadGroup`. In a map of attention weights each
    token of a block has an equal share of the weight of the block. The last block may
    be shorter.

    Raises:
        ValueError: if relative positions are given without a window, or an argument has
            no meaning; when called, with a token bias, with another sequence as value
            and a window, or if `use_causal_mask=True` and query and value differ in
            length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.CompressedHeads(2, ratio=3, attention_window=4)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: Liu et al., "Generating Wikipedia by Summarizing Long Sequences"
    (https://arxiv.org/abs/1801.10198), section 4.2.3; Zhang et al., "Poolingformer"
    (https://arxiv.org/abs/2105.04371), section 3.
    """

    #: Of a block.
    num_summaries = 1

    compression = Argument(check_choice, COMPRESSIONS)
    ratio = Argument(check_positive_integer)
    attention_window = Argument(check_optional_integer)
    kernel_initializer = Argument(initializer)

    def __init__(
        self,
        num_heads,
        compression="convolution",
        ratio=3,
        attention_window=None,
        kernel_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        refusals.refuse_arguments(
            self, MANY_TOKENS, "key_shift", "rotary_positions", "token_bias_weight"
        )
        self.compression = compression
        self.ratio = ratio
        self.attention_window = attention_window
        if attention_window is None:
            refusals.refuse_arguments(
                self, f"{MANY_TOKENS}, and there is no window", "max_relative_position"
            )
        self.kernel_initializer = kernel_initializer

    @property
    def block_length(self):
        """Length of a block, in tokens."""
        return self.ratio

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        key_dim, value_dim = self.key_dim, self.value_dim
        if self.compression == "convolution":
            self.key_kernel, self.key_bias = self._add_convolution("key", key_dim)
            self.value_kernel, self.value_bias = self._add_convolution(
                "value", value_dim
            )
        if self.attention_window is None:
            self.null_key = self._add_null("null_key", key_dim)
            self.null_value = self._add_null("null_value", value_dim)

    def _add_null(self, name, dim):
        return self.add_weight((self.num_heads, 1, dim), "zeros", name=name)

    def _add_convolution(self, name, dim):
        """Makes kernel and bias of a convolution with a group for each head.

        The axes of a kernel are slots of a block, inputs, and outputs of all heads.
        """
        kernel = self.add_weight(
            name=f"{name}_kernel",
            shape=(self.ratio, dim, self.num_heads * dim),
            initializer=cloned(self.kernel_initializer),
        )
        bias = self.add_weight(
            name=f"{name}_bias", shape=(self.num_heads * dim,), initializer="zeros"
        )
        return kernel, bias

    def prepared(self, inputs):
        refusals.refuse_bias(inputs, MANY_TOKENS)
        return super().prepared(inputs)

    def summarized(self, key, value, real, bias):
        real = real[..., None]
        dim, columns = self.value_dim, value.shape[-1]
        summary = self._compressed(value[..., :dim], real, "value")
        if columns is None or columns > dim:
            shares = _mean(value[..., dim:], real)
            summary = ops.concatenate([summary, shares], axis=-1)
        return tuple(
            x[..., None, :] for x in (self._compressed(key, real, "key"), summary)
        )

    def seen_by_all(self, key, value, visible):
        if self.attention_window is not None:
            return key, value, visible
        first = [
            ops.cast(ops.convert_to_tensor(weight), key.dtype)
            for weight in (self.null_key, self.null_value)
        ]
        key, value = (_after(null, x) for null, x in zip(first, (key, value)))
        null = ops.ones((*ops.shape(visible)[:-1], 1), "bool")
        return key, value, ops.concatenate([null, visible], axis=-1)

    def _compressed(self, x, real, name):
        """From `[batch, heads, blocks, ratio, dim]` to a vector for each block."""
        if self.compression == "mean":
            return _mean(x, real)
        if self.compression == "max":
            least = ops.cast(large_negative(x.dtype), x.dtype)
            largest = tensors.largest(ops.where(real, x, least), axis=-2)
            return ops.where(ops.any(real, axis=-2), largest, 0)
        batch, heads, num_blocks, ratio, dim = ops.shape(x)
        weights = {
            "key": (self.key_kernel, self.key_bias),
            "value": (self.value_kernel, self.value_bias),
        }
        kernel, bias = (
            ops.cast(ops.convert_to_tensor(weight), x.dtype) for weight in weights[name]
        )
        kernel = ops.reshape(kernel, (ratio * dim, heads, dim))
        x = ops.reshape(ops.where(real, x, 0), (batch, heads, num_blocks, ratio * dim))
        x = product(x, ops.transpose(kernel, (1, 0, 2)))
        return x + ops.reshape(bias, (heads, 1, dim))


def _mean(x, real):
    """Returns the mean over the real entries of axis -2; zero if there are none."""
    exact = ops.where(real, ops.cast(x, "float32"), 0.0)
    number = ops.sum(ops.cast(real, "float32"), axis=-2)
    return ops.cast(ops.sum(exact, axis=-2) / ops.maximum(number, 1.0), x.dtype)


def _after(null, x):
    """Puts a vector of each head, padded with zeros, before `[B, H, S, E]`."""
    batch, heads, _, columns = ops.shape(x)
    null = ops.pad(null, [(0, 0), (0, 0), (0, columns - null.shape[-1])])
    null = ops.broadcast_to(null, (batch, heads, 1, columns))
    return ops.concatenate([null, x], axis=2)


def _compressed(sizes):
    window = share(sizes, 2)
    # As many blocks as the other half of the window has tokens.
    ratio = -(-sizes.max_length // window)
    return {"ratio": ratio, "attention_window": window}


@keras.saving.register_keras_serializable("routing_tf")
class LongShortHeads(SummaryHeads):
    """Heads whose queries see a window of tokens, and landmarks of whole segments.

    The landmarks of a segment with keys K and values V are `P^T K` and `P^T V`, where
    `P = softmax(K W)` over the tokens of the segment (dynamic projection). One softmax
    weighs tokens of the window and landmarks. Before it, the keys and values of tokens
    and of landmarks pass through separate layer normalizations over all heads of the
    group (DualLN). With `segment_length=None`, the whole sequence is one segment, and
    work and memory are linear in the length. Under a causal mask, segments must be
    shorter, and a query sees those that end at it or before it.

    Differences from the paper and its code: W reads the projected keys of each head
    instead of the features that keys are made from; keys and values have separate
    scales and offsets, because they may differ in size. The code of the paper also
    hides a segment from its last token, and has sliding windows only under a causal
    mask, while windows always slide here.

    Args:
        num_heads: number of heads in the group.
        attention_window: number of tokens, including the query's own, that it sees in
            its window: the last ones under a causal mask, otherwise as many on each
            side. Defaults to 128.
        segment_length: number of tokens of a segment; None for the whole sequence.
            Defaults to 16.
        num_landmarks: number of landmarks of a segment. Defaults to 1.
        projection_initializer: initializer of W. Defaults to `"glorot_uniform"`.
        **kwargs: arguments of `HeadGroup`, without `key_shift` and `rotary_positions`;
            relative positions are in tokens, in the window.

    Call arguments and Returns: as in `HeadGroup`. A token bias is added to the logits
    of its key in windows, and to the scores `K W` of its token. Maps show weights of
    tokens, also through landmarks, before the values are normalized.

    Raises:
        ValueError: if an argument has no meaning; when called, with another sequence as
            value, or with a causal mask and `segment_length=None`.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.LongShortHeads(2, attention_window=4, segment_length=3)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: Zhu et al., "Long-Short Transformer" (https://arxiv.org/abs/2107.02192),
    section 3.
    """

    attention_window = Argument(check_positive_integer)
    segment_length = Argument(check_optional_integer)
    num_landmarks = Argument(check_positive_integer)
    projection_initializer = Argument(initializer)

    def __init__(
        self,
        num_heads,
        attention_window=128,
        segment_length=16,
        num_landmarks=1,
        projection_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        refusals.refuse_arguments(self, NO_PLACE, "key_shift", "rotary_positions")
        self.attention_window = attention_window
        self.segment_length = segment_length
        self.num_landmarks = num_landmarks
        self.projection_initializer = projection_initializer
        self.norms = {
            name: HeadNorm(name=f"{name}_norm", dtype=self.dtype_policy)
            for name in ("window_key", "window_value", "landmark_key", "landmark_value")
        }

    @property
    def block_length(self):
        """Length of a segment, in tokens; None for the whole sequence."""
        return self.segment_length

    @property
    def num_summaries(self):
        """Number of landmarks of a segment."""
        return self.num_landmarks

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        for name, norm in self.norms.items():
            dim = self.key_dim if name.endswith("key") else self.value_dim
            norm.build((None, self.num_heads, None, dim))
        # With one axis for all heads, its initializer knows the number of inputs.
        self.projection = self.add_weight(
            name="projection",
            shape=(self.key_dim, self.num_heads * self.num_landmarks),
            initializer=cloned(self.projection_initializer),
        )

    def prepared(self, inputs):
        if inputs.use_causal_mask:
            self._check_segments()
        return super().prepared(inputs)

    def make_cache(self, batch_size, max_length, positions=None):
        self._check_segments()
        return super().make_cache(batch_size, max_length, positions)

    def _check_segments(self):
        if self.segment_length is None:
            raise ValueError(
                "`segment_length` must be a positive integer under a causal mask: "
                "landmarks of the whole sequence contain later tokens. Received: "
                "segment_length=None. Pass the number of tokens of a segment"
            )

    def near(self, key, value):
        return self._normalized("window", key, value)

    def summarized(self, key, value, real, bias):
        dim, heads, landmarks = self.key_dim, self.num_heads, self.num_landmarks
        projection = ops.cast(ops.convert_to_tensor(self.projection), key.dtype)
        projection = ops.reshape(projection, (dim, heads, landmarks))
        scores = ops.einsum("bhnld,dhr->bhnrl", key, projection)
        scores = ops.cast(scores, "float32")
        hidden = large_negative("float32")
        real = real[:, :, :, None]
        if bias is not None:
            # A token that a bias hides is not padding: it counts if there is nothing
            # else.
            bias = ops.maximum(ops.cast(bias, "float32"), hidden / 2)
            scores = scores + bias[:, :, :, None]
        weights = softmax(ops.where(real, scores, hidden))
        weights = ops.cast(ops.where(real, weights, 0.0), key.dtype)
        return self._normalized(
            "landmark", *(ops.matmul(weights, x) for x in (key, value))
        )

    def _normalized(self, name, key, value):
        """Normalizes keys and values, except columns after the value size."""
        dim, norm = self.value_dim, self.norms[f"{name}_value"]
        normalized = norm(value[..., :dim])
        if value.shape[-1] is None or value.shape[-1] > dim:
            rest = value[..., dim:]
            normalized = ops.concatenate([normalized, rest], axis=-1)
        return self.norms[f"{name}_key"](key), normalized


def _long_short(sizes):
    window = share(sizes, 2)
    segment = -(-sizes.max_length // window)
    return {"attention_window": window, "segment_length": segment}


PATTERNS = {
    "compressed": Pattern(
        CompressedHeads,
        _compressed,
        refuses=("entmax_alpha", "key_shift", "rotary_positions"),
    ),
    "long_short": Pattern(
        LongShortHeads,
        _long_short,
        refuses=("entmax_alpha", "key_shift", "rotary_positions"),
    ),
}
