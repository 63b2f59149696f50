"""Head groups as data, which `Hyperparameters.routed_heads` holds."""

import copy
import itertools
import json
import re

from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.support.serialization import deserialize
from routing_tf.layers.support.serialization import serialize
from routing_tf.models import patterns

# Arguments with which blocks would draw the same.
SEEDS = ("seed", "dropout_seed")


def as_configs(heads):
    """Returns a head group, its config, or a list of these, as a list of configs.

    A config is that of `keras.saving.serialize_keras_object`, of values that JSON has.
    Its name depends only on the classes, and no other group of a layer has it. Its
    dtype is that of the model.
    """
    groups = heads if isinstance(heads, (list, tuple)) else [heads]
    if not groups:
        raise ValueError(
            "`routed_heads` must hold at least one head group. Received: "
            f"routed_heads={heads!r}. Leave it out for the heads of `routing`"
        )
    configs = []
    for group in groups:
        config = serialize(group) if isinstance(group, HeadGroup) else group
        if class_of(config) is None:
            raise ValueError(
                "`routed_heads` must be a head group of a registered class, such as "
                "`zoo.SinkhornHeads(4)`, what `keras.saving.serialize_keras_object` "
                "makes of it, a list of these, or a name of `routing`. Received: "
                f"routed_heads={group!r}. {_way_out(group)}"
            )
        config = _copied(config)
        config.pop("build_config", None)  # as in `serialize`
        taken = {other["config"]["name"] for other in configs}
        config["config"]["name"] = _name_apart(config["class_name"], taken)
        config["config"]["dtype"] = None
        configs.append(config)
    return configs


def _copied(config):
    if any(part.get("class_name") == "__lambda__" for part in _dicts_in(config)):
        raise ValueError(
            "`routed_heads` must hold no function of Python code. Received: heads of "
            f"{config['class_name']} with a lambda. Pass a registered subclass of "
            "`keras.initializers.Initializer` instead"
        )
    try:
        return json.loads(json.dumps(config))
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`routed_heads` must have configs of values that JSON has. Received: heads "
            f"of {config['class_name']}, of which JSON says: {error}. Return numbers, "
            "strings, lists and dicts from `get_config`"
        ) from error


def _dicts_in(value):
    """Yields the dicts inside a structure, at all depths."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _dicts_in(item)


def _way_out(group):
    """Returns what to pass instead of something that is no head group."""
    if isinstance(group, type):
        return f"Make heads of the class, such as `{group.__name__}(4)`"
    if isinstance(group, str):
        return "Pass one name, without a list"
    if isinstance(group, dict) and "num_heads" in group:
        return "Pass the head group itself, because its config does not name its class"
    return (
        "Decorate a class of your own with `keras.saving.register_keras_serializable`"
    )


def _name_apart(class_name, taken):
    """Returns a name that neither the other groups nor those of `taken` have."""
    name = f"routed_{name_of(class_name).removeprefix('routed_')}"
    numbered = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(1)))
    return next(each for each in numbered if each not in taken)


def class_of(config):
    """Returns the class of the head group that Keras would make; None for others."""
    name = config.get("registered_name") if isinstance(config, dict) else None
    cls = patterns.registered_class(name) if isinstance(name, str) else None
    is_group = isinstance(cls, type) and issubclass(cls, HeadGroup)
    # Keras acts on some class names, whatever is registered.
    is_group = is_group and config.get("class_name") == cls.__name__
    return cls if is_group and isinstance(config.get("config"), dict) else None


def groups_of(configs, index=0):
    """Makes new head groups of configs for a block, whose number is added to seeds."""
    configs = copy.deepcopy(configs)
    for own in (config["config"] for config in configs):
        seeds = (name for name in SEEDS if type(own.get(name)) is int)
        own.update({name: own[name] + index for name in seeds})
    try:
        return [deserialize(config) for config in configs]
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
