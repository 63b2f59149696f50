"""The inputs of layers that are no attention."""

from keras import ops


def tokens_shape(layer, shape, dim=None):
    """Raises a `ValueError` unless a shape is `[batch, length, dim]` with known dim."""
    if len(shape) != 3 or shape[-1] is None:
        raise ValueError(
            f"The inputs of `{type(layer).__name__}` must have the shape [batch, "
            f"length, dim], with a known dim. Received: shape={tuple(shape)}. Reshape "
            "inputs with other axes"
        )
    if dim not in (None, shape[-1]):
        raise ValueError(
            f"The inputs of `{type(layer).__name__}` must be of the size {dim} that it "
            f"was built for. Received: shape={tuple(shape)}. Make another layer"
        )


def check_built(layer, method):
    """Raises a `ValueError` for a method that needs weights, before there are any."""
    if not layer.built:
        raise ValueError(
            f"`{method}` needs a layer that is built. Received: built=False with "
            f"name={layer.name!r}. Call it before, or `build((None, None, dim))`"
        )


def without_padding(x, mask):
    """Returns tokens with zeros at padding, and which of them are real."""
    shape = tuple(x.shape[:2])
    if shape[1] == 0:
        raise ValueError(
            f"Inputs must have at least one token. Received: shape={tuple(x.shape)}"
        )
    if mask is None:
        return x, ops.ones(ops.shape(x)[:2], dtype="bool")
    given = tuple(mask.shape)
    if len(given) != 2 or any(
        None not in pair and pair[0] != pair[1] for pair in zip(given, shape)
    ):
        raise ValueError(
            "`mask` must have the shape [batch, length] of the inputs. Received: a "
            f"mask of shape {given} with inputs of shape {tuple(x.shape)}"
        )
    real = ops.cast(mask, "bool")
    return ops.where(real[..., None], x, ops.zeros_like(x)), real
