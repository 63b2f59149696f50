"""Presets as `Hyperparameters`, and the bridge to a release.

`settings.presets` has presets as data. `routing_tf.models.release` stands on top of the
models and registers its flaws and its checkpoints here, so that models can build what
they do not know.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping

from routing_tf.files.names import did_you_mean
from routing_tf.models.hyperparameters import Hyperparameters
from routing_tf.settings.presets import DESCRIPTIONS
from routing_tf.settings.presets import RELEASE_SETS
from routing_tf.settings.presets import SETS


@dataclasses.dataclass(frozen=True)
class Bridge:
    """The parts that a release registers.

    Args:
        hyperparameters_of: from the release's own hyperparameters to `Hyperparameters`.
        class_at: from a level of compatibility and a class of heads to the class with
            the flaws of that level, and their settings.
        cluster_strided_settings: settings of all cluster-strided heads of the release.
        load_checkpoint: see `RoutingTransformerCausalLM.from_release_checkpoint`.
    """

    hyperparameters_of: Callable
    class_at: Callable
    cluster_strided_settings: Mapping
    load_checkpoint: Callable


_registered = []


def register_release(bridge):
    """Makes a `Bridge` that of all models."""
    _registered[:] = [bridge]


def release():
    """Returns the `Bridge` that is registered."""
    (bridge,) = _registered
    return bridge


def preset_names(kind=None):
    """Returns the names of presets: of a `kind` of models, or by default of all."""
    names = list(DESCRIPTIONS)
    if kind is None:
        return names
    return [name for name in names if preset_hyperparameters(name).kind == kind]


def preset_description(name):
    """Returns one sentence about a preset."""
    return DESCRIPTIONS[_known(name)]


def preset_hyperparameters(name):
    """Returns the `Hyperparameters` of a preset.

    Sets of the release come without its flaws, which `routing_tf.models.release` has.
    """
    if _known(name) in SETS:
        return Hyperparameters(**SETS[name][1])
    return release().hyperparameters_of(RELEASE_SETS[name][1])


def _known(name):
    if name not in DESCRIPTIONS:
        raise ValueError(
            f"Unknown preset. Received: {name!r}."
            f"{did_you_mean(name, preset_names())} Valid names are: "
            f"{', '.join(preset_names())}"
        )
    return name
