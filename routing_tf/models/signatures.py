"""Inputs of the functions of SavedModels: checks, and settings of sampling.

The rules of draws are those of the samplers of keras_hub, whose settings are Python
values and cannot be inputs of a compiled or saved function.
"""

import typing

import keras_hub
import numpy as np
import tensorflow as tf
from keras import ops

from routing_tf.layers.support import tensors

# Positive, for logarithms.
_SMALLEST_UNIFORM = np.finfo("float32").tiny


def filtered_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Returns the probabilities of the next token that a sampler draws from.

    First, the logits `<float>[batch, vocabulary_size]` are divided by the temperature
    (0 keeps only the most probable token). Then only the `top_k` most probable tokens
    are kept (0 keeps all). Then only the first tokens are kept whose probabilities,
    before tokens were dropped, sum to more than `top_p`. The rest, at least one token,
    sums to 1. The settings are numbers or scalars.

    Reference: `TopKSampler` and `TopPSampler` of keras_hub.
    """
    logits = ops.cast(logits, "float32")
    vocabulary_size = logits.shape[-1]
    temperature = ops.cast(temperature, "float32")
    is_drawn = temperature > 0
    # A small temperature must not make the largest logit infinite.
    logits -= tensors.largest(logits, axis=-1, keepdims=True)
    probabilities = ops.softmax(logits / ops.where(is_drawn, temperature, 1.0))
    values, order = ops.top_k(probabilities, k=vocabulary_size, sorted=True)
    ranks = ops.argsort(order, axis=-1)
    top_p = ops.cast(top_p, "float32")
    # Sums may be rounded to more than 1.
    in_top_p = ops.logical_or(ops.cumsum(values, axis=-1) <= top_p, top_p >= 1.0)
    # The token that exceeds `top_p` also stays.
    limit = 1 + ops.sum(ops.cast(in_top_p, "int32"), axis=-1, keepdims=True)
    top_k = ops.cast(top_k, "int32")
    limit = ops.minimum(limit, ops.where(top_k > 0, top_k, vocabulary_size))
    limit = ops.where(is_drawn, limit, 1)
    kept = ops.where(ops.cast(ranks, "int32") < limit, probabilities, 0.0)
    return kept / ops.sum(kept, axis=-1, keepdims=True)


def draw(probabilities, uniform):
    """Draws a token `<int32>[batch]` for each row; equal numbers draw equal tokens.

    `uniform` are independent and uniform in (0, 1), of the shape of `probabilities`.
    """
    # The largest of Gumbel variables, because a rounded sum of probabilities could end
    # in a dropped token.
    noise = -ops.log(-ops.log(uniform))
    return ops.cast(ops.argmax(ops.log(probabilities) + noise, axis=-1), "int32")


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
        return filtered_probabilities(logits, s.temperature, s.top_k, s.top_p)

    def get_next_token(self, probabilities):
        # Numbers of a row do not depend on how many rows follow.
        uniform = tf.random.stateless_uniform(
            tf.shape(probabilities),
            seed=tf.stack([self.settings.seed, self.index - 1]),
            minval=_SMALLEST_UNIFORM,
        )
        return draw(probabilities, uniform)
