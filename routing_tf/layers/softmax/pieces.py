"""Attention in pieces whose logits stay in the caches of a CPU."""

import math

from keras import ops

from routing_tf.layers.support.backends import is_on_one_cpu
from routing_tf.layers.support.tensors import is_broadcastable
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import split_axis

# Number of logits of a piece: with their gradients they fit into a cache of a few MiB.
PIECE_SIZE = 1 << 21
# Tracing more pieces takes longer than they save.
MAX_PIECES = 16


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
