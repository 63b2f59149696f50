"""What one backend of Keras does not do as the others do."""

import keras
from keras import ops

#: Whether the backend of Keras is torch. It takes some of NumPy's arrays beside tensors
#: in Python's arithmetic and not others, and makes small integers of Booleans. On torch
#: a function of `ops.custom_gradient` has one output, no second derivative, and is not
#: compiled.
IS_TORCH = keras.backend.backend() == "torch"


def longest_integer():
    """Returns the dtype of the longest integers there are: JAX may have 32 bits."""
    if keras.backend.backend() != "jax":
        return "int64"
    import jax

    return str(jax.dtypes.canonicalize_dtype("int64"))


def is_compiled_by_torch():
    """Returns whether torch compiles or exports the function that runs now."""
    import torch

    return torch.compiler.is_compiling()


def _top_k(x, k, sorted=True):
    # `ops.top_k` takes any of equal entries, not the first ones, in order.
    places = ops.argsort(-x, axis=-1)[..., :k]
    return ops.take_along_axis(x, places, axis=-1), places


def _segment_sum(rows, places, num_segments):
    # `ops.segment_sum` takes twenty times as long, and converts all to float32.
    zeros = ops.zeros((num_segments, *rows.shape[1:]), rows.dtype)
    return zeros.index_add(0, places, rows)


def _scatter(indices, values, shape):
    # `ops.scatter` is a loop over the values. Indices are distinct.
    return ops.scatter_update(ops.zeros(shape, values.dtype), indices, values)


if keras.backend.backend() == "tensorflow":
    # For places that are not negative; `ops.take` has eight operations more.
    from tensorflow import gather as take
else:
    take = ops.take
top_k = _top_k if IS_TORCH else ops.top_k


def one_hot(x, num_classes, dtype):
    """Returns what `ops.one_hot` does; zeros for a number that is none of a class."""
    if dtype == "float32" and not IS_TORCH:
        return ops.one_hot(x, num_classes, dtype=dtype)
    # The function of torch refuses such a number; that of ONNX has only floats.
    return ops.cast(x[..., None] == ops.arange(num_classes, dtype=x.dtype), dtype)


segment_sum = _segment_sum if IS_TORCH else ops.segment_sum
scatter = _scatter if IS_TORCH else ops.scatter
