"""Global tokens: some tokens see all and are seen by all, the others see near ones."""

import keras
from keras import ops

from routing_tf.layers import ScaledDotProduct
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.tensors import as_numbers
from routing_tf.layers.support.tensors import cut_axis
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import library
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import smaller
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import is_integer
from routing_tf.zoo.parts.chosen_blocks import side_by_side
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share
from routing_tf.zoo.parts.refusals import OneSequenceHeads

__all__ = ["GlobalHeads"]


class LearnedTokens(ScaledDotProduct):
    """Softmax attention in which every query also sees learned keys and values.

    They take part in the same softmax, no mask hides them, and they have no relative
    position. The group that owns the layer sets their number.
    """

    #: Number of learned keys and values of each head.
    num_learned_tokens = 0

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        if not self.num_learned_tokens:
            return
        shape = (key_shape[1], self.num_learned_tokens)
        self.learned_keys = self.add_weight(
            name="learned_keys",
            shape=(*shape, key_shape[-1]),
            initializer=cloned(self.embeddings_initializer),
        )
        self.learned_values = self.add_weight(
            name="learned_values",
            shape=(*shape, value_shape[-1]),
            initializer=cloned(self.embeddings_initializer),
        )

    def call(
        self,
        query,
        key,
        value,
        attention_mask=None,
        bias=None,
        distances=None,
        training=None,
        **kwargs,
    ):
        """See `ScaledDotProduct`; heads are on axis 1."""
        # Keras passes `training` only to a layer that names it.
        if self.num_learned_tokens:
            key = self._behind(key, self.learned_keys)
            value = self._behind(value, self.learned_values)
            attention_mask = self._with_columns(attention_mask, True)
            bias = self._with_columns(bias, 0)
        return super().call(
            query,
            key,
            value,
            attention_mask,
            bias,
            distances=distances,
            training=training,
            **kwargs,
        )

    def _behind(self, x, learned):
        """Appends learned vectors on the second last axis."""
        heads, number, size = learned.shape
        *leading, _, wanted = ops.shape(x)
        learned = ops.cast(learned, x.dtype)
        # An identity matrix after the values shows only the weights of the sequence.
        learned = ops.pad(learned, [(0, 0), (0, 0), (0, wanted - size)])
        between = [1] * (len(leading) - 2)
        learned = ops.reshape(learned, (1, heads, *between, number, wanted))
        learned = ops.broadcast_to(learned, (*leading, number, wanted))
        return ops.concatenate([x, learned], axis=-2)

    def _with_columns(self, x, value):
        """Adds a column for each learned token, the same for all queries."""
        if x is None:
            return None
        padding = [(0, 0)] * (len(x.shape) - 1) + [(0, self.num_learned_tokens)]
        return ops.pad(x, padding, constant_values=value)


