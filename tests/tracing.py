"""Whether TensorFlow traces functions: for tiny models that takes most of the time."""

import contextlib

import keras


def eager():
    """Returns a context in which functions run as they are, without being traced."""
    return _run_functions_eagerly(True)


def traced():
    """Returns a context in which functions are traced and compiled, as for users."""
    return _run_functions_eagerly(False)


@contextlib.contextmanager
def _run_functions_eagerly(value):
    if keras.backend.backend() != "tensorflow":
        yield  # JAX is quicker with what is compiled
        return
    import tensorflow as tf

    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(value)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
