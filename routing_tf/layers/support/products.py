"""Products of matrices in batches."""

import keras
from keras import ops


def product(x, y, transpose_x=False, transpose_y=False):
    """Returns the products of matrices; their other axes are broadcast.

    TensorFlow 2.21 with oneDNN writes beyond its memory if `matmul` broadcasts a batch
    of matrices; `einsum` is right but slow. `x` is `<float>[..., L, D]` and `y`, which
    has more than two axes, `<float>[..., D, K]`.
    """
    while len(x.shape) < len(y.shape):
        x = x[None]
    while len(y.shape) < len(x.shape):
        y = y[None]
    if x.shape[:-2] != y.shape[:-2]:
        x, y = _repeated(x, y), _repeated(y, x)
    if keras.backend.backend() == "tensorflow" and x.dtype == y.dtype:
        # A graph would transpose in a separate operation, and keep the result.
        import tensorflow as tf

        return tf.matmul(x, y, transpose_a=transpose_x, transpose_b=transpose_y)
    x = ops.swapaxes(x, -1, -2) if transpose_x else x
    y = ops.swapaxes(y, -1, -2) if transpose_y else y
    return ops.matmul(x, y)


def _repeated(x, like):
    """Repeats matrices along axes whose length is 1, but not in `like`."""
    axes = range(len(x.shape) - 2)
    if all(x.shape[axis] != 1 or like.shape[axis] == 1 for axis in axes):
        return x
    others = ops.shape(like)
    sizes = [others[axis] if x.shape[axis] == 1 else 1 for axis in axes]
    # In a loop over a batch of unknown size, XLA has no gradient of `broadcast_to`.
    return x * ops.ones((*sizes, 1, 1), x.dtype)
