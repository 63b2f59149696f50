"""Reads of whole clusters, in as many turns as needed, and their pairs in a cache.

Letters: B batch, G key heads, Q reads, R queries, P clusters that a query reads, N
chunks of reads, C slots of such a chunk, X places, K clusters, M chunks of keys, S
slots of those, E size of a row, D dim.
"""

import math

from keras import ops

from routing_tf.layers.caches import rows
from routing_tf.layers.routing.arrangements import ClusterReads
from routing_tf.layers.routing.cluster_order import ClusterOrder
from routing_tf.layers.routing.cluster_order import inverse
from routing_tf.layers.routing.far_field import HIDDEN
from routing_tf.layers.support import backends
from routing_tf.layers.support import tensors
from routing_tf.layers.support.backends import stated_gradient
from routing_tf.layers.support.tensors import cut_axis
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import num_parts
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product

CHUNK_SIZE = 64
#: Names of what says which pairs clusters have.
ORDER = ("clusters", "chunks", "first_chunk")

# A window whose chunks have 64 slots.
WINDOW = 256
# How often chunks of reads are cut.
MOST_PARTS = 16


def attend_to_clusters(group, query, members, clusters, ends, counts):
    """Attends with each read to the last pairs of a cluster, however many they are.

    A turn compares the queries of each chunk with one chunk of keys, from the last one
    of their cluster back to the first. No turn is remembered: the gradient takes them
    again.

    Args:
        group: the heads.
        query: `<float32>[B, G, Q, D]`.
        members: `Members`.
        clusters: `<int32>[B, G, Q]`.
        ends: `<int32>[B, G, Q]`, the rank after the last pair that is read.
        counts: `<int32>[B, G, Q]`, how many are read.

    Returns:
        `<float32>[B, G, Q, D]`, and the logarithms of the sums of exponentials,
        `<float32>[B, G, Q]`, hidden where nothing is read.
    """
    found = ClusterReads(
        members.clusters, group.num_clusters + 1, clusters, ends, counts > 0, WINDOW
    )
    bias = members.bias
    bias = ops.zeros_like(members.key[..., 0]) if bias is None else bias
    query = found.order.arrange(query)
    pairs = [found.keys.arrange(x) for x in (members.key, members.value)]
    pairs.append(found.keys.arrange(bias[..., None]))
    rank = tensors.entries_at(found.keys.rank_of_chunk, found.last)
    ends, counts = found.of_queries(ends), found.of_queries(counts)
    # Reads of nothing stand together, and take no turn.
    rank = ops.where(ops.any(counts > 0, axis=-1), rank, -1)
    # Those that need most turns come first, and parts take no more than they need.
    order = ops.cast(ops.argsort(-rank, axis=-1), "int32")
    places = [tensors.entries_at(x, order) for x in (found.last, rank)]
    places += [tensors.gather_blocks(x, order) for x in (ends - counts, ends)]
    query = tensors.gather_blocks(query, order)
    results = [
        _Turns(group, *places).attend(query, *pairs)
        for query, *places in zip(*(_parts(x) for x in (query, *places)))
    ]
    places = ops.broadcast_to(numbers(length_of(order, 2)), ops.shape(order))
    back = inverse(order, places)
    result = tensors.gather_blocks(ops.concatenate(results, axis=2), back)
    result = found.order.restore(result)
    return result[..., :-1], result[..., -1]


