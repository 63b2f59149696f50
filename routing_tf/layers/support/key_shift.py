"""Keys of the previous token, which positions offer with `key_shift=1`.

Position p then offers the key of position p - 1 with its own value, so that a query
finds earlier content that is similar to its own, and reads what followed it. A pair of
key and value can stand at the place of its value, as patterns over positions need it,
or at the place of its key, as clusters need it, whose members are keys.

Reference: a harder form of the "smeared keys" in Olsson et al. (2022), "In-context
Learning and Induction Heads" (https://arxiv.org/abs/2209.11895).
"""

import dataclasses

from keras import ops

from routing_tf.layers.support.axes import cut_axis
from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.lengths import numbers
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.validation import is_integer


def check_key_shift(name, key_shift):
    """Returns 0 or 1; else raises a `ValueError`."""
    if not is_integer(key_shift) or key_shift not in (0, 1):
        raise ValueError(
            f"`{name}` must be 0 (a position offers its own key) or 1 (it offers the "
            f"key of the token before it). Received: {name}={key_shift!r}"
        )
    return int(key_shift)


def check_call(inputs):
    """Raises a `ValueError` unless `HeadInputs` allow shifted keys."""
    if inputs.is_cross_attention or not inputs.use_causal_mask:
        raise ValueError(
            "`key_shift=1` needs self-attention under a causal mask: without the mask, "
            "a query could read the value that follows itself, and another sequence "
            "has no value that follows the query's content. Received: "
            f"use_causal_mask={inputs.use_causal_mask}, "
            f"is_cross_attention={inputs.is_cross_attention}. Pass "
            "`use_causal_mask=True` and no `value`, or use `key_shift=0`"
        )


def offer_previous_keys(inputs):
    """Moves keys one position later, to the values that are read with them.

    For self-attention under a causal mask. The value mask is then False at the first
    position of the sequence and of each segment, at padding and after padding.
    """
    has_previous = (numbers(length_of(inputs.value, 2)) > 0)[None, None]
    if inputs.segments is not None:
        has_previous = inputs.segments.value_places > 0
    previous_is_real = None
    if inputs.key_mask is not None:
        previous_is_real = one_later(inputs.key_mask)
    return dataclasses.replace(
        inputs,
        key=one_later(inputs.key),
        value_mask=combine_masks(has_previous, previous_is_real, inputs.value_mask),
    )


def read_next_values(inputs):
    """Moves values, with their mask and bias, one position earlier, to their keys.

    For self-attention under a causal mask. The value mask is then False at padding and
    before padding, and at the last position of a segment. Nothing follows the last
    position of all: no query may read it.
    """
    mask, bias = inputs.value_mask, inputs.token_bias
    if mask is not None:
        mask = combine_masks(_one_earlier(mask), inputs.key_mask)
    if inputs.segments is not None:
        next_is_own = _one_earlier(inputs.segments.value_places) > 0
        mask = combine_masks(mask, next_is_own)
    return dataclasses.replace(
        inputs,
        value=_one_earlier(inputs.value),
        value_mask=mask,
        token_bias=None if bias is None else _one_earlier(bias),
    )


def one_later(x):
    """Moves axis 2 of `[batch, heads, length, ...]`; the first entry stays too."""
    parts = cut_axis(x, 0, 1, axis=2), cut_axis(x, 0, length_of(x, 2) - 1, axis=2)
    return ops.concatenate(parts, axis=2)


def _one_earlier(x):
    """Moves axis 2 of `[batch, heads, length, ...]`; the last entry stays too."""
    length = length_of(x, 2)
    parts = cut_axis(x, 1, length, axis=2), cut_axis(x, length - 1, length, axis=2)
    return ops.concatenate(parts, axis=2)
