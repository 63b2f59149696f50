"""Patterns that `Hyperparameters.routing` can name, besides those of the layers.

Their sizes follow from `Hyperparameters.attention_window`, so that a query sees about
as many keys as in a cluster of that window.
"""

import dataclasses
import importlib

import keras

from routing_tf.settings.ranges import PATTERN

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
    """

    attention_window: int
    max_length: int
    num_clusters: int
    index: int = 0
    row_length: int | None = None


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
    )


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
