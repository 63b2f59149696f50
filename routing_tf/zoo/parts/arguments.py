"""The inputs of layers that are no attention."""

from keras import ops


def tokens_shape(layer, shape):
    """Raises a `ValueError` unless a shape is `[batch, length, dim]` with known dim."""
    if len(shape) != 3 or shape[-1] is None:
        raise ValueError(
            f"The inputs of `{type(layer).__name__}` must have the shape [batch, "
            f"length, dim], with a known dim. Received: shape={tuple(shape)}. Reshape "
            "inputs with other axes"
        )


def without_padding(x, mask):
    """Returns tokens with zeros at padding, and which of them are real."""
    if mask is None:
        return x, ops.ones(ops.shape(x)[:2], dtype="bool")
    real = ops.cast(mask, "bool")
    return ops.where(real[..., None], x, ops.zeros_like(x)), real
