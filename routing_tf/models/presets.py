"""Presets as `Hyperparameters`; `settings.presets` has them as data."""

from routing_tf.files.names import did_you_mean
from routing_tf.models import bridge
from routing_tf.models.hyperparameters import Hyperparameters
from routing_tf.settings.presets import DESCRIPTIONS
from routing_tf.settings.presets import RELEASE_SETS
from routing_tf.settings.presets import SETS


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
    return bridge.release().hyperparameters_of(RELEASE_SETS[name][1])


def _known(name):
    if name not in DESCRIPTIONS:
        raise ValueError(
            f"Unknown preset. Received: {name!r}."
            f"{did_you_mean(name, preset_names())} Valid names are: "
            f"{', '.join(preset_names())}"
        )
    return name
