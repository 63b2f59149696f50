"""Makes errors of what torch takes in silence and other backends never do."""

import sys

import torch

PACKAGE = "routing_tf.layers", "routing_tf.zoo"
IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor")


def enforce():
    """From now on layers neither change a tensor nor make an array of one.

    `x += y` changes what else holds the tensor of `x`, which may be the caller. NumPy
    takes a tensor beside an array, with other types, and not from a GPU.
    """
    for name in IN_PLACE:
        _refuse(f"__i{name}__", "A layer changes a tensor in place")
    for name in ("__array__", "__array_wrap__"):
        _refuse(name, "A layer mixes arrays and tensors")


def _refuse(name, message):
    method = getattr(torch.Tensor, name)

    def checked(*arguments, **options):
        if sys._getframe(1).f_globals.get("__name__", "").startswith(PACKAGE):
            raise TypeError(message)
        return method(*arguments, **options)

    setattr(torch.Tensor, name, checked)
