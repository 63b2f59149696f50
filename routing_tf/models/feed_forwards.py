"""Layers that `Hyperparameters.feed_forward` can name, besides `layers.FeedForward`.

Their sizes follow from those of the model.
"""

import dataclasses
import importlib

from routing_tf import layers
from routing_tf.settings.ranges import FEED_FORWARD

#: What `feed_forward` can be without a name that is registered.
OWN = tuple(FEED_FORWARD.words)
#: The activation of the blocks that a named layer leaves to `layers.FeedForward`.
BESIDE = "geglu"
_REGISTERED = {}


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a feed-forward layer in a model.

    Args:
        intermediate_dim: size inside a feed-forward layer.
        max_length: length of the longest sequence.
        index: number of the block, from 0.
        num_blocks: number of blocks.
    """

    intermediate_dim: int
    max_length: int
    index: int
    num_blocks: int


def register(name, make):
    """Registers a function as `feed_forward=name`.

    Args:
        name: string that is no name of the layers.
        make: function of a `Place`, and of the keyword arguments `dropout`,
            `kernel_initializer`, `name` and `dtype`, that returns a layer; None for a
            `layers.FeedForward` with `"geglu"`.
    """
    taken = (*OWN, *importlib.import_module("routing_tf.zoo").FEED_FORWARDS)
    if not isinstance(name, str) or not name or name in taken or not callable(make):
        raise ValueError(
            "`name` must be a string that is no feed-forward layer of this package, "
            f"and `make` a function. Received: name={name!r}, make={make!r}. Choose "
            "another"
        )
    _REGISTERED[name] = make


def all_makers():
    """Returns a dict of all functions by name, including those of `routing_tf.zoo`."""
    return importlib.import_module("routing_tf.zoo").FEED_FORWARDS | _REGISTERED


def find(name):
    """Returns the function that is registered under a name, or None."""
    return None if name in OWN else all_makers().get(name)


def make_layer(kind, place, output_initializer=None, **options):
    """Makes the layer that `feed_forward=kind` has at a place; None for `"none"`."""
    if kind == "none":
        return None
    make = find(kind)
    layer = make and make(place, **options)
    if layer:
        return layer
    return layers.FeedForward(
        place.intermediate_dim,
        activation=BESIDE if make else kind,
        output_initializer=output_initializer,
        **options,
    )
