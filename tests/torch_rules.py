"""Makes errors of what torch takes in silence and other backends never do."""

import sys

import numpy as np
import torch

PACKAGE = "routing_tf.layers", "routing_tf.zoo"
IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor")


def enforce():
    """From now on layers neither change a tensor nor mix tensors with arrays.

    `x += y` changes what else holds the tensor of `x`, which may be the caller. Beside
    an array a tensor gets other types; `array != tensor` is True, whatever they hold.
    """
    for name in IN_PLACE:
        _refuse(f"__i{name}__", lambda *_: True, "A layer changes a tensor in place")
    mixes = "A layer mixes arrays and tensors"
    for name in ("__array__", "__array_wrap__"):
        _refuse(name, lambda *_: True, mixes)
    for name in ("__eq__", "__ne__"):
        _refuse(name, lambda own, other: isinstance(other, np.ndarray), mixes)


def _refuse(name, is_wrong, message):
    method = getattr(torch.Tensor, name)

    def checked(*arguments, **options):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(PACKAGE) and is_wrong(*arguments):
            raise TypeError(message)
        return method(*arguments, **options)

    setattr(torch.Tensor, name, checked)
