"""Inputs of the functions of SavedModels: checks, and settings of sampling."""

import typing

import keras_hub
import numpy as np
import tensorflow as tf

from routing_tf.models import sampling

# Positive, for logarithms.
_SMALLEST_UNIFORM = np.finfo("float32").tiny


def function(python_function, *specs):
    """Compiles a function of tensors; specs have the names of its arguments."""
    return tf.function(python_function, input_signature=specs, autograph=False)


def check(condition, message, *data):
    """Refuses inputs when the function runs."""
    return tf.debugging.Assert(tf.reduce_all(condition), [message, *data])


def checked(values, condition, message, *data):
    """Returns values if a condition holds when the function runs."""
    # Otherwise an operation on them could fail first, with a less helpful message.
    with tf.control_dependencies([check(condition, message, *data)]):
        return tf.identity(values)


def in_range(name, values, limit):
    """Returns integers, which must be from 0 to below a limit."""
    is_valid = (values >= 0) & (values < limit)
    message = f"{name} must be from 0 to {limit - 1}. Received:"
    return checked(values, is_valid, message, values)


class Settings(typing.NamedTuple):
    """Settings of sampling, scalars that are inputs of a saved function."""

    temperature: tf.Tensor
    top_k: tf.Tensor
    top_p: tf.Tensor
    seed: tf.Tensor

    @staticmethod
    def specs():
        dtypes = {"temperature": tf.float32, "top_k": tf.int32, "top_p": tf.float32}
        dtypes["seed"] = tf.int32
        return [tf.TensorSpec((), dtype, name) for name, dtype in dtypes.items()]

    @classmethod
    def defaults(cls):
        return cls(*map(tf.constant, (1.0, 0, 1.0, 0)))

    def check(self):
        """Refuses settings out of range when the function runs."""
        check(
            (self.temperature >= 0) & (self.top_k >= 0),
            "`temperature` and `top_k` must not be negative. Received:",
            self.temperature,
            self.top_k,
        )
        check(
            (self.top_p > 0) & (self.top_p <= 1),
            "`top_p` must be more than 0, and at most 1. Received:",
            self.top_p,
        )


class SettingsSampler(keras_hub.samplers.Sampler):
    """A sampler whose settings are tensors, so that they can be inputs.

    Draws depend only on the seed, the row and the position. It ends at `length` tokens,
    including the leading id.
    """

    def __init__(self, settings, length):
        super().__init__()
        self.settings = settings
        self.length = length

    def __call__(self, next, prompt, **options):
        def next_at(prompt, cache, index):
            # Those of the step that is being traced, whose draws follow at once.
            self.index = index
            return next(prompt, cache, index)

        return super().__call__(next_at, prompt, **options)

    def run_loop(self, cond, body, model=None, loop_vars=None, **options):
        index = loop_vars[2]
        return super().run_loop(cond, body, model, loop_vars, self.length - index)

    def compute_probabilities(self, logits):
        s = self.settings
        return sampling.filtered_probabilities(logits, s.temperature, s.top_k, s.top_p)

    def get_next_token(self, probabilities):
        # Numbers of a row do not depend on how many rows follow.
        uniform = tf.random.stateless_uniform(
            tf.shape(probabilities),
            seed=tf.stack([self.settings.seed, self.index - 1]),
            minval=_SMALLEST_UNIFORM,
        )
        return sampling.draw(probabilities, uniform)
