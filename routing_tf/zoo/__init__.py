"""What other papers do: each part in one file, built on `routing_tf.layers`.

Importing it gives its head groups names in `routing_tf.layers`, too.

Patterns of attention are in this folder, other layers in rooms of their own:
`experts`, layers of which a token uses a part, `downsampling`, what makes a few tokens
of many, and `recurrence`, transformers that read segment by segment.

A file here or in a room lists its public names in `__all__`, and what models can have
in `PATTERNS` (heads) or `FEED_FORWARDS`. The files are found here, so a new one needs
no line elsewhere in the package. Files without `__all__`, such as those in `parts`,
have nothing public.
"""

import importlib
import pkgutil

from routing_tf import layers as _layers
from routing_tf.zoo.parts.pattern import Pattern as Pattern

__all__ = ["Pattern"]

#: The patterns of all files, by the names that `Hyperparameters.routing` and
#: `encoder_routing` have for them; `models.patterns.find` looks them up.
PATTERNS = {}
#: The functions of all files that make feed-forward layers, by the names that
#: `Hyperparameters.feed_forward` has for them; `models.feed_forwards` looks them up.
FEED_FORWARDS = {}

for _found in pkgutil.walk_packages(__path__, f"{__name__}."):
    _module = importlib.import_module(_found.name)
    _names = getattr(_module, "__all__", [])
    globals().update({name: getattr(_module, name) for name in _names})
    __all__ += _names
    PATTERNS.update(getattr(_module, "PATTERNS", {}))
    FEED_FORWARDS.update(getattr(_module, "FEED_FORWARDS", {}))

for _name in __all__:
    if _name.endswith(("Heads", "_heads")):
        setattr(_layers, _name, globals()[_name])
