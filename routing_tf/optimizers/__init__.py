"""Optimizers and schedules that `keras.optimizers` lacks.

A file here lists its public names in `__all__`, and in `OPTIMIZERS` what
`Hyperparameters.optimizer` can name: functions of the `Hyperparameters`, the learning
rate schedule and the largest global norm of the gradients (None for no limit) that
return a Keras optimizer. The files are found here, so a new one needs no line elsewhere
in the package.
"""

import importlib
import pkgutil

__all__ = ["register"]

#: The functions that make optimizers, by name.
OPTIMIZERS = {}


def register(name, make):
    """Registers a function as `Hyperparameters.optimizer`.

    Args:
        name: string, not that of an optimizer of this package.
        make: function of `Hyperparameters`, a schedule and the largest global norm of
            the gradients, or None, that returns a Keras optimizer. Without a
            `weight_decay` of its own, that of the hyperparameters is part of the loss.
    """
    if not isinstance(name, str) or not name or not callable(make):
        raise ValueError(
            "`name` must be a string, and `make` a function that returns an optimizer. "
            f"Received: name={name!r}, make={make!r}"
        )
    if name in OPTIMIZERS and OPTIMIZERS[name].__module__.startswith(__name__):
        raise ValueError(
            "`name` must not be that of an optimizer of this package. Received: "
            f"name={name!r}. Choose another"
        )
    OPTIMIZERS[name] = make


for _found in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_found.name}")
    _names = getattr(_module, "__all__", [])
    globals().update({name: getattr(_module, name) for name in _names})
    __all__ += _names
    OPTIMIZERS.update(getattr(_module, "OPTIMIZERS", {}))
