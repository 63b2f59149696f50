"""The inputs of head groups."""

import dataclasses
from typing import Any

from keras import ops

from routing_tf.layers.support.lengths import numbers
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import without_padding
from routing_tf.layers.support.segments import Segments

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
            shifted, see `routing_tf.layers.support.key_shift`.
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
