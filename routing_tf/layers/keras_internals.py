"""Private names of Keras and TensorFlow that the package needs: all stand here.

Tested with Keras 3.15.1 and TensorFlow 2.21.0.
"""

import contextlib
import threading
import weakref

import keras
from keras.src.backend import AutocastScope
from keras.src.backend import get_keras_mask

_of_thread = threading.local()


def declare_call_argument(layer, *names):
    """Lets a layer, not called yet, take arguments that reach all layers inside.

    As `training` does: layers that declare one and have it in their `call` get it, in
    models of the functional API too.
    """
    layer._register_call_context_args(*names)


def layers_inside(layer):
    """Returns the layers inside a layer or model, at all depths."""
    return list(layer._flatten_layers(include_self=False))


def own_weights(layer):
    """Returns the weights of a layer itself, without those of layers inside."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def decays(optimizer, variable):
    """Tells whether an optimizer's `weight_decay` is meant for a variable."""
    return optimizer._use_weight_decay(variable)


@contextlib.contextmanager
def adding_weights(layer):
    """Lets weights be added to a layer that is built, as `Dense.enable_lora` does."""
    layer._tracker.unlock()
    yield
    layer._tracker.lock()


def without_autocast():
    """Returns a scope in which variables are read in their own dtype."""
    return AutocastScope(None)


def is_compiled_by_xla():
    """Whether what is traced now on TensorFlow will be compiled by XLA."""
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def computed_after(earlier, *tensors):
    """Adds a control dependency: `tensors` are computed after `earlier`.

    What is computed from them is computed anew, even if it was computed before. On a
    CPU, XLA may share it all the same.
    """
    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.optimization_barrier((earlier, *tensors))[1:]
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python import xla

    if is_compiled_by_xla():
        # TensorFlow does not know the gradient, which that of a gradient needs.
        barrier = tf.custom_gradient(
            lambda *x: (xla.optimization_barrier(*x), lambda *gradients: gradients)
        )
        return barrier(earlier, *tensors)[1:]
    with tf.control_dependencies([earlier]):
        return [tf.identity(x) for x in tensors]


def mask_of(x):
    """Returns the Keras mask of a tensor; None if it has none."""
    return get_keras_mask(x)


def disown(layer, losses):
    """Makes a layer and those inside forget losses that another layer adds.

    Keras tells whose losses are whose by ids, which a later loss may have again.
    """
    ids = {id(loss) for loss in losses}
    for each in (layer, *layers_inside(layer)):
        each._loss_ids -= ids


class OwnLosses(keras.layers.Layer):
    """A layer whose added losses are those of its replica alone.

    `tf.distribute` runs each replica in a thread, and lets the threads take turns
    wherever replicas add something up. Keras keeps the losses of a layer in one list,
    so a replica that adds up in a call would find those of all others there, or none.
    Here each thread has its own list.
    """

    @property
    def _losses(self):
        return _lists().setdefault(self, [])

    @_losses.setter
    def _losses(self, value):
        _lists()[self] = list(value)


def _lists():
    """The lists of this thread, by layer."""
    if not hasattr(_of_thread, "lists"):
        _of_thread.lists = weakref.WeakKeyDictionary()
    return _of_thread.lists
