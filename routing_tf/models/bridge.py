"""The bridge to a release: its flaws and its checkpoints.

`routing_tf.models.release` stands on top of the models and registers itself here, so
that models can build what they do not know.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping


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


def register(bridge):
    """Makes a `Bridge` that of all models."""
    _registered[:] = [bridge]


def release():
    """Returns the `Bridge` that is registered."""
    (bridge,) = _registered
    return bridge
