"""Whether shapes may depend on the data."""

import contextlib
import contextvars

import keras
from keras import ops

from routing_tf.layers.support.backends import IS_TORCH
from routing_tf.layers.support.keras_internals import is_compiled_by_xla

_are_static = contextvars.ContextVar("are_static", default=False)


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
