"""Synthesizer attention: logits of places, without products of queries and keys."""

import keras
from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers.caches.rows import make_rows
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import initializer
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.pattern import Pattern

__all__ = ["SynthesizerHeads"]

KINDS = ("dense", "random")
NO_KEYS = "logits of these heads belong to places, and do not depend on keys"


@keras.saving.register_keras_serializable("routing_tf")
class SynthesizerHeads(HeadGroup):
    """Heads whose attention weights are made without comparing tokens.

    Weights are a softmax over all places, or over those up to the query with a causal
    mask, of logits that depend only on the query or on nothing:

    - `"dense"`: the logits of a query are `W2 relu(W1 x)`. W1 is the query projection
      of the group, without the scale of dot products.
    - `"random"`: the logits of places i and j are a learned number `R[i, j]`. The query
      projection is not read. With `trainable=False`, R keeps its random values.

    Work and memory grow with the square of the length, as in the paper; only the key
    projection is saved.

    Args:
        num_heads: number of heads in the group.
        kind: `"dense"` (the default) or `"random"`.
        max_length: largest number of tokens of a sequence. Defaults to 512.
        rank: number of factors, which save weights. With `"random"`, R is the product
            of matrices `(max_length, rank)` and `(rank, max_length)`. With `"dense"`,
            one function of the query has `rank` numbers and another
            `ceil(max_length / rank)`, and the logits are their products, pair by pair.
            None (the default) for no factors.
        logits_initializer: initializer of W2, R and their factors; None (the default)
            for normal numbers, so that logits are about as large as those of dot
            products.
        **kwargs: arguments of `HeadGroup`, without `max_relative_position`,
            `key_shift` and `rotary_positions`.

    Call arguments and Returns: as in `HeadGroup`; `key` is not read.

    Raises:
        ValueError: if an argument has no meaning; when called, if the sequence is
            longer than `max_length`, or with another sequence as value.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.SynthesizerHeads(2, kind="random", max_length=16, rank=4)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: Tay et al., "Synthesizer: Rethinking Self-Attention for Transformer
    Models" (https://arxiv.org/abs/2005.00743), section 3. Tested only against NumPy
    code of this repository.
    """

    needs_keys = False

    kind = Argument(check_choice, KINDS)
    max_length = Argument(check_positive_integer)
    rank = Argument(check_optional_integer)
    logits_initializer = Argument(initializer)

    def __init__(
        self,
        num_heads,
        kind="dense",
        max_length=512,
        rank=None,
        logits_initializer=None,
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        refusals.refuse_arguments(
            self, "each place has a logit already", "max_relative_position"
        )
        refusals.refuse_arguments(self, NO_KEYS, "key_shift", "rotary_positions")
        self.kind = kind
        self.max_length = max_length
        self.rank = rank
        self.logits_initializer = logits_initializer

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        length, rank = self.max_length, self.rank
        if self.kind == "dense":
            deviation, rows = self.key_dim**-0.5, self.key_dim
            columns = (length,) if rank is None else (rank, -(-length // rank))
        elif rank is None:
            deviation, rows, columns = 1.0, length, (length,)
        else:
            deviation, rows, columns = rank**-0.25, length, (rank, rank)
        names = ("logits",) if rank is None else ("first_factor", "second_factor")
        self.factors = [
            self.add_weight(
                name=name,
                shape=(self.num_heads, rows, size),
                initializer=cloned(self.logits_initializer)
                or keras.initializers.RandomNormal(stddev=deviation),
            )
            for name, size in zip(names, columns, strict=True)
        ]

    def prepared(self, inputs):
        refusals.refuse_another_sequence(inputs, NO_KEYS)
        length = length_of(inputs.value, 2)
        if is_known(length):
            self._check_length(length, "a sequence")
        return super().prepared(inputs)

    def attend(self, inputs, training=None):
        length = length_of(inputs.value, 2)
        query, key, bias = self._logits(inputs.query, slice(0, length), length)
        if self.dropout and training:
            # Each sequence drops different weights.
            query = query + ops.zeros_like(inputs.value[..., :1])
        mask = inputs.value_mask
        return self.dot_product(
            query,
            key,
            inputs.value,
            attention_mask=None if mask is None else mask[..., None, :],
            bias=_sum(bias, inputs.token_bias),
            use_causal_mask=inputs.use_causal_mask,
            training=training,
        )

    def make_cache(self, batch_size, max_length, positions=None):
        self._check_length(max_length, "a cache")
        shape = (batch_size, self.num_heads, max_length, self.value_dim + 2)
        return {"rows": ops.zeros(shape, self.compute_dtype)}

    def fill_cache(self, cache, inputs):
        empty = ops.zeros_like(cache["rows"])
        return {"rows": ops.slice_update(empty, (0, 0, 0, 0), _rows(inputs))}

    def step(self, cache, index, inputs):
        rows = ops.slice_update(cache["rows"], (0, 0, index, 0), _rows(inputs))
        length = rows.shape[2]
        places = index + numbers(inputs.query.shape[2])
        query, key, bias = self._logits(inputs.query, places, length)
        earlier = numbers(length) <= places[:, None]
        output = self.dot_product(
            query,
            key,
            rows[..., :-2],
            attention_mask=combine_masks(rows[..., None, :, -1] > 0, earlier),
            bias=_sum(bias, rows[..., -2]),
            training=False,
        )
        return output, {"rows": rows}

    def _check_length(self, length, name):
        if length > self.max_length:
            raise ValueError(
                f"`max_length` must be at least the length of {name}. Received: "
                f"max_length={self.max_length} of {self.name!r} with {name} of "
                f"{length} tokens. Make heads with a larger `max_length`"
            )

    def _logits(self, query, places, length):
        """Returns the factors of the logits of queries at some places.

        `places` are a slice or a tensor of places, `length` the number of keys.
        Returns queries and keys to be multiplied, and a bias or None.
        """
        factors = [
            ops.cast(ops.convert_to_tensor(x), self.compute_dtype)[None]
            for x in self.factors
        ]
        if self.kind == "dense":
            hidden = ops.relu(query) * ops.cast(self.key_dim**0.5, query.dtype)
            if self.rank is None:
                return hidden, ops.swapaxes(factors[0], -1, -2)[:, :, :length], None
            first, second = (product(hidden, x) for x in factors)
            pairs = first[..., :, None] * second[..., None, :]
            size = pairs.shape[-1] * pairs.shape[-2]
            logits = ops.reshape(pairs, (*ops.shape(query)[:3], size))
            return *_nothing(query, length), logits[..., :length]
        of_queries = (
            factors[0][:, :, places]
            if isinstance(places, slice)
            else ops.take(factors[0], places, axis=2)
        )
        if self.rank is None:
            return *_nothing(query, length), of_queries[..., :length]
        return of_queries, factors[1][:, :, :length], None


def _nothing(query, length):
    """Returns queries and keys whose products are zero."""
    query = ops.zeros_like(query[:1, :1, :, :1])
    return query, ops.zeros((1, 1, length, 1), query.dtype)


def _rows(inputs):
    """Returns values followed by bias and mask, `[batch, heads, length, E]`."""
    nothing = inputs.value[..., :0]
    return make_rows(nothing, inputs.value, inputs.value_mask, inputs.token_bias)


def _sum(logits, bias):
    """Returns the sum of logits and of a bias for each key; either may be None."""
    if bias is not None:
        bias = bias[..., None, :]
    if logits is None or bias is None:
        return bias if logits is None else logits
    return logits + bias


def _pattern(kind):
    return Pattern(
        SynthesizerHeads,
        lambda sizes: {"kind": kind, "max_length": sizes.max_length},
        has_relative_positions=False,
        refuses=("entmax_alpha", "key_shift", "rotary_positions"),
    )


PATTERNS = {
    "random_synthesizer": _pattern("random"),
    "synthesizer": _pattern("dense"),
}
