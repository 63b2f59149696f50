"""Configs of layers, and of layers inside them."""

import functools
import inspect
import itertools
import re

import keras

from routing_tf.layers.support.keras_internals import Checkpointed
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.layers.support.settings import Settings

DTypePolicyMap = keras.dtype_policies.DTypePolicyMap


class ConfiguredLayer(Checkpointed):
    """A layer whose config has the constructor arguments of it and its bases.

    Each is the attribute of its name. The dtype also tells of quantized layers inside.
    """

    def get_config(self):
        names = (name for name in _arguments(type(self)) if hasattr(self, name))
        arguments = {name: _serialized(getattr(self, name)) for name in names}
        return {**super().get_config(), **arguments, **_quantized_dtype(self)}


@functools.cache
def _arguments(cls):
    """Names of the constructor arguments of a class and its bases."""
    ours = itertools.takewhile(lambda base: base is not ConfiguredLayer, cls.__mro__)
    # Those that a base takes from Keras are in the config of Keras.
    own = (base.__init__ for base in ours if "__init__" in vars(base))
    signatures = [inspect.signature(each) for each in own]
    arguments = [x for each in signatures for x in list(each.parameters.values())[1:]]
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return dict.fromkeys(x.name for x in arguments if x.kind not in any_number)


def _quantized_dtype(layer):
    """The argument `dtype` of a layer with quantized layers inside, in a dict.

    Its keys match their paths whatever is around the layer, which on loading may be
    less or more than when it was saved.
    """
    inside = [x for x in layers_inside(layer) if getattr(x, "quantization_mode", None)]
    if not inside or isinstance(layer.dtype_policy, DTypePolicyMap):
        return {}
    start = (layer.path or layer.name).removesuffix(layer.name)
    policies = {
        f"(.*/)?{re.escape(x.path.removeprefix(start))}": x.dtype_policy for x in inside
    }
    policies = DTypePolicyMap(layer.dtype_policy, policies)
    return {"dtype": keras.dtype_policies.serialize(policies)}


def _serialized(value):
    if isinstance(value, keras.layers.Layer):
        return serialize(value)
    # Lists and dicts that Keras tracks become plain ones.
    if isinstance(value, list):
        return [_serialized(item) for item in value]
    value = value.to_dict() if isinstance(value, Settings) else value
    if isinstance(value, dict):
        return {name: _serialized(item) for name, item in value.items()}
    # Initializers and similar objects.
    return keras.saving.serialize_keras_object(value) if callable(value) else value


def serialize(layer):
    """Returns the config of a layer that another layer builds.

    Keras also records that the layer is built, and on loading would build it before the
    outer layer does: twice, or under another path.
    """
    config = keras.saving.serialize_keras_object(layer)
    config.pop("build_config", None)
    return config


def deserialize(layer):
    """Returns the layer of a config; layers and None are returned unchanged."""
    if isinstance(layer, dict):
        return keras.saving.deserialize_keras_object(layer)
    return layer
