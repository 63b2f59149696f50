"""Functions that define their gradient, and a way to do without."""

import contextlib
import contextvars
import functools

import keras
from keras import ops

from routing_tf.layers.support.backends import IS_TORCH

_are_stated = contextvars.ContextVar("are_stated", default=True)


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
