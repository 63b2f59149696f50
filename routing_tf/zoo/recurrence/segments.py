"""Parts of transformers with recurrence over segments."""

import keras
import numpy as np
from keras import ops

from routing_tf import layers
from routing_tf.layers.blocks.transformer_block import STEPS
from routing_tf.layers.caches.next_token import NotCast
from routing_tf.layers.caches.next_token import refuse_symbolic
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import deserialize
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import static_length
from routing_tf.zoo.parts import refusals

WAVELENGTHS = 1.0e4


class TakesState(keras.layers.Layer):
    """A layer whose call takes a `state` and returns it second, as a value."""

    def __call__(self, *args, state=None, **kwargs):
        if isinstance(state, NotCast):
            kwargs["state"] = state
        elif state is not None:
            if not isinstance(state, (dict, list, tuple)):
                raise ValueError(_rule_of_states(f"state={state!r}"))
            refuse_symbolic("state", (args, kwargs, state))
            # Keras would cast its float tensors.
            state = keras.tree.map_structure(ops.convert_to_tensor, state)
            kwargs["state"] = NotCast(state, None)
        return super().__call__(*args, **kwargs)


@keras.saving.register_keras_serializable("routing_tf")
class RecurrentBlock(ConfiguredLayer, TakesState):
    """Attention with a state and a feed-forward layer, each with a residual."""

    norm_position = Argument(check_choice, tuple(STEPS))

    def __init__(self, attention, feed_forward, norm_position, dropout, **kwargs):
        super().__init__(**kwargs)
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


def sinusoids(distances, dim):
    """Returns sines, and then cosines, of distances `<int32>[number]`."""
    half = -(-dim // 2)
    frequencies = WAVELENGTHS ** (-np.arange(half, dtype="float32") / half)
    angles = ops.cast(distances, "float32")[:, None]
    angles = angles * ops.convert_to_tensor(frequencies.astype("float32"))
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)[:, :dim]


def empty_memories(layer, batch_size, **lengths):
    """Returns memories of a layer that hold nothing, and their masks, by name."""
    refusals.check_built(layer, "make_state")
    state = {}
    for name, length in lengths.items():
        check_positive_integer(f"{name}_length", length)
        shape = (batch_size, length, layer.dim)
        state[name] = ops.zeros(shape, dtype=layer.compute_dtype)
        state[f"{name}_mask"] = ops.zeros(shape[:2], dtype="bool")
    return state


def values_of(state):
    """Returns a state as it was given; `stateless_call` passes it on as it is."""
    return state.cache if isinstance(state, NotCast) else state


def check_parts(length, positions, segment_length):
    """Raises a `ValueError` unless inputs are segments, or a part of what is left."""
    try:
        position, last = int(ops.min(positions)), int(ops.max(positions))
    except TypeError:  # unknown, while a function is traced
        position = last = 0
    if position != last:
        raise ValueError(
            "All texts of a state must be at the same position of a segment. "
            f"Received: positions from {position} to {last}. Read them apart"
        )
    is_whole = position == 0 and length % segment_length == 0
    if not is_whole and position + length > segment_length:
        raise ValueError(
            "Inputs with a state must be whole segments, or a part of what is left "
            f"of one. Received: length={length} at position {position} of a "
            f"segment, segment_length={segment_length}. Split inputs where "
            "segments end"
        )


def checked_state(state, x, names):
    """Returns the dict of a state; a `ValueError` if it is of other inputs.

    Args:
        state: what a call was given.
        x: its inputs.
        names: those of the tensors of a state.
    """
    state, batch = values_of(state), x.shape[0]
    if not isinstance(state, dict) or set(state) != set(names):
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            _rule_of_states(f"{found} in place of a dict of {sorted(names)}")
        )
    shape = state["memory"].shape
    if shape[-1] == x.shape[-1] and (shape[0] == batch or None in (shape[0], batch)):
        return state
    raise ValueError(
        _rule_of_states(
            f"a memory of shape {tuple(shape)} with inputs of shape {tuple(x.shape)}"
        )
    )


def checked_states(state, number):
    """Returns the list of the states of all blocks, or raises a `ValueError`."""
    state = values_of(state)
    if isinstance(state, (list, tuple)) and len(state) == number:
        return state
    raise ValueError(_rule_of_states(f"{type(state).__name__} for {number} blocks"))


def _rule_of_states(received):
    return (
        "`state` must be what `make_state` or an earlier call returned for as many "
        f"texts. Received: {received}"
    )


def checked_side_attention(layer):
    """Returns an attention layer, from its config, too; None stays None."""
    layer = deserialize(layer)
    if layer is None or isinstance(layer, layers.MixedAttention):
        return layer
    raise ValueError(
        "`side_attention` must be a `MixedAttention` or `RoutingAttention` layer, or "
        f"None. Received: side_attention={layer!r}"
    )


def check_multiple(**lengths):
    """Raises a `ValueError` unless the first length is a multiple of the second."""
    (name, length), (part, number) = lengths.items()
    if length % number:
        raise ValueError(
            f"`{name}` must be a multiple of `{part}`. Received: {name}={length}, "
            f"{part}={number}"
        )
