"""Long-short attention: a window, and landmarks that depend on the tokens."""

import keras
from keras import ops

from routing_tf.layers.softmax.softmax_attention import softmax
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import initializer
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.learned import HeadNorm
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share
from routing_tf.zoo.parts.summaries import SummaryHeads

__all__ = ["LongShortHeads"]

NO_PLACE = "landmarks are mixtures of tokens, which have no next token"


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


def _settings(sizes):
    window = share(sizes, 2)
    segment = -(-sizes.max_length // window)
    return {"attention_window": window, "segment_length": segment}


PATTERNS = {
    "long_short": Pattern(
        LongShortHeads,
        _settings,
        refuses=("entmax_alpha", "key_shift", "rotary_positions"),
    )
}
