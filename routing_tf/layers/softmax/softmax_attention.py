"""Softmax attention: cut into parts and pieces, with a gradient of fewer passes."""

import dataclasses
import math
from typing import Any

import keras
from keras import ops

from routing_tf.layers.support.backends import is_on_one_cpu
from routing_tf.layers.support.backends import stated_gradient
from routing_tf.layers.support.keras_internals import computed_after
from routing_tf.layers.support.masks import causal_mask
from routing_tf.layers.support.masks import causal_mask_as_bias
from routing_tf.layers.support.tensors import cut_axis
from routing_tf.layers.support.tensors import is_broadcastable
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.tensors import split_axis

# Number of logits of a piece: with their gradients they fit into a cache of a few MiB.
PIECE_SIZE = 1 << 21
# Tracing more pieces takes longer than they save.
MAX_PIECES = 16

# Fewer queries than this make matrix products slow.
MIN_PART_SIZE = 32


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pairs:
    """What belongs to pairs of queries and keys, broadcastable to `[..., Q, K]`.

    Distances are None for differences of slots; `offset` is the slot of the key at the
    first query's position.
    """

    mask: Any
    bias: Any
    distances: Any
    offset: Any

    def cut(self, part):
        """Returns what belongs to the queries of a `Part` and the keys they see."""
        own = (part.pairs(x) for x in (self.mask, self.bias, self.distances))
        return Pairs(*own, self.offset + part.start)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Part:
    """Successive queries and the keys that they see, the first ones of all.

    Args:
        start: the first query; None (the default) for all queries and all keys.
        stop: the query after the last one.
        num_keys: number of keys.
        causal_mask: `<bool>[queries of the part, num_keys]`; None (the default) for no
            causal mask.
    """

    start: int | None = None
    stop: int | None = None
    num_keys: int | None = None
    causal_mask: Any = None

    def pairs(self, x):
        """Cuts what is broadcastable to `[..., queries, keys]`, or None."""
        if x is None:
            return None
        if len(x.shape) > 1 and x.shape[-2] != 1:
            x = cut_axis(x, self.start, self.stop, axis=-2)
        if len(x.shape) > 0 and x.shape[-1] != 1:
            x = cut_axis(x, 0, self.num_keys, axis=-1)
        return x


WHOLE = (Part(),)


def causal_parts(query, key, most):
    """Returns the parts in which queries attend under a causal mask.

    Four parts save three quarters of the masked products; more would be too small.

    Args:
        query: `<float>[..., queries, key_dim]`.
        key: `<float>[..., keys, key_dim]`. The last query sees all keys, and each
            earlier query one key less.
        most: number of parts, if possible; otherwise 2 or 1.
    """
    number, num_queries, num_keys = 1, query.shape[-2], key.shape[-2]
    if None in (num_queries, num_keys):
        num_queries, num_keys = ops.shape(query)[-2], ops.shape(key)[-2]
    elif num_keys >= num_queries:
        for fitting in (2, most):
            if num_queries % fitting == 0 and num_queries // fitting >= MIN_PART_SIZE:
                number = fitting
    if number == 1:
        return (Part(causal_mask=causal_mask(num_queries, num_keys)),)
    size, earlier = num_queries // number, num_keys - num_queries
    parts = []
    for start in range(0, num_queries, size):
        stop, end = start + size, earlier + start + size
        parts.append(Part(start, stop, end, causal_mask(size, end)))
    return tuple(parts)


def cut(parts, of_queries, of_keys):
    """Cuts tensors of queries `[..., queries, .]` and of keys `[..., keys, .]`.

    Returns a pair of lists for each part.
    """
    if len(parts) == 1:
        return [(of_queries, of_keys)]
    return [
        (
            [cut_axis(x, part.start, part.stop, axis=-2) for x in of_queries],
            [cut_axis(x, 0, part.num_keys, axis=-2) for x in of_keys],
        )
        for part in parts
    ]


def joined(outputs, axis=-2):
    """Joins the outputs of parts along the queries."""
    return outputs[0] if len(outputs) == 1 else ops.concatenate(outputs, axis=axis)


