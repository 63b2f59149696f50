"""What the backends of Keras cannot do alike, where a layer needs to know."""

import keras


def mixes_arrays():
    """Whether NumPy's arrays may stand beside tensors in Python's arithmetic.

    Torch takes some and not others, and turns Booleans into small integers.
    """
    return keras.backend.backend() != "torch"


def states_gradients():
    """Whether `keras.ops.custom_gradient` takes any function, and can be compiled.

    That of torch has one output at most, and no second derivatives.
    """
    return keras.backend.backend() != "torch"


def takes_first_of_equals():
    """Whether `keras.ops.top_k` takes the first ones of equal entries."""
    return keras.backend.backend() != "torch"
