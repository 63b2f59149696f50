"""The inputs of head groups, with heads of keys and keys of the previous token.

Key heads are heads of keys and values, each of which serves several heads of queries:
the H / K heads that stand side by side at its place. Letters: B batch, H heads of
queries, K key heads, L length.

With `key_shift=1`, position p offers the key of position p - 1 with its own value, so
that a query finds earlier content that is similar to its own, and reads what followed
it. A pair of key and value can stand at the place of its value, as patterns over
positions need it, or at the place of its key, as clusters need it, whose members are
keys.

References:
    Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from
    Multi-Head Checkpoints" (https://arxiv.org/abs/2305.13245).
    Key shift is a harder form of the "smeared keys" in Olsson et al. (2022),
    "In-context Learning and Induction Heads" (https://arxiv.org/abs/2209.11895).
"""

import dataclasses
from typing import Any

from keras import ops

from routing_tf.layers.support.masks import Segments
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import without_padding
from routing_tf.layers.support.tensors import cut_axis
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import is_integer

MASKS = ("query_mask", "key_mask", "value_mask")


# Without `repr`: Keras shows arguments in its messages, and these are large.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HeadInputs:
    """The inputs of an attention pattern.

    Args:
        query: `<float>[batch, heads, length, key_dim]`, scaled.
        key: `<float>[batch, heads, memory length, key_dim]`; None if the group uses the
            queries as keys (`needs_keys` is False). With grouped queries, keys and
            values have fewer heads, see `HeadGroup.remembers_key_heads`.
        value: `<float>[batch, heads, memory length, value_dim]`.
        query_mask: `<bool>[batch, 1, length]`; None (the default) for no padding.
        key_mask: `<bool>[batch, 1 or heads, memory length]`, True for keys of real
            tokens; None (the default) for no padding.
        value_mask: the same for values. It differs from `key_mask` if keys were
            shifted, see `routing_tf.layers.support.head_inputs`.
        token_bias: `<float>[batch, 1, memory length]`, added to the logits of the
            values; None (the default) for no bias.
        source: `<float>[batch, length, dim]`, the tokens that queries are made from, in
            the order of the layer's input; None (the default) if they are unknown.
        use_causal_mask: whether a query sees only keys up to its own position.
            Defaults to False.
        is_cross_attention: whether key and value come from another sequence than the
            query. Defaults to False.
        positions: `Positions` of the query, which describe the axes and their order;
            None (the default) for a sequence.
        memory_positions: the same for the value.
        adds_losses: whether clustering losses are added. Defaults to True.
        first_position: position of the first token, an integer or a tensor. Defaults
            to 0.
        routing_scope: the tokens that compete in expert choice under a causal mask, see
            `RoutedHeads`; None (the default) for the scope of the group.
        segments: `Segments`; no token sees another segment. None (the default) for a
            single segment.
    """

    query: Any = None
    key: Any = None
    value: Any = None
    query_mask: Any = None
    key_mask: Any = None
    value_mask: Any = None
    token_bias: Any = None
    source: Any = None
    use_causal_mask: bool = False
    is_cross_attention: bool = False
    positions: Any = None
    memory_positions: Any = None
    adds_losses: bool = True
    first_position: Any = 0
    routing_scope: str | None = None
    segments: Segments | None = None

    @classmethod
    def of(
        cls,
        query=None,
        key=None,
        value=None,
        query_mask=None,
        value_mask=None,
        token_bias=None,
        **options,
    ):
        """Returns the inputs for masks and a bias without an axis of heads.

        Masks are `<bool>[batch, length]`, True for real tokens, the bias is
        `<float>[batch, memory length]`. `value_mask` also masks keys.
        """
        query_mask, value_mask = (
            None if mask is None else ops.cast(mask, "bool")[:, None]
            for mask in (query_mask, value_mask)
        )
        if token_bias is not None:
            token_bias = ops.convert_to_tensor(token_bias)[:, None]
        masks = query_mask, value_mask, value_mask
        return cls(query, key, value, *masks, token_bias, **options)

    def tokens(self, first, number):
        """Returns the inputs of some tokens alone, without segments.

        Args:
            first: the first of them, an integer or a tensor.
            number: how many they are, an integer.
        """
        places, parts = first + numbers(number), {}
        for name in (*MASKS, "query", "key", "value", "token_bias"):
            x = getattr(self, name)
            parts[name] = None if x is None else ops.take(x, places, axis=2)
        first_position = self.first_position + first
        parts |= {"source": None, "positions": None, "segments": None}
        return dataclasses.replace(self, **parts, first_position=first_position)

    def real_tokens(self):
        """Returns where query and key are both real; None for everywhere."""
        if self.query_mask is None:
            return self.key_mask
        return combine_masks(self.query_mask, self.key_mask)

    def without_padding(self, output):
        """Returns `output` `[B, H, L, D]`, zero where query or key is padding."""
        if self.query_mask is None and self.key_mask is None:
            return output
        return without_padding(output, self.real_tokens())

    @property
    def differentiated(self):
        """Names of the tensors to which gradients flow."""
        names = ("query", "key", "value", "token_bias")
        return [name for name in names if getattr(self, name) is not None]

    def in_last_segment(self):
        """Returns the inputs in which all but the last segment, if any, is padding."""
        if self.segments is None:
            return self
        own = self.segments.is_in_last
        masks = {name: combine_masks(getattr(self, name), own) for name in MASKS}
        return dataclasses.replace(self, **masks)


def for_queries(x, num_heads):
    """Repeats `[B, K, ...]` for the heads of queries: `[B, H, ...]`; None for None."""
    if x is None or x.shape[1] == num_heads:
        return x
    return ops.repeat(x, num_heads // x.shape[1], axis=1)


def of_queries(x, num_key_heads):
    """Gives queries of a key head an axis: `[B, H, ...]` to `[B, K, H / K, ...]`."""
    batch, heads, *rest = ops.shape(x)
    return ops.reshape(x, (batch, num_key_heads, heads // num_key_heads, *rest))


def all_queries(x):
    """Undoes `of_queries`."""
    batch, num_key_heads, per_key, *rest = ops.shape(x)
    return ops.reshape(x, (batch, num_key_heads * per_key, *rest))


def in_one_sequence(x, num_key_heads):
    """Joins the queries of a key head, one head after the other.

    From `[B, H, L, ...]` to `[B, K, H / K * L, ...]`.
    """
    if x.shape[1] == num_key_heads:
        return x
    batch, heads, length, *rest = ops.shape(x)
    length = heads // num_key_heads * length
    return ops.reshape(x, (batch, num_key_heads, length, *rest))


def in_heads(x, like):
    """Undoes `in_one_sequence`; `like` gives the sizes of the axes 0 to 2."""
    batch, heads, length = ops.shape(like)[:3]
    if x.shape[1] == heads:
        return x
    return ops.reshape(x, (batch, heads, length, *ops.shape(x)[3:]))


def check_key_shift(name, key_shift):
    """Returns 0 or 1; else raises a `ValueError`."""
    if not is_integer(key_shift) or key_shift not in (0, 1):
        raise ValueError(
            f"`{name}` must be 0 (a position offers its own key) or 1 (it offers the "
            f"key of the token before it). Received: {name}={key_shift!r}"
        )
    return int(key_shift)


def check_key_shift_call(inputs):
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