def _parts(x):
    """Cuts `[B, G, N, ...]` into parts; into one if N is unknown."""
    number = x.shape[2]
    if number is None:
        return [x]
    size = -(-number // MOST_PARTS)
    return [
        cut_axis(x, first, min(first + size, number), axis=2)
        for first in range(0, number, size)
    ]


class _Turns:
    """Attention of chunks of queries, turn by turn.

    Args:
        group: the heads.
        last: `<int32>[B, G, N]`, the chunk of keys of the first turn.
        rank: `<int32>[B, G, N]`, how many chunks of its cluster come before it.
        first: `<int32>[B, G, N, C]`, rank of the first pair that a query sees.
        ends: `<int32>[B, G, N, C]`, the rank after the last one.
    """

    def __init__(self, group, last, rank, first, ends):
        self._cap = group.logit_soft_cap
        self._places = last, rank, first, ends

    def attend(self, query, key, value, bias):
        """Returns outputs and, in the last column, logarithms of sums.

        The queries are `[B, G, N, C, D]`, and the keys `[B, G, M, S, D]`.
        """

        @stated_gradient
        def attend(query, key, value, bias, *places):
            operands = query, key, value, bias
            result = self._forward(operands, places)

            def gradient(upstream):
                found = self._backward(operands, places, result, upstream)
                return *found, *[None] * len(places)

            return result, gradient

        return attend(query, key, value, bias, *self._places)

    def _turn(self, turn, operands, places):
        """Returns logits, what they come from, and where chunks of keys stand."""
        last, rank, first, ends = places
        query, *pairs = operands
        chunk = ops.maximum(last - turn, 0)
        key, value, bias = (tensors.gather_blocks(x, chunk) for x in pairs)
        size = key.shape[3]
        ranks = ((rank - turn) * size)[..., None, None] + numbers(size)
        visible = ops.logical_and(ranks >= first[..., None], ranks < ends[..., None])
        visible = ops.logical_and(visible, (rank >= turn)[..., None, None])
        logits = product(query, key, transpose_y=True)
        slope = None
        if self._cap is not None:
            capped = ops.tanh(logits / self._cap)
            logits, slope = capped * self._cap, 1 - ops.square(capped)
        logits = logits + ops.swapaxes(bias, -1, -2)
        return ops.where(visible, logits, HIDDEN), slope, key, value, chunk

    def _loop(self, body, state, places):
        most = tensors.largest(places[1]) + 1
        start = ops.zeros((), "int32")
        return ops.while_loop(
            lambda turn, *_: turn < most,
            lambda turn, *state: (turn + 1, *body(turn, *state)),
            (start, *state),
        )[1:]

    def _forward(self, operands, places):
        query, _, value, _ = operands

        def turn(number, *state):
            logits, _, _, value, _ = self._turn(number, operands, places)
            return next_turn(state, logits, value)

        state = self._loop(turn, before_turns(query, value.shape[-1]), places)
        return ops.concatenate(after_turns(*state), axis=-1)

    def _backward(self, operands, places, result, upstream):
        query, *pairs = operands
        output, sums = result[..., :-1], result[..., -1:]
        of_output, of_sums = upstream[..., :-1], upstream[..., -1:]
        mean = ops.sum(of_output * output, axis=-1, keepdims=True) - of_sums

        def turn(number, of_query, *of_pairs):
            logits, slope, key, value, chunk = self._turn(number, operands, places)
            seen = logits > HIDDEN / 2
            weights = ops.where(seen, ops.exp(logits - sums), 0.0)
            of_logits = product(of_output, value, transpose_y=True) - mean
            of_logits = of_bias = weights * of_logits
            if slope is not None:
                of_logits = of_logits * slope
            of_query = of_query + product(of_logits, key)
            found = (
                product(of_logits, query, transpose_x=True),
                product(weights, of_output, transpose_x=True),
                ops.sum(of_bias, axis=-2)[..., None],
            )
            added = [_added(x, y, chunk) for x, y in zip(of_pairs, found)]
            return of_query, *added

        return self._loop(turn, [ops.zeros_like(x) for x in operands], places)


def before_turns(query, value_dim):
    """Returns the largest logit, the sum and the output before a softmax begins."""
    zero = ops.zeros_like(query[..., :1])
    return zero + HIDDEN, zero, zero * ops.zeros((1, value_dim), "float32")


def next_turn(state, logits, value):
    """Returns the state after more logits, which are hidden where nothing is seen.

    Args:
        state: as `before_turns` returns it.
        logits: `<float32>[..., queries, keys]`.
        value: `<float32>[..., keys, value_dim]`.
    """
    largest, total, output = state
    own = tensors.largest(logits, axis=-1, keepdims=True)
    own = ops.maximum(own, largest)
    scale = ops.exp(largest - own)
    weights = ops.where(logits > HIDDEN / 2, ops.exp(logits - own), 0.0)
    total = total * scale + ops.sum(weights, axis=-1, keepdims=True)
    return own, total, output * scale + product(weights, value)


def after_turns(largest, total, output):
    """Returns outputs, and logarithms of the sums `<float32>[..., queries, 1]`."""
    seen = total > 0
    total = ops.where(seen, total, 1.0)
    return output / total, ops.log(total) + ops.where(seen, largest, HIDDEN)


def _added(x, rows, places):
    """Adds `[B, G, N, ...]` to `[B, G, M, ...]` at places `<int32>[B, G, N]`."""
    batch, heads, number, *rest = ops.shape(x)
    flat = tensors.flat_positions(places, number)
    rows = ops.reshape(rows, (-1, math.prod(rest)))
    added = backends.segment_sum(rows, flat, num_segments=batch * heads * number)
    return x + ops.reshape(added, ops.shape(x))


def make(group, shape, max_length):
    """Returns the dict of empty places for pairs; `shape` is `(batch, key heads)`."""
    none = group.num_clusters
    clusters = ops.full((*shape, max_length), none, dtype="int32")
    return {
        "rows": rows.empty_rows(group, *shape, max_length),
        "token_clusters": clusters,
        **_order(group, clusters),
    }


def written(cache, index, x, clusters):
    """Returns the cache with rows `[B, G, T, E]` from place `index` on.

    `clusters` are `<int32>[B, G, T]`, those that they will be in.
    """
    places = (0, 0, index)
    return {
        "rows": ops.slice_update(cache["rows"], (*places, 0), x),
        "token_clusters": ops.slice_update(cache["token_clusters"], places, clusters),
    }


def ordered(group, parts, is_in):
    """Returns the order of the pairs that `is_in` `<bool>[B, G, X]` says."""
    clusters = ops.where(is_in, parts["token_clusters"], group.num_clusters)
    return _order(group, clusters)


def _order(group, clusters):
    order = ClusterOrder(clusters, group.num_clusters + 1, CHUNK_SIZE)
    return {
        "clusters": clusters,
        "chunks": order.tokens,
        "first_chunk": order.first_chunk[..., :-1],
    }


def attend(group, cache, query, choice):
    """Attends with a few queries to all pairs of the clusters that they choose.

    Args:
        group: the `MultipoleHeads`.
        cache: as returned by `make`.
        query: `<float32>[B, G, 1, R, D]`.
        choice: `Choice`.

    Returns:
        `<float32>[B, G, 1, R, P, D]`, and the logarithms of the sums of exponentials,
        `<float32>[B, G, 1, R, P]`, hidden where nothing is read.
    """
    clusters, counts = choice.clusters[:, :, 0], choice.counts[:, :, 0]
    first = tensors.entries_at(cache["first_chunk"], clusters)
    last_chunk = cache["chunks"].shape[2] - 1
    query = query[:, :, 0, :, None, None, :]
    query = ops.broadcast_to(query, (*ops.shape(clusters), 1, query.shape[-1]))

    def turn(place, *state):
        chunk = ops.minimum(first + place, last_chunk)
        tokens = tensors.gather_blocks(cache["chunks"], chunk)
        x = tensors.gather(cache["rows"], tokens)
        key, value, bias, _ = rows.split_rows(group, ops.cast(x, "float32"))
        logits = group.capped(product(query, key, transpose_y=True))
        ranks = place * CHUNK_SIZE + numbers(CHUNK_SIZE)
        is_there = (ranks < counts[..., None])[..., None, :]
        logits = ops.where(is_there, logits + bias[..., None, :], HIDDEN)
        return place + 1, *next_turn(state, logits, value)

    most = tensors.largest(num_parts(counts, CHUNK_SIZE))
    state = ops.zeros((), "int32"), *before_turns(query, group.value_dim)
    _, *state = ops.while_loop(lambda place, *_: place < most, turn, state)
    output, sums = after_turns(*state)
    return output[:, :, None, ..., 0, :], sums[:, :, None, ..., 0, 0]
