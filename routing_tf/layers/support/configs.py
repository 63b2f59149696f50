"""Configs of layers: arguments that classes declare, settings, and layers inside."""

import dataclasses
import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Mapping

import keras

from routing_tf.layers.support.keras_internals import Checkpointed
from routing_tf.layers.support.keras_internals import layers_inside

DTypePolicyMap = keras.dtype_policies.DTypePolicyMap


def cloned(initializer):
    """Returns a copy of an initializer, so that unseeded weights start differently."""
    if isinstance(initializer, keras.initializers.Initializer):
        return initializer.clone()
    return initializer


class Argument:
    """A constructor argument, checked whenever the attribute of its name is set.

    ```python
    from routing_tf import layers
    from routing_tf.layers.support.argument import Argument
    from routing_tf.layers.support.validation import check_positive_integer


    class WideHeads(layers.FullHeads):
        width = Argument(check_positive_integer)

        def __init__(self, num_heads, width=2, **kwargs):
            super().__init__(num_heads, **kwargs)
            self.width = width
    ```

    Args:
        check: function of the name, the value and the options that returns the value to
            keep, or raises a `ValueError`; see `validation`.
        *options: further arguments of `check`, such as choices.
    """

    # There is no `__get__`: attributes are read from the instance, at no cost.

    def __init__(self, check, *options):
        self._check, self._options = check, options

    def __set_name__(self, owner, name):
        self._name = name

    def __set__(self, instance, value):
        value = self._check(self._name, value, *self._options)
        instance.__dict__[self._name] = value


def setting(default, check, *options):
    """Returns a field of `Settings`; `check` and `options` as in `Argument`."""
    return dataclasses.field(default=default, metadata={"check": (check, *options)})


class Settings:
    """Settings that a layer takes by name.

    Subclasses are frozen dataclasses, whose fields `setting` makes.
    """

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check, *options = field.metadata["check"]
            value = check(field.name, getattr(self, field.name), *options)
            object.__setattr__(self, field.name, value)

    @classmethod
    def names(cls):
        """Returns the names of all settings."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def given_as(cls, name, value, keys=None):
        """Returns the argument `name`, such settings, a dict or None, as a dict.

        Its keys are those of the settings, or the given ones.
        """
        if isinstance(value, cls):
            return value.to_dict()
        if not isinstance(value, (Mapping, type(None))):
            raise ValueError(
                f"`{name}` must be a dict, a `{cls.__name__}` or None. Received: "
                f"{name}={value!r}"
            )
        keys, value = keys or cls.names(), dict(value or {})
        unknown = [key for key in value if key not in keys]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), keys, n=1)
            raise ValueError(
                f"`{name}` must have only the keys {', '.join(keys)}. Received: "
                f"{name}={value}." + "".join(f" Did you mean {x!r}?" for x in near)
            )
        return value

    @classmethod
    def taken_from(cls, arguments):
        """Returns the settings among keyword arguments, and the other arguments."""
        settings = {name: arguments[name] for name in cls.names() if name in arguments}
        others = {name: x for name, x in arguments.items() if name not in settings}
        return cls(**settings), others

    def to_dict(self):
        """Returns the settings by their names."""
        return {name: getattr(self, name) for name in self.names()}


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