def sum_of_prefixes(tensors):
    """Adds tensors of the keys of parts, `[..., keys, .]`, the last of all keys."""
    *shorter, total = tensors
    for x in shorter:
        missing = [(0, 0)] * len(x.shape)
        missing[-2] = (0, total.shape[-2] - x.shape[-2])
        total = total + ops.pad(x, missing)
    return total


def num_pieces(query, key, value, pairs):
    """Returns the number of pieces in which attention is fastest; 1 for no pieces.

    A CPU reads logits several times: from memory if there are many, and from its caches
    if they come in pieces.

    Args:
        query: `<float>[..., queries, key_dim]`.
        key: `<float>[..., keys, key_dim]`.
        value: `<float>[..., keys, value_dim]`.
        pairs: tensors broadcastable to `[..., queries, keys]`, or None.
    """
    *leading, num_queries, _ = query.shape
    sizes = (*leading, num_queries, key.shape[-2])
    # Several devices share the sequences of a batch, which pieces would mix.
    if not is_known(*sizes) or math.prod(sizes) <= PIECE_SIZE:
        return 1
    if not is_on_one_cpu():
        return 1
    pairs = [x for x in pairs if x is not None]
    if not all(is_known(*x.shape) for x in (query, key, value, *pairs)):
        return 1
    if any(list(x.shape[:-2]) != leading for x in (key, value)):
        return 1
    if not all(is_broadcastable(x.shape[:-2], leading) for x in pairs):
        return 1
    count, size = math.prod(leading), math.prod(sizes)
    # Axes of sequences, heads and blocks become one, so what has some will have all.
    grown = [count * math.prod(x.shape[-2:]) for x in pairs if _has_some_of(x, leading)]
    if max(grown, default=0) > PIECE_SIZE:
        return 1
    numbers = [n for n in range(2, min(count, MAX_PIECES) + 1) if count % n == 0]
    enough = [n for n in numbers if size <= n * PIECE_SIZE]
    return min(enough, default=max(numbers, default=1))


def in_pieces(attend, number, query, *others):
    """Attends piece by piece, which gives the same results.

    `attend` takes `query` and `others`, which may be None, and returns a tensor or a
    tuple of tensors with their leading axes.
    """
    leading = query.shape[:-2]
    pieces = zip(*(_cut(x, leading, number) for x in (query, *others)), strict=True)
    outputs = [attend(*piece) for piece in pieces]
    if isinstance(outputs[0], tuple):
        return tuple(_joined(x, leading) for x in zip(*outputs, strict=True))
    return _joined(outputs, leading)


def _leading(x, rank):
    """Returns the axes of a tensor except the last two, extended to `rank` axes."""
    own = list(x.shape[:-2])
    return [1] * (rank - len(own)) + own


def _has_some_of(x, leading):
    """Whether something differs along some of the leading axes, and not along all."""
    own = _leading(x, len(leading))
    return own != list(leading) and math.prod(own) > 1


