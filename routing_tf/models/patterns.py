"""Patterns that `Hyperparameters.routing` can name, besides those of the layers.

Their sizes follow from `Hyperparameters.attention_window`, so that a query sees about
as many keys as in a cluster of that window.
"""

import copy
import dataclasses
import importlib
import itertools
import json
import re

import keras

from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.support.configs import deserialize
from routing_tf.layers.support.configs import serialize
from routing_tf.settings.ranges import PATTERN

# Arguments with which blocks would draw the same.
SEEDS = ("seed", "dropout_seed")

#: What `routing` can be without a pattern that is registered.
OWN = tuple(PATTERN.words.values())
# Those in which each token attends to the last members of clusters up to itself.
CAUSAL = ("token_choice", "expert_threshold")
_REGISTERED = {}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes from which the arguments of a pattern's heads follow.

    Args:
        attention_window: approximate number of keys that a query sees.
        max_length: length of the longest sequence.
        num_clusters: number of clusters of a head.
        index: number of the block, for seeds. Defaults to 0.
        row_length: tokens in a row of an image that is a sequence; None (the default)
            if the grid is known.
        clusters_per_query: number of clusters that a query reads. Defaults to 1.
    """

    attention_window: int
    max_length: int
    num_clusters: int
    index: int = 0
    row_length: int | None = None
    clusters_per_query: int = 1


def register(name, pattern):
    """Registers `pattern`, a `routing_tf.zoo.Pattern`, as `routing=name`."""
    taken = (*OWN, *importlib.import_module("routing_tf.zoo").PATTERNS)
    if not isinstance(name, str) or not name or name in taken:
        raise ValueError(
            "`name` must be a string that is no pattern of this package. Received: "
            f"name={name!r}. Choose another"
        )
    if not hasattr(pattern, "of_decoders"):
        raise ValueError(
            "`pattern` must be a `routing_tf.zoo.Pattern`. Received: "
            f"pattern={pattern!r}"
        )
    _REGISTERED[name] = pattern


def find(name):
    """Returns the pattern that is registered under a name, or None."""
    return None if name in OWN else all_patterns().get(name)


def of_heads(cls):
    """Returns a pattern whose heads are of a class, or None."""
    return next((own for own in all_patterns().values() if own.heads is cls), None)


def all_patterns():
    """Returns a dict of all patterns by name; this imports `routing_tf.zoo`."""
    return importlib.import_module("routing_tf.zoo").PATTERNS | _REGISTERED


def of_the_zoo(name):
    """Returns what `routing_tf.zoo` has under a name."""
    return getattr(importlib.import_module("routing_tf.zoo"), name)


def registered_class(name):
    """Returns the class that Keras knows under a name; None if there is none.

    The zoo is imported, which registers its classes, if Keras does not know the name.
    """
    found = keras.saving.get_registered_object(name)
    if found is None:
        importlib.import_module("routing_tf.zoo")
        found = keras.saving.get_registered_object(name)
    return found


def sizes_of(h, index, is_decoder):
    """Returns the `Sizes` of a block of the decoder, or of one of the encoder."""
    is_row_by_row = h.kind == "image" and h.local_block_width is None
    return Sizes(
        attention_window=h.attention_window,
        max_length=h.max_sequence_length if is_decoder else h.max_input_length,
        num_clusters=h.num_clusters,
        index=index,
        row_length=h.image_width * h.num_channels if is_row_by_row else None,
        clusters_per_query=h.clusters_per_query if reads_clusters(h) else 1,
    )


def reads_clusters(h):
    """Returns whether `routing` names a pattern that may read several clusters."""
    pattern = find(h.routing)
    return pattern is not None and pattern.reads_clusters


def routing_of(h, is_decoder):
    """Returns the name of the routed heads of the decoder, or of the encoder."""
    if is_decoder:
        return h.routing
    name = h.encoder_routing or h.routing
    return name if is_of_encoders(name) else "expert_choice"


def is_of_encoders(name):
    """Returns whether a pattern needs neither a causal mask nor an image."""
    pattern = find(name)
    if pattern is None:
        return name is not None and name not in CAUSAL
    return pattern.of_encoders and not pattern.of_images


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
    cls = registered_class(name) if isinstance(name, str) else None
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
