"""Configs of layers, and of layers inside them."""

import functools
import importlib
import inspect
import itertools
import re

import keras

from routing_tf.layers.support.keras_internals import Checkpointed
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.layers.support.settings import Settings

DTypePolicyMap = keras.dtype_policies.DTypePolicyMap


class ConfiguredLayer(Checkpointed):
    """A layer whose config contains the constructor arguments of it and its bases.

    Each is read from the attribute of the same name. The dtype also tells how Keras has
    quantized layers inside.
    """

    def get_config(self):
        names = (name for name in _arguments(type(self)) if hasattr(self, name))
        arguments = {name: _serialized(getattr(self, name)) for name in names}
        return {**super().get_config(), **arguments, **_quantized_dtype(self)}

    @classmethod
    def from_config(cls, config):
        # `super()` looks at this `cls`, which may be another than that of the call.
        cls, config = _class_of_config(cls, config)
        return super().from_config(config)


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
        registered_class(layer.get("registered_name"))
        return keras.saving.deserialize_keras_object(layer)
    return layer


def registered_class(name):
    """Returns the class that is registered under a name; None if there is none.

    Imports `routing_tf.zoo` if it is a class of this package that is not in `layers`.
    """
    found = keras.saving.get_registered_object(name) if name else None
    if found is None and isinstance(name, str) and name.startswith("routing_tf>"):
        importlib.import_module("routing_tf.zoo")
        found = keras.saving.get_registered_object(name)
    return found


def class_of_the_zoo(name):
    """Returns a class of `routing_tf.zoo`, which this imports."""
    return getattr(importlib.import_module("routing_tf.zoo"), name)


def _class_of_config(cls, config):
    """Returns the class of a saved config, and the config that it takes.

    Configs of earlier versions name flaws of the original release. Layers with flaws
    have their own classes, which a function of `routing_tf.models.release` knows.
    """
    config = dict(config)
    flaws = config.pop("compatibility", None) or {}
    if config.pop("uniform_when_all_masked", False):
        flaws = {"uniform_when_all_masked": True}
    if not any(flaws.values()):
        return cls, config
    class_with_flaws = keras.saving.get_registered_object("routing_tf>class_with_flaws")
    if class_with_flaws is None:
        raise ValueError(
            f"`{cls.__name__}` was saved with flaws of the original release, whose "
            f"layers are in another module. Received: {flaws}. Import "
            "`routing_tf.models.release` before you read the file"
        )
    cls, arguments = class_with_flaws(cls, flaws)
    return cls, {**config, **arguments}
