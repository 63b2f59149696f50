"""Attention of other papers: each pattern in one file, built on `routing_tf.layers`.

A file of this folder lists its public names in `__all__`, and the patterns that models
can have in `PATTERNS`. The files are found here, so a new pattern needs no line
elsewhere in the package.
"""

import importlib
import pkgutil

from routing_tf.zoo.parts.pattern import Pattern as Pattern

__all__ = ["Pattern"]

#: The patterns of all files, by the names that `Hyperparameters.routing` and
#: `encoder_routing` have for them; `models.patterns.find` looks them up.
PATTERNS = {}

for _found in pkgutil.iter_modules(__path__):
    if not _found.ispkg:
        _module = importlib.import_module(f"{__name__}.{_found.name}")
        globals().update({name: getattr(_module, name) for name in _module.__all__})
        __all__ += _module.__all__
        PATTERNS.update(getattr(_module, "PATTERNS", {}))
