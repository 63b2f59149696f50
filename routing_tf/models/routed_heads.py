"""Head groups as data, which `Hyperparameters.routed_heads` holds."""

import copy
import json
import re

from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.support.serialization import deserialize
from routing_tf.layers.support.serialization import registered_class
from routing_tf.layers.support.serialization import serialize


def as_configs(heads):
    """Returns a head group, its config, or a list of these, as a list of configs.

    A config is that of `keras.saving.serialize_keras_object`, of values that JSON has.
    Its name depends on the class alone, and its dtype is that of the model.
    """
    configs = []
    for group in heads if isinstance(heads, (list, tuple)) else [heads]:
        config = serialize(group) if isinstance(group, HeadGroup) else group
        if not isinstance(config, dict) or class_of(config) is None:
            raise ValueError(
                "`routed_heads` must be a head group of a registered class, such as "
                "`zoo.SinkhornHeads(4)`, what `keras.saving.serialize_keras_object` "
                "makes of it, a list of these, or a name of `routing`. Received: "
                f"routed_heads={group!r}. Decorate a class of your own with "
                "`keras.saving.register_keras_serializable`"
            )
        config = json.loads(json.dumps(config))
        name = name_of(config["class_name"])
        count = sum(other["class_name"] == config["class_name"] for other in configs)
        config["config"]["name"] = f"{name}_{count}" if count else name
        config["config"]["dtype"] = None
        configs.append(config)
    return configs


def class_of(config):
    """Returns the class of the head group that Keras would make; None for others."""
    cls = registered_class(config.get("registered_name"))
    is_group = isinstance(cls, type) and issubclass(cls, HeadGroup)
    # Keras acts on some class names, whatever is registered.
    is_group = is_group and config.get("class_name") == cls.__name__
    return cls if is_group and isinstance(config.get("config"), dict) else None


def groups_of(configs):
    """Makes new head groups of configs."""
    try:
        return [deserialize(copy.deepcopy(config)) for config in configs]
    except TypeError as error:
        # Keras says the whole config first.
        reason = str(error).rpartition("Exception encountered: ")[2]
        raise ValueError(
            "`routed_heads` must have valid arguments. Received: heads of "
            f"{[config['class_name'] for config in configs]}, which say: {reason}"
        ) from error


def name_of(class_name):
    """Returns the name of a class in small letters, with underscores."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", class_name).lower()