def _cut(x, leading, number):
    """Returns the pieces of a tensor broadcastable to `[*leading, ., .]`, or None."""
    if x is None:
        return [None] * number
    shape, count = x.shape[-2:], math.prod(leading)
    if math.prod(_leading(x, len(leading))) == 1:
        return [ops.reshape(x, shape)] * number
    if _has_some_of(x, leading):
        x = ops.broadcast_to(x, (*leading, *shape))
    # TensorFlow cuts the first axis without a copy.
    merged = ops.reshape(x, (count, *shape))
    return split_axis(merged, [count // number] * number, axis=0)


def _joined(pieces, leading):
    joined = ops.concatenate(pieces, axis=0)
    return ops.reshape(joined, (*leading, *joined.shape[1:]))


def softmax(logits):
    """Returns the softmax over the last axis, also if its length is 1."""
    # Keras would warn about a single key, whose weight is 1 and whose gradient is 0.
    return ops.exp(logits - logits) if logits.shape[-1] == 1 else ops.softmax(logits)


def can_attend(query, key, value, bias=None):
    """Returns whether `softmax_attention` can take these tensors.

    It does not sum gradients over broadcast axes, and does not convert tensors.
    """
    leading = query.shape[:-2]
    if not leading or key.shape[:-2] != leading or value.shape[:-2] != leading:
        return False
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return False
    logits = (*query.shape[:-1], key.shape[-2])
    return bias is None or is_broadcastable(bias.shape, logits)


def softmax_attention(query, key, value, bias=None, parts=WHOLE, keeps_weights=True):
    """Attends, with a gradient of its own.

    The derivative of a softmax subtracts the weighted mean from the gradient of a
    query's weights. This mean is also the product of the query's output and the
    output's gradient, which are rows as long as a value instead of as long as the keys
    (Dao et al., "FlashAttention", https://arxiv.org/abs/2205.14135, appendix B.2).

    Args:
        query: `<float>[..., queries, key_dim]`.
        key: `<float>[..., keys, key_dim]`, with the same leading axes.
        value: `<float>[..., keys, value_dim]`, with the same leading axes.
        bias: `<float>`, broadcastable to `[..., queries, keys]`, added to the logits,
            without a gradient; None (the default) for none.
        parts: the `Part`s of the queries, for the value and for the gradient. Defaults
            to all of them at once.
        keeps_weights: whether the gradient finds the weights of pairs in memory (the
            default), or computes them again. In eager mode, the tape of TensorFlow
            still stores them.

    Returns:
        `<float>[..., queries, value_dim]`.
    """
    causal = [part.causal_mask for part in parts if part.causal_mask is not None]
    biases = [] if bias is None else [bias]
    biases += [causal_mask_as_bias(query.dtype, mask) for mask in causal]

    def weights_of(cuts, biases):
        """Returns the weights of each part, `<float>[..., queries, keys]`."""
        biases, own, weights = list(biases), None, []
        if bias is not None:
            own = biases.pop(0)
        for part, ((query, *_), (key, _)) in zip(parts, cuts, strict=True):
            logits = product(query, key, transpose_y=True)
            if own is not None:
                logits = logits + (own if len(parts) == 1 else part.pairs(own))
            if part.causal_mask is not None:
                logits = logits + biases.pop(0)
            weights.append(softmax(logits))
        return weights

    # Biases are arguments, although they have no gradients, because JAX may not close
    # over them.
    @stated_gradient
    def attend(query, key, value, *biases):
        cuts = cut(parts, [query], [key, value])
        kept = weights_of(cuts, biases)
        outputs = [product(w, x) for w, (_, (_, x)) in zip(kept, cuts, strict=True)]
        output = outputs[0] if len(parts) == 1 else joined(outputs)

        def gradient(upstream):
            # Half precision would lose too much.
            dtype = keras.backend.result_type(output.dtype, "float32")
            along = ops.cast(output, dtype) * ops.cast(upstream, dtype)
            mean = ops.cast(ops.sum(along, axis=-1, keepdims=True), output.dtype)
            own, again = (query, key, value), biases
            if not keeps_weights:
                own = computed_after(upstream, *own, *biases)
                own, again = own[:3], own[3:]
            cuts = cut(parts, [own[0], upstream, mean], own[1:])
            weights = kept if keeps_weights else weights_of(cuts, again)
            found = [_gradients(w, *x, *y) for w, (x, y) in zip(weights, cuts)]
            of_query, of_key, of_value = zip(*found, strict=True)
            return (
                joined(of_query),
                sum_of_prefixes(of_key),
                sum_of_prefixes(of_value),
                *(ops.zeros_like(bias) for bias in biases),
            )

        return output, gradient

    return attend(query, key, value, *biases)


def _gradients(weights, query, upstream, mean, key, value):
    """Returns the gradients of queries, keys and values of one part."""
    of_weights = product(upstream, value, transpose_y=True)
    of_logits = weights * (of_weights - mean)
    return (
        product(of_logits, key),
        product(of_logits, query, transpose_x=True),
        product(weights, upstream, transpose_x=True),
    )