@keras.saving.register_keras_serializable("routing_tf")
class GlobalHeads(OneSequenceHeads):
    """Heads with global tokens, which see all and are seen by all.

    Every other query sees the global tokens and a sliding window around itself, in one
    softmax. With a causal mask, no token sees later ones. Work and memory grow with the
    length times the sum of the window and the number of global tokens.

    Longformer projects global tokens with separate matrices; here `MixedAttention` has
    one projection for all tokens. Learned tokens are keys and values that are weights
    of the layer: all queries see them, and they see nothing. In contrast, the global
    tokens of ETC are states that pass through all layers and read the text. For these,
    put tokens before the sequence and name their places in `global_positions`.

    Args:
        num_heads: number of heads in the group.
        global_positions: positions of the global tokens, a tuple or a `range` of
            integers; those after the end of a sequence do not count. On two axes,
            positions count in the order of the sequence. Defaults to `(0,)`.
        attention_window: length of the sliding window, in tokens: half of it (rounded
            down) on each side of the query, and the query's own token; under a causal
            mask, the last `attention_window` tokens, including the query's own. None
            (the default) for no window: other queries see only global tokens.
        num_learned_tokens: number of learned keys and values of each head, whose
            initializer is `embeddings_initializer`. Defaults to 0.
        **kwargs: arguments of `HeadGroup`; relative positions are in tokens.

    Call arguments and Returns: as in `HeadGroup`. Weights of learned tokens are not in
    the attention scores, whose rows then add up to less than 1.

    Raises:
        ValueError: if there is nothing to see, or relative positions come with learned
            tokens, which have none; when called, if query and value are different
            sequences or differ in length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.GlobalHeads(2, global_positions=range(2), attention_window=4)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: Beltagy et al., "Longformer: The Long-Document Transformer"
    (https://arxiv.org/abs/2004.05150), section 3.1; Ainslie et al., "ETC: Encoding Long
    and Structured Inputs in Transformers" (https://arxiv.org/abs/2004.08483), section
    3.2; Zaheer et al., "Big Bird" (https://arxiv.org/abs/2007.14062), section 2.
    """

    compares_by_products = True
    dot_product_class = LearnedTokens

    attention_window = Argument(check_optional_integer)
    num_learned_tokens = Argument(check_non_negative_integer)

    def __init__(
        self,
        num_heads,
        global_positions=(0,),
        attention_window=None,
        num_learned_tokens=0,
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        self.global_positions = _check_positions(global_positions)
        self.attention_window = attention_window
        self.num_learned_tokens = num_learned_tokens
        if not (self.global_positions or attention_window or num_learned_tokens):
            raise ValueError(
                "`global_positions` must not be empty without a window and learned "
                "tokens: there is nothing to see. Received: global_positions="
                f"{global_positions!r}. Pass `attention_window`"
            )
        if num_learned_tokens and self.max_relative_position is not None:
            raise ValueError(
                "`max_relative_position` must be None with learned tokens, which have "
                "no position. Received: "
                f"max_relative_position={self.max_relative_position} with "
                f"num_learned_tokens={num_learned_tokens}. Put tokens before the "
                "sequence instead"
            )
        self.dot_product.num_learned_tokens = self.num_learned_tokens

    def attend(self, inputs, training=None):
        length = length_of(inputs.query, 2)
        output = self._attend_near(inputs, length, training)
        if not self.global_positions:
            return output
        far = self._attend_far(inputs, length, training)
        # Each position reads its own row; a global one reads its row among the global
        # tokens.
        places, positions = numbers(length), self._positions()
        lib = library(length)
        moved = lib.where(
            places[:, None] == positions,
            length + numbers(len(positions)) - positions,
            0,
        )
        rows = places + lib.sum(moved, axis=1)
        return ops.take(ops.concatenate([output, far], axis=2), rows, axis=2)

    def sees(self, query, keys, cache):
        positions = self._positions()
        visible = ops.any(keys[..., None] == positions, axis=-1)
        is_global = ops.any(query == positions, axis=-1, keepdims=True)
        visible = ops.logical_or(visible, is_global)
        if self.attention_window is not None:
            visible = ops.logical_or(visible, query - keys < self.attention_window)
        return visible, keys - query

    def _positions(self):
        return as_numbers(self.global_positions)

    def _attend_near(self, inputs, length, training):
        """Lets all queries see the window and the global tokens."""
        block = length
        if self.attention_window is not None:
            block = self.attention_window // (1 if inputs.use_causal_mask else 2) or 1
            block = min(block, length) if is_known(length) else block
        query = tensors.break_into_blocks(inputs.query, block, axis=2)
        places = tensors.break_into_blocks(numbers(length), block, axis=0)
        parts = []
        if self.attention_window is not None:
            parts.append(self._window_part(inputs, length, block))
        if self.global_positions or not parts:
            parts.append(self._global_part(inputs, length, places))
        arranges, masks, distances = zip(*parts, strict=True)

        def slots(x):
            return ops.concatenate([arrange(x) for arrange in arranges], axis=3)

        bias = inputs.token_bias
        relative = self.max_relative_position is not None
        output = self.dot_product(
            query,
            slots(inputs.key),
            slots(inputs.value),
            attention_mask=side_by_side(masks, ops.shape(masks[0])[:-1]),
            bias=None if bias is None else slots(bias)[..., None, :],
            distances=side_by_side(distances, ops.shape(places)) if relative else None,
            training=training,
        )
        return tensors.put_back_blocks(output, length, axis=2)

    def _window_part(self, inputs, length, block):
        """Returns how keys come to the windows, which queries see them, and distances.

        The first is a function from `[batch, heads, length, ...]` to
        `[batch, heads, blocks, slots, ...]`, the others are broadcastable to
        `[batch, 1, blocks, block, slots]`. Global tokens are not seen here a second
        time.
        """
        before = after = self.attention_window // 2
        if inputs.use_causal_mask:
            before, after = self.attention_window - 1, 0
        is_one_block = is_known(length) and length <= block
        flange = [0 if is_one_block else min(n, 1) for n in (before, after)]

        def arrange(x):
            cut = tensors.break_into_blocks(x, block, axis=2)
            return tensors.memory_windows(cut, flange[:1], flange[1:], axis=2)

        places = numbers(length)[:, None]
        is_local = library(length).all(places != self._positions(), axis=1)
        real = arrange(combine_masks(is_local[None, None], inputs.value_mask))
        slots = numbers(block * (1 + sum(flange)))
        apart = slots - flange[0] * block - numbers(block)[:, None]
        near = (apart >= -before) & (apart <= after)
        return arrange, combine_masks(real[..., None, :], near), apart

    def _global_part(self, inputs, length, places):
        """Returns the same for global tokens; `places` are those of the queries."""
        positions, at, real = self._found(inputs.value_mask, length)
        num_blocks = ops.shape(places)[0]

        def arrange(x):
            taken = ops.take(x, at, axis=2)[:, :, None]
            batch, heads, _, *rest = ops.shape(taken)
            return ops.broadcast_to(taken, (batch, heads, num_blocks, *rest))

        mask = real[:, :, None, None]
        if inputs.use_causal_mask:
            mask = combine_masks(mask, positions <= places[..., None])
        return arrange, mask, positions - places[..., None]

    def _attend_far(self, inputs, length, training):
        """Lets the global tokens see all."""
        positions, at, _ = self._found(None, length)
        reach = length
        if inputs.use_causal_mask:
            reach = smaller(max(self.global_positions) + 1, length)
        key, value, mask, bias = (
            None if x is None else cut_axis(x, 0, reach, axis=2)
            for x in (inputs.key, inputs.value, inputs.value_mask, inputs.token_bias)
        )
        distances = numbers(length)[:reach] - positions[:, None]
        mask = None if mask is None else mask[:, :, None]
        if inputs.use_causal_mask:
            mask = combine_masks(mask, distances <= 0)
        relative = self.max_relative_position is not None
        return self.dot_product(
            ops.take(inputs.query, at, axis=2),
            key,
            value,
            attention_mask=mask,
            bias=None if bias is None else bias[:, :, None],
            distances=distances if relative else None,
            training=training,
        )

    def _found(self, mask, length):
        """Returns the global positions, where to read them, and which are tokens."""
        positions = self._positions()
        at = library(length).minimum(positions, length - 1)
        real = (positions < length)[None, None]
        if mask is not None:
            real = combine_masks(real, ops.take(mask, at, axis=2))
        return positions, at, real


def _check_positions(positions):
    is_list = isinstance(positions, (tuple, list, range))
    if not is_list or not all(is_integer(x) and x >= 0 for x in positions):
        _refuse_positions(positions)
    if len(set(positions)) < len(positions):
        _refuse_positions(positions)
    return tuple(int(x) for x in positions)


def _refuse_positions(positions):
    raise ValueError(
        "`global_positions` must be distinct integers of at least 0, as a tuple or a "
        f"range. Received: global_positions={positions!r}"
    )


def _settings(sizes):
    chosen = share(sizes, 4)
    window = max(1, sizes.attention_window - chosen)
    return {"global_positions": tuple(range(chosen)), "attention_window": window}


PATTERNS = {"global_tokens": Pattern(GlobalHeads, _settings, refuses=("entmax_alpha",))}
