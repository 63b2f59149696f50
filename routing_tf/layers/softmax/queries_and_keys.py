"""What changes queries and keys before their products: a norm, and rotary positions.

The product of a turned query and a turned key depends on the positions only through the
distance of the two tokens, without a table of distances.

Reference: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding"
(https://arxiv.org/abs/2104.09864), section 3.2.
"""

import keras
import numpy as np
from keras import ops

from routing_tf.layers.support.tensors import length_of

EPSILON = 1e-6


def normalized(x, scale, factor=1.0):
    """Normalises the last axis, at least in float32; `factor` multiplies the result.

    Reference: Zhang, Sennrich (https://arxiv.org/abs/1910.07467).
    """
    exact = ops.cast(x, keras.backend.result_type(x.dtype, "float32"))
    mean = ops.mean(ops.square(exact), axis=-1, keepdims=True)
    unit = exact * ops.rsqrt(mean + EPSILON * factor**2) * factor
    return ops.cast(unit * ops.cast(scale, unit.dtype), x.dtype)


def rotate(x, first_position, wavelength, positions=None):
    """Turns `<float>[batch, heads, length, dim]` by positions.

    The planes are those of `keras_hub.layers.RotaryEmbedding`: entry i of the first
    half of a vector lies in one with entry i of the second half. `wavelength` is that,
    over `2 * pi`, of a hypothetical plane after the slowest one. Positions default to
    consecutive ones from `first_position`.
    """
    size = x.shape[-1]
    exponents = np.arange(0, size, 2, dtype="float32") / np.float32(size)
    frequencies = np.float32(wavelength) ** -exponents
    if positions is None:
        positions = consecutive(x, first_position)
    positions = ops.cast(positions, "float32")[..., None]
    angles = ops.multiply(positions, frequencies)
    dtype = keras.backend.standardize_dtype(x.dtype)
    exact = dtype if dtype == "float64" else "float32"
    cos, sin = (ops.cast(wave(angles), exact) for wave in (ops.cos, ops.sin))
    first, second = ops.split(ops.cast(x, exact), 2, axis=-1)
    halves = [first * cos - second * sin, second * cos + first * sin]
    return ops.cast(ops.concatenate(halves, axis=-1), dtype)


def consecutive(x, first_position):
    """Returns the positions of `[batch, heads, length, dim]`, `<int32>[length]`."""
    # Computed in the graph: as constants of long sequences they would be as large as a
    # model.
    positions = ops.arange(length_of(x, 2), dtype="int32")
    return positions + ops.cast(first_position, "int32")
