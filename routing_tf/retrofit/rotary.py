"""Rotary positions of trained models."""

import keras
from keras import ops

from routing_tf.layers.support.configs import ConfiguredLayer


@keras.saving.register_keras_serializable("routing_tf")
class FrequencyRotary(ConfiguredLayer):
    """Turns pairs of entries by the position of their token, at given frequencies.

    It is what `HeadGroup` takes as `rotary`. The first half of the entries that turn
    is paired with their second half; entries after them do not turn.

    Args:
        frequencies: list of the angles by which each pair turns from one token to the
            next, in radians.
        long_frequencies: list of those that are used instead if a position is
            `trained_length` or more; None (the default) for the same ones.
        trained_length: see `long_frequencies`; None (the default) without them.
        factor: by what entries that turn are multiplied. Defaults to 1.0.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        x: `<float>[batch, heads, length, dim]`.
        positions: `<int32>`, broadcastable to `[batch, heads, length]`.

    Returns:
        A tensor with the shape of `x`.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers, retrofit

    rotary = retrofit.FrequencyRotary([1.0, 0.1])
    heads = layers.FullHeads(2, rotary=rotary)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16))).shape == (1, 10, 16)
    ```
    """

    def __init__(
        self,
        frequencies,
        long_frequencies=None,
        trained_length=None,
        factor=1.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.frequencies = list(frequencies)
        self.long_frequencies = long_frequencies and list(long_frequencies)
        self.trained_length = trained_length
        self.factor = factor
        self.built = True

    def call(self, x, positions):
        frequencies = ops.convert_to_tensor(self.frequencies, "float32")
        if self.long_frequencies is not None:
            is_long = ops.max(positions) >= self.trained_length
            long = ops.convert_to_tensor(self.long_frequencies, "float32")
            frequencies = ops.where(is_long, long, frequencies)
        angles = ops.cast(positions, "float32")[..., None] * frequencies
        cosine, sine = (
            ops.cast(function(angles) * self.factor, x.dtype)
            for function in (ops.cos, ops.sin)
        )
        half = len(self.frequencies)
        first, second, rest = (
            x[..., :half],
            x[..., half : 2 * half],
            x[..., 2 * half :],
        )
        parts = [first * cosine - second * sine, second * cosine + first * sine]
        return ops.concatenate(parts + [rest] * (rest.shape[-1] > 0), axis=-1)

    def compute_output_shape(self, x_shape, positions_shape=None):
        return x_shape
