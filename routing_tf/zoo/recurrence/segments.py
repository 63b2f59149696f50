"""Parts of transformers with recurrence over segments."""

import keras
from keras import ops

from routing_tf import layers
from routing_tf.layers.blocks.transformer_block import STEPS
from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.not_cast import NotCast
from routing_tf.layers.support.serialization import ConfiguredLayer
from routing_tf.layers.support.serialization import deserialize
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import static_length


class TakesState(keras.layers.Layer):
    """A layer whose call takes a `state` and returns it second, as a value."""

    def __call__(self, *args, state=None, **kwargs):
        if isinstance(state, NotCast):
            kwargs["state"] = state
        elif state is not None:
            # Keras would cast its float tensors.
            state = keras.tree.map_structure(ops.convert_to_tensor, state)
            kwargs["state"] = NotCast(state, None)
        return super().__call__(*args, **kwargs)


@keras.saving.register_keras_serializable("routing_tf")
class RecurrentBlock(ConfiguredLayer, TakesState):
    """Attention with a state and a feed-forward layer, each with a residual."""

    def __init__(self, attention, feed_forward, norm_position, dropout, **kwargs):
        super().__init__(**kwargs)
        check_choice("norm_position", norm_position, tuple(STEPS))
        self.supports_masking = True
        self.attention = deserialize(attention)
        self.feed_forward = deserialize(feed_forward)
        self.norm_position = norm_position
        self.dropout = dropout
        self.attention_input = self._steps("attention_input", 0)
        self.attention_output = self._steps("attention_output", 1)
        self.feed_forward_input = self._steps("feed_forward_input", 0)
        self.feed_forward_output = self._steps("feed_forward_output", 1)

    def _steps(self, name, side):
        steps, own = STEPS[self.norm_position][side], {"dtype": self.dtype_policy}
        return layers.SublayerSteps(steps, self.dropout, name=name, **own)

    def build(self, inputs_shape):
        for part in ("attention", "feed_forward"):
            for name in (f"{part}_input", part, f"{part}_output"):
                getattr(self, name).build(inputs_shape)

    def call(self, inputs, padding_mask=None, training=None, state=None):
        x = self.attention_input(inputs, training=training)
        x = self.attention(x, mask=padding_mask, training=training, state=state)
        if state is not None:
            x, state = x
        x = self.attention_output(x, residual=inputs, training=training)
        y = self.feed_forward(self.feed_forward_input(x), training=training)
        y = self.feed_forward_output(y, residual=x, training=training)
        return y if state is None else (y, state)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


def segments(x, real, length):
    """Yields the tokens and the mask of each segment; None for one segment."""
    if length is None:
        yield x, real
        return
    for start in range(0, static_length("inputs", x), length):
        yield x[:, start : start + length], real[:, start : start + length]


def relative_shift(x):
    """Moves row i of `[batch, heads, length, number]` by `length - 1 - i` to the left.

    What comes in on the right belongs to other rows, and must be masked.
    """
    heads, (length, number) = x.shape[1], (length_of(x, axis) for axis in (2, 3))
    x = ops.pad(x, [[0, 0], [0, 0], [0, 0], [1, 0]])
    x = ops.reshape(x, (-1, heads, number + 1, length))[:, :, 1:]
    return ops.reshape(x, (-1, heads, length, number))
