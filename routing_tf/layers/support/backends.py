"""What one backend of Keras does not do as others: operations, gradients, shapes."""

import contextlib
import contextvars
import functools

import keras
from keras import ops

from routing_tf.layers.support.keras_internals import is_compiled_by_xla

_are_stated = contextvars.ContextVar("are_stated", default=True)
_are_static = contextvars.ContextVar("are_static", default=False)

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


@contextlib.contextmanager
def automatic_gradients():
    """Inside this context, the backend derives all gradients of layers itself.

    Layers state some gradients, to save time and memory. JAX has no forward mode
    (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) of these, except in this context. What is
    traced inside stays so, also once compiled.

    Example:

    ```python
    import keras
    import numpy as np
    from routing_tf import layers

    attention = layers.MixedAttention([layers.RoutedHeads(2, 4, 16)], key_dim=8)
    x = np.random.normal(size=(1, 32, 16)).astype("float32")
    with layers.automatic_gradients():
        y = attention(x, use_causal_mask=True)
        if keras.backend.backend() == "jax":
            import jax

            jax.jvp(lambda x: attention(x, use_causal_mask=True), (x,), (x,))
    ```
    """
    token = _are_stated.set(False)
    try:
        yield
    finally:
        _are_stated.reset(token)


def are_stated():
    """Whether layers state gradients: neither in `automatic_gradients` nor on torch."""
    return not IS_TORCH and _are_stated.get()


def stated_gradient(function):
    """Applies `keras.ops.custom_gradient`, unless gradients are automatic.

    Args:
        function: function of tensors that returns its result and its gradient.
    """
    if not IS_TORCH and _are_stated.get():
        found = ops.custom_gradient(function)
        return _advising(found) if keras.backend.backend() == "jax" else found

    @functools.wraps(function)
    def without_gradient(*tensors):
        return function(*tensors)[0]

    return without_gradient


def _advising(function):
    """Says what to do where JAX refuses to differentiate a function forward."""

    @functools.wraps(function)
    def advising(*tensors):
        try:
            return function(*tensors)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise TypeError(
                f"{error} Layers state some of their gradients. Put `with "
                "layers.automatic_gradients():` around `jax.jvp`, `jax.jacfwd` or "
                "`jax.hessian`."
            ) from error

    return advising


@contextlib.contextmanager
def static_shapes():
    """Inside this context, shapes do not depend on the data.

    For functions that a compiler with static shapes, such as XLA, may compile later.
    """
    token = _are_static.set(True)
    try:
        yield
    finally:
        _are_static.reset(token)


def is_on_one_cpu():
    """Returns whether everything is computed on a single CPU."""
    if IS_TORCH:  # Keras lists no devices there, and computes on one.
        return ops.zeros(()).device.type == "cpu"
    devices = keras.distribution.list_devices()
    return len(devices) == 1 and devices[0].startswith("cpu")


def may_follow_data():
    """Whether shapes may depend on the data: on TensorFlow on a CPU, without XLA."""
    return (
        keras.backend.backend() == "tensorflow"
        and not _are_static.get()
        and is_on_one_cpu()
        and not is_compiled_by_xla()
    )
