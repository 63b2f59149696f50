"""The inputs of layers that are no attention."""


def tokens_shape(layer, shape):
    """Raises a `ValueError` unless a shape is `[batch, length, dim]` with known dim."""
    if len(shape) != 3 or shape[-1] is None:
        raise ValueError(
            f"The inputs of `{type(layer).__name__}` must have the shape [batch, "
            f"length, dim], with a known dim. Received: shape={tuple(shape)}. Reshape "
            "inputs with other axes"
        )
