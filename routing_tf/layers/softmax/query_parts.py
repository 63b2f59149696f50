"""What attention weighs, and how it is cut under a causal mask."""

import dataclasses
import math
from typing import Any

from keras import ops

from routing_tf.layers.support.backends import is_on_one_cpu
from routing_tf.layers.support.masks import causal_mask
from routing_tf.layers.support.tensors import cut_axis
from routing_tf.layers.support.tensors import is_broadcastable
from routing_tf.layers.support.tensors import is_known
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
