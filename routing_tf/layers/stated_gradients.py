"""Functions that define their gradient, and a way to do without."""

import contextlib
import contextvars
import functools

from keras import ops

_are_stated = contextvars.ContextVar("are_stated", default=True)


@contextlib.contextmanager
def automatic_gradients():
    """Inside this context, the backend derives all gradients of layers itself.

    Layers define some gradients themselves, which takes less time and memory. JAX has
    no forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) for such functions; inside
    this context it works. Functions traced inside stay that way, also when compiled.

    Example:

    ```python
    import keras
    import numpy as np
    from routing_tf import layers

    attention = layers.RoutingAttention(
        num_heads=2, key_dim=8, num_clusters=4, attention_window=16
    )
    x = np.random.normal(size=(1, 32, 16)).astype("float32")
    with layers.automatic_gradients():
        y = attention(x, use_causal_mask=True)
        if keras.backend.backend() == "jax":
            import jax

            y, slope = jax.jvp(lambda x: attention(x, use_causal_mask=True), (x,), (x,))
            assert slope.shape == y.shape
    ```
    """
    token = _are_stated.set(False)
    try:
        yield
    finally:
        _are_stated.reset(token)


def stated_gradient(function):
    """Applies `keras.ops.custom_gradient`, unless gradients are automatic.

    Args:
        function: function of tensors that returns its result and its gradient.
    """
    if _are_stated.get():
        return ops.custom_gradient(function)

    @functools.wraps(function)
    def without_gradient(*tensors):
        return function(*tensors)[0]

    return without_gradient
