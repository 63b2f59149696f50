"""Checks of arguments, with messages that state the rule and the value received."""

import math
import numbers

import keras

from routing_tf.layers.support.backends import IS_TORCH
from routing_tf.layers.support.backends import is_compiled_by_torch


def is_integer(value):
    """Returns whether a value is an integer of Python or NumPy, and not a boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def known_values(x):
    """Returns the values of a tensor as a NumPy array; None while it is traced."""
    if IS_TORCH and is_compiled_by_torch():
        return None
    try:
        return keras.ops.convert_to_numpy(x)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def checked_index(index):
    """Returns a `cache_index` as an integer, 0 for None; as it is while traced."""
    if index is None:
        return 0
    if type(index) is int or is_integer(index):
        return int(index)
    dtype = getattr(index, "dtype", None)
    is_whole = dtype is not None and keras.backend.is_int_dtype(dtype)
    if not is_whole or tuple(index.shape) != ():
        shape = getattr(index, "shape", None)
        received = repr(index) if shape is None else f"{dtype}{tuple(shape)}"
        raise ValueError(
            "`cache_index` must be an integer or a scalar tensor of integers, the "
            "number of tokens that all sequences of the cache were fed. Received: "
            f"cache_index={received}"
        )
    value = known_values(index)
    return index if value is None else int(value)


def check_positive_integer(name, value, rule="a positive integer"):
    """Returns an integer of at least 1 as an `int`; else raises a `ValueError`."""
    if not is_integer(value) or value < 1:
        raise ValueError(f"`{name}` must be {rule}. Received: {name}={value!r}")
    return int(value)


def check_optional_integer(name, value):
    """Does what `check_positive_integer` does; None stays None."""
    rule = "a positive integer or None"
    return None if value is None else check_positive_integer(name, value, rule)


def check_non_negative_integer(name, value, rule="an integer of at least 0"):
    """Returns an integer of at least 0 as an `int`; else raises a `ValueError`."""
    if not is_integer(value) or value < 0:
        raise ValueError(f"`{name}` must be {rule}. Received: {name}={value!r}")
    return int(value)


def check_positive_number(name, value, rule="a positive number"):
    """Returns a finite number above 0; else raises a `ValueError`."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be {rule}. Received: {name}={value!r}")
    return int(value) if is_integer(value) else float(value)


def check_optional_number(name, value):
    """Does what `check_positive_number` does; None stays None."""
    rule = "a positive number or None"
    return None if value is None else check_positive_number(name, value, rule)


def check_not_negative(name, value):
    """Returns a finite number of at least 0; else raises a `ValueError`."""
    if not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
        raise ValueError(
            f"`{name}` must be finite and must not be negative. "
            f"Received: {name}={value!r}"
        )
    return value


def check_rate(name, value):
    """Returns a rate in [0, 1), as of dropout; else raises a `ValueError`."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1:
        raise ValueError(
            f"`{name}` must be a rate in the range [0, 1). Received: {name}={value!r}"
        )
    return value


def check_share(name, value):
    """Returns a number in [0, 1]; else raises a `ValueError`."""
    if not isinstance(value, numbers.Real) or not 0 <= value <= 1:
        raise ValueError(
            f"`{name}` must be in the range [0, 1]. Received: {name}={value!r}"
        )
    return value


def check_block_shape(name, value):
    """Returns a block shape as a tuple; raises a `ValueError` if it is not one."""
    shape = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(shape) not in (1, 2):
        raise ValueError(
            f"`{name}` must be a tuple of one or two block lengths, in tokens. "
            f"Received: {name}={value!r}"
        )
    for length in shape:
        if not is_integer(length) or length < 1:
            raise ValueError(
                f"`{name}` must be a tuple of positive integers. "
                f"Received: {name}={value!r}"
            )
    return tuple(int(length) for length in shape)


def check_choice(name, value, choices):
    """Returns a value that is one of `choices`; else raises a `ValueError`."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(
            f"`{name}` must be one of {listed}. Received: {name}={value!r}"
        )
    return value


def check_flag(name, value):
    """Returns True or False; else raises a `ValueError`."""
    return bool(check_choice(name, value, (False, True)))


def check_seed(name, value):
    """Does what `check_non_negative_integer` does; None stays None."""
    rule = "an integer of at least 0 or None"
    return None if value is None else check_non_negative_integer(name, value, rule)


def initializer(name, value):
    """Returns the Keras initializer for `value`; raises a `ValueError` without one."""
    return _keras_object("initializer", keras.initializers, name, value)


def regularizer(name, value):
    """Returns the Keras regularizer for `value`; raises a `ValueError` without one."""
    return _keras_object("regularizer", keras.regularizers, name, value)


def constraint(name, value):
    """Returns the Keras constraint for `value`; raises a `ValueError` without one."""
    return _keras_object("constraint", keras.constraints, name, value)


def _keras_object(kind, module, name, value):
    article = "an" if kind == "initializer" else "a"
    message = (
        f"`{name}` must be {article} {kind}, its name or its config, see "
        f"`keras.{kind}s.get`. Received: {name}={value!r}"
    )
    try:
        found = module.get(value)
    except (TypeError, ValueError) as error:
        raise ValueError(message) from error
    if isinstance(found, keras.layers.Layer):  # Keras takes all that can be called
        raise ValueError(f"{message}, which is a layer")
    return found


def static_length(name, tensor, axis=1):
    """Returns the length of `[batch, length, ...]` along `axis`, which must be known.

    For code that needs known lengths: caches, random members, images.
    """
    length = tensor.shape[axis]
    if length is None:
        raise ValueError(
            f"The sequence length of `{name}` must be known when TensorFlow traces "
            "heads that need it, such as random ones, images, segments, and calls with "
            f"a cache. Received: {name}.shape={tuple(tensor.shape)}. Keras leaves it "
            "open from the second length on: pad or cut the sequences to one length, "
            "make the function again for each length with "
            "`model.make_predict_function(force=True)`, or compile the model with "
            "`run_eagerly=True`."
        )
    return int(length)
