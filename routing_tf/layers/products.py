"""Products of matrices in batches."""

from keras import ops


def product(x, y):
    """Returns the products of matrices, whose other axes are broadcast.

    TensorFlow 2.21 with oneDNN writes beyond its memory where `matmul` broadcasts a
    batch of matrices; `einsum` is right and slow.

    Args:
        x: `<float>[..., L, D]`.
        y: `<float>[..., D, K]`, with more than two axes.

    Returns:
        `<float>[..., L, K]`.
    """
    while len(x.shape) < len(y.shape):
        x = x[None]
    while len(y.shape) < len(x.shape):
        y = y[None]
    return ops.matmul(_repeated(x, y), _repeated(y, x))


def _repeated(x, like):
    """Repeats matrices along axes that are 1, and are not in `like`."""
    axes = range(len(x.shape) - 2)
    if all(x.shape[axis] != 1 or like.shape[axis] == 1 for axis in axes):
        return x
    others = ops.shape(like)
    sizes = [others[axis] if x.shape[axis] == 1 else 1 for axis in axes]
    # In a loop over a batch of unknown size, XLA has no gradient of `broadcast_to`.
    return x * ops.ones((*sizes, 1, 1), x.dtype)
