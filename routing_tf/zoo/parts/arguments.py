"""Checks of arguments of layers that are no attention."""

import math
import numbers

from routing_tf.layers.support.validation import check_choice


def one_of(name, value, choices):
    """Returns `value` if it is among `choices`; else raises a `ValueError`."""
    check_choice(name, value, choices)
    return value


def number(name, value, below=math.inf):
    """Returns a number from 0 to less than `below`; else raises a `ValueError`."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < below:
        raise ValueError(
            f"`{name}` must be a number in the range [0, {below}). "
            f"Received: {name}={value!r}"
        )
    return value


def tokens_shape(layer, shape):
    """Raises a `ValueError` unless a shape is `[batch, length, dim]` with known dim."""
    if len(shape) != 3 or shape[-1] is None:
        raise ValueError(
            f"The inputs of `{type(layer).__name__}` must have the shape [batch, "
            f"length, dim], with a known dim. Received: shape={tuple(shape)}. Reshape "
            "inputs with other axes"
        )
