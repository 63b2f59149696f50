"""What torch, the third backend of Keras, does not do as TensorFlow and JAX do."""

import keras
from keras import ops


def is_torch():
    """Whether the backend of Keras is torch."""
    return keras.backend.backend() == "torch"


def mixes_arrays():
    """Whether NumPy's arrays may stand beside tensors in Python's arithmetic.

    Torch takes some and not others, and makes small integers of Booleans.
    """
    return not is_torch()


def states_gradients():
    """Whether `ops.custom_gradient` takes any function, whatever is done with it.

    On torch a function has one output, no second derivative, and is not compiled.
    """
    return not is_torch()


def top_k(x, k, sorted=True):
    """Returns what `ops.top_k` does; of equal entries the first ones, in order.

    Torch takes any of them.
    """
    if not is_torch():
        return ops.top_k(x, k, sorted=sorted)
    places = ops.argsort(-x, axis=-1)[..., :k]
    return ops.take_along_axis(x, places, axis=-1), places


def one_hot(x, num_classes, dtype):
    """Returns what `ops.one_hot` does; zeros for a number that is none of a class.

    Torch refuses such a number; ONNX has only floats.
    """
    if dtype == "float32" and not is_torch():
        return ops.one_hot(x, num_classes, dtype=dtype)
    return ops.cast(x[..., None] == ops.arange(num_classes, dtype=x.dtype), dtype)


def segment_sum(rows, places, num_segments):
    """Returns what `ops.segment_sum` does, also of no segment.

    On torch that takes twenty times as long, and converts all to float32.
    """
    if not is_torch():
        return ops.segment_sum(rows, places, num_segments=num_segments)
    zeros = ops.zeros((num_segments, *rows.shape[1:]), rows.dtype)
    return zeros.index_add(0, places, rows)


def scatter(indices, values, shape):
    """Returns what `ops.scatter` does with distinct indices.

    On torch that is a loop over the values.
    """
    if not is_torch():
        return ops.scatter(indices, values, shape)
    return ops.scatter_update(ops.zeros(shape, values.dtype), indices, values)
