"""Compiling functions that call a model, as each backend does it."""

import keras


def compiled(model, function):
    """Compiles a function of tensors that calls a model but changes nothing in it.

    Args:
        model: a Keras model; its `jit_compile` decides whether XLA is used on
            TensorFlow.
        function: takes and returns structures of tensors.

    Returns:
        The compiled function. It sees the weights that the model has when it is called.

    Example:

    ```python
    import keras
    import numpy as np
    from routing_tf.models.compiled import compiled

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert compiled(model, lambda x: model(x) + 1.0)(np.ones((1, 3))).shape == (1, 2)
    ```
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=model.jit_compile, autograph=False)
    if keras.backend.backend() == "jax":
        return _compiled_on_jax(model, function)
    raise ValueError(
        "The backend must be tensorflow or jax. Received: "
        f"keras.backend.backend()={keras.backend.backend()!r}. Set KERAS_BACKEND"
    )


def _compiled_on_jax(model, function):
    import jax

    @jax.jit
    def stateless(values, *arguments):
        variables = list(zip(model.variables, values, strict=True))
        with keras.StatelessScope(variables):
            return function(*arguments)

    def call(*arguments):
        return stateless([variable.value for variable in model.variables], *arguments)

    return call
