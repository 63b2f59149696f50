"""Tests of the checks that all layers share."""

import re

import keras
import pytest

from routing_tf.layers.support import validation


@pytest.mark.parametrize(
    "check, wrong, right",
    [
        (validation.check_positive_integer, [0, -1, 1.0, "1", None, True], [1, 7]),
        (validation.check_non_negative_integer, [-1, 1.0, None, False], [0, 1]),
        (validation.check_rate, [-0.1, 1, 2, False, "0", None, [0]], [0, 0.0, 0.99]),
    ],
)
def test_messages_name_argument_and_value(check, wrong, right):
    for value in right:
        check("size", value)
    for value in wrong:
        message = rf"^`size` must .*\. Received: size={re.escape(repr(value))}$"
        with pytest.raises(ValueError, match=message):
            check("size", value)


def test_choice_lists_what_is_allowed():
    validation.check_choice("kind", "a", ("a", "b"))
    with pytest.raises(ValueError, match="`kind` .*'a', 'b'. Received: kind='c'"):
        validation.check_choice("kind", "c", ("a", "b"))


def test_initializer():
    made = validation.initializer("kernel_initializer", "zeros")
    assert isinstance(made, keras.initializers.Zeros)
    assert validation.initializer("kernel_initializer", None) is None
    for value in ("nope", 3.5, [1]):
        message = rf"`kernel_initializer` .*Received: .*={re.escape(repr(value))}$"
        with pytest.raises(ValueError, match=message):
            validation.initializer("kernel_initializer", value)


def test_static_length():
    assert validation.static_length("x", keras.KerasTensor((None, 5, 3))) == 5
    with pytest.raises(ValueError, match=r"`x`.*x.shape=\(2, None, 3\)"):
        validation.static_length("x", keras.KerasTensor((2, None, 3)))
