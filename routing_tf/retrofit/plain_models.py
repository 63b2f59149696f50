"""Functional and Sequential models whose attention is that of Keras itself."""

import keras

from routing_tf.layers import MixedAttention
from routing_tf.layers.support.configs import deserialize
from routing_tf.layers.support.configs import serialize


def can_be_cloned(model):
    """Whether a model is a graph of layers, which Keras can make again."""
    return isinstance(model, keras.Sequential) or type(model).__name__ == "Functional"


def cloned(model, slots):
    """Returns a new model, in which other attention replaces that of slots.

    Args:
        model: a functional or Sequential model.
        slots: slots of layers of Keras, with groups.
    """
    by_layer = {id(slot.layer): slot for slot in slots}
    copies = []

    def copy(layer):
        slot = by_layer.get(id(layer))
        if slot is None:
            new = type(layer).from_config(layer.get_config())
        else:
            new = _attention(slot)
        copies.append((layer, new))
        return new

    new = keras.models.clone_model(model, clone_function=copy, recursive=True)
    for layer, other in copies:
        # Operations such as `x + y` are no layers.
        if id(layer) not in by_layer and isinstance(layer, keras.layers.Layer):
            other.set_weights(layer.get_weights())
            other.trainable = layer.trainable
    return new


def _attention(slot):
    group = deserialize(serialize(slot.group))
    attention = MixedAttention.from_keras(slot.layer, [group])
    group.set_weights(slot.group.get_weights())
    attention.trainable = slot.layer.trainable
    return attention
