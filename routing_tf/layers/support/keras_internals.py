"""All private names of Keras and TensorFlow that the package needs.

Tested with Keras 3.15.1 and TensorFlow 2.21.0.
"""

import contextlib
import threading
import weakref

import keras
from keras import ops
from keras.src.backend import AutocastScope
from keras.src.backend import get_keras_mask
from keras.src.backend import set_keras_mask

from routing_tf.layers.support.replicas import num_replicas
from routing_tf.layers.support.replicas import sum_over_replicas


class _Lists(threading.local):
    """Lists of losses by layer, others for each thread."""

    def __init__(self):
        self.lists = weakref.WeakKeyDictionary()


_of_thread = _Lists()


def declare_call_argument(layer, *names):
    """Gives an uncalled layer arguments that reach layers inside, like `training`."""
    layer._register_call_context_args(*names)


def attention_projections(layer):
    """Returns the projections of an attention layer of Keras that is built, by name."""
    names = {
        "query": "_query_dense",
        "key": "_key_dense",
        "value": "_value_dense",
        "output": "_output_dense",
        "gate": "_gate_dense",
    }
    found = {name: getattr(layer, own, None) for name, own in names.items()}
    return {name: dense for name, dense in found.items() if dense is not None}


def build_at_init(layer):
    """Marks a layer without weights as built, when it is made."""
    layer._build_at_init()


def layers_inside(layer):
    """Returns the layers inside a layer or model, at all depths."""
    return list(layer._flatten_layers(include_self=False))


def own_weights(layer):
    """Returns the weights of a layer itself, without those of layers inside."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def decays(optimizer, variable):
    """Returns whether an optimizer's `weight_decay` applies to a variable."""
    return optimizer._use_weight_decay(variable)


def index_of(optimizer, variable):
    """Returns the place of a variable among those of a built optimizer."""
    return optimizer._get_variable_index(variable)


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
    """Returns whether XLA will compile the function that TensorFlow traces now."""
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def computed_after(earlier, *tensors):
    """Adds a control dependency: `tensors` are computed after `earlier`.

    Results of the returned tensors are computed again, even if they exist already. On a
    CPU, XLA may still share them.
    """
    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.optimization_barrier((earlier, *tensors))[1:]
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python import xla

    if is_compiled_by_xla():
        # TensorFlow does not define this gradient, which second derivatives need.
        barrier = tf.custom_gradient(
            lambda *x: (xla.optimization_barrier(*x), lambda *gradients: gradients)
        )
        return barrier(earlier, *tensors)[1:]
    with tf.control_dependencies([earlier]):
        return [tf.identity(x) for x in tensors]


def mask_of(x):
    """Returns the Keras mask of a tensor; None if it has none."""
    return get_keras_mask(x)


def set_mask_of(x, mask):
    """Sets the mask that Keras hands on with a tensor."""
    set_keras_mask(x, mask)


def disown(layer, losses):
    """Makes a layer and those inside forget losses, whose ids Keras may find again."""
    ids = {id(loss) for loss in losses}
    for each in (layer, *layers_inside(layer)):
        each._loss_ids -= ids


class Checkpointed(keras.layers.Layer):
    """A layer of which `tf.train.Checkpoint` saves all weights.

    Keras shows TensorFlow the layers and weights that are attributes, but not those in
    lists and dicts.
    """

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "checkpoint":
            return children
        shown = {id(child) for child in children.values()}
        for kind, parts in (("layer", self._layers), ("weight", own_weights(self))):
            for index, part in enumerate(parts):
                if id(part) not in shown:
                    children[f"{kind}-{index}"] = part
        return children


class OwnLosses(keras.layers.Layer):
    """A layer whose added losses belong only to its replica, that is, its thread.

    `tf.distribute` switches threads wherever replicas add something up; in one list, a
    replica would then find the losses of the others.
    """

    @property
    def _losses(self):
        return _of_thread.lists.setdefault(self, [])

    @_losses.setter
    def _losses(self, value):
        _of_thread.lists[self] = list(value)


class BatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization over the batches of all replicas.

    That of Keras with `synchronized=True` is so where there is no mask, and refuses
    JAX, where a layer sees the global batch anyway.
    """

    def _moments(self, inputs, mask):
        if num_replicas() == 1:
            return super()._moments(inputs, mask)
        axes = self._reduction_axes
        real = ops.ones_like(inputs[..., :1])
        if mask is not None:
            real = ops.cast(mask, inputs.dtype)[..., None]
        number, total = sum_over_replicas(
            [ops.sum(real), ops.sum(inputs * real, axis=axes)]
        )
        number = ops.maximum(number, 1.0)
        mean = total / number
        squares = ops.sum(ops.square(inputs - mean) * real, axis=axes)
        (squares,) = sum_over_replicas([squares])
        return mean, squares / number
