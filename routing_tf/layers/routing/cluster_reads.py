"""What queries read of the clusters that they choose.

Letters: B batch, G key heads, N blocks, R queries of a block, P clusters that a query
reads, Q reads of all queries, M chunks of reads, C slots of a chunk, S keys that a
chunk reads, X pairs, D dim.
"""

import dataclasses
from typing import Any

from keras import ops

from routing_tf.layers.routing.arrangements import ClusterReads
from routing_tf.layers.routing.far_field import HIDDEN
from routing_tf.layers.routing.whole_clusters import attend_to_clusters
from routing_tf.layers.support import tensors
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import product


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Members:
    """Pairs in order of position, `[B, G, X, ...]`, with their clusters.

    Pairs in no cluster have the number of clusters.
    """

    clusters: Any
    key: Any
    value: Any
    bias: Any = None


class _Reads:
    """The reads of a rule; subclasses say where their pairs stand.

    Attributes:
        numbers: `<int32>[B, G, N, R, P]`, how many pairs are read.
        sums: `<float32>[B, G, N, R, P]`, of their logits, without bias and soft cap.
        biases: the same for biases; None without any.
        largest: the largest logit of each read; hidden where there is none.
    """

    def __init__(self, group, query, key, value, bias, visible, numbers):
        self.numbers, self._value, is_read = numbers, value, visible
        self._visible = visible = ops.cast(visible, "float32")
        logits = product(query, key, transpose_y=True)
        self.sums = self._of_queries(ops.sum(logits * visible, axis=-1))
        logits, self.biases = group.capped(logits), None
        if bias is not None:
            logits = logits + bias
            self.biases = self._of_queries(ops.sum(visible * bias, axis=-1))
        self._logits = ops.where(is_read, logits, HIDDEN)
        largest = tensors.largest(ops.stop_gradient(self._logits), axis=-1)
        self.largest = self._of_queries(largest)

    def weights(self, largest):
        """Returns exponentials of logits less `largest`, `<float32>[B, G, N, R, 1]`."""
        return ops.exp(self._logits - self._of_reads(largest)[..., None])

    def totals(self, weights):
        """Returns the sums of the weights of each read, `[B, G, N, R, P]`."""
        return self._of_queries(ops.sum(weights, axis=-1))

    def output(self, weights, shares):
        """Returns sums of values over all reads; `shares` is taken from each weight."""
        less = self._visible * self._of_reads(shares)[..., None]
        return self._summed(product(weights - less, self._value))


class SortedReads(_Reads):
    """Reads of many queries, in chunks of the order of clusters.

    Args:
        group: the heads.
        query: `<float32>[B, G, N, R, D]`.
        members: `Members` that they may read.
        choice: `Choice`.
        ends: `<int32>[B, G, N, R, P]`, the rank in its cluster, among the members,
            after the last pair that is read.
        numbers: `<int32>[B, G, N, R, P]`, how many pairs are read.
        window: how many these are at most.
    """

    def __init__(self, group, query, members, choice, ends, numbers, window):
        self._shape = batch, heads, blocks, rows, number = ops.shape(numbers)
        self._length = blocks * rows * number
        flat = (batch, heads, self._length)
        ends, count = ops.reshape(ends, flat), ops.reshape(numbers, flat)
        self._found = found = ClusterReads(
            members.clusters,
            group.num_clusters + 1,
            ops.reshape(choice.clusters, flat),
            ends,
            count > 0,
            window,
            leaves_out=True,
        )
        # Empty slots see nothing: their weights could overflow, and 0 * inf is NaN.
        ends = ops.where(found.order.is_filled, found.of_queries(ends), 0)
        ranks, ends = found.ranks(), ends[..., None]
        first = ends - found.of_queries(count)[..., None]
        visible = ops.logical_and(ranks < ends, ranks >= first)
        visible = ops.logical_and(visible, ranks >= 0)
        query = found.order.arrange(_for_each_read(query, number))
        key, value, bias = found.read(members.key), found.read(members.value), None
        if members.bias is not None:
            bias = ops.swapaxes(found.read(members.bias[..., None]), -1, -2)
        super().__init__(group, query, key, value, bias, visible, numbers)

    def _of_queries(self, x):
        """From `[B, G, M, C]` to `[B, G, N, R, P]`."""
        x = self._found.order.restore(x[..., None])
        return ops.reshape(x, self._shape)

    def _of_reads(self, x):
        """From `[B, G, N, R, P]` (or 1 for P) to `[B, G, M, C]`."""
        x = ops.broadcast_to(x, self._shape)
        x = ops.reshape(x, (*self._shape[:2], self._length, 1))
        return self._found.order.arrange(x)[..., 0]

    def _summed(self, x):
        """From `[B, G, M, C, D]` to `[B, G, N, R, D]`."""
        x = self._found.order.restore(x)
        return ops.sum(ops.reshape(x, (*self._shape, length_of(x, -1))), axis=-2)


def _for_each_read(query, number):
    """From queries `[B, G, N, R, D]` to reads, `[B, G, Q, D]`: `number` of each."""
    batch, heads, blocks, rows, dim = ops.shape(query)
    query = query[..., None, :] + ops.zeros((number, 1), query.dtype)
    return ops.reshape(query, (batch, heads, blocks * rows * number, dim))


class WholeReads:
    """Reads of all pairs of the chosen clusters, of which nothing stays unread.

    Args:
        numbers: as in `_Reads`.
        output: `<float32>[B, G, N, R, P, D]`, what attention to each cluster returns.
        largest: `<float32>[B, G, N, R, P]`, the logarithms of its sums of exponentials.
    """

    #: Means of unread pairs, of which there are none, need no sums.
    sums = biases = 0.0

    def __init__(self, numbers, output, largest):
        self.numbers, self._output, self.largest = numbers, output, largest

    @classmethod
    def of_members(cls, group, query, members, choice, ends, numbers):
        """Returns the reads of many queries, see `SortedReads`."""
        batch, heads, blocks, rows, number = shape = ops.shape(numbers)
        flat = (batch, heads, blocks * rows * number)
        query = _for_each_read(query, number)
        reads = (ops.reshape(x, flat) for x in (choice.clusters, ends, numbers))
        output, largest = attend_to_clusters(group, query, members, *reads)
        output = ops.reshape(output, (*shape, ops.shape(output)[-1]))
        return cls(numbers, output, ops.reshape(largest, shape))

    def weights(self, largest):
        """Returns the sums of exponentials of logits less `largest`."""
        return ops.exp(self.largest - largest)

    def totals(self, weights):
        return weights

    def output(self, weights, shares):
        return ops.sum(weights[..., None] * self._output, axis=-2)


class ReadsOfTwo:
    """Two reads of each chosen cluster, with the attributes and methods of one."""

    def __init__(self, *reads):
        self._reads = reads
        self.numbers, self.sums = (
            sum(getattr(x, name) for x in reads) for name in ("numbers", "sums")
        )
        self.biases = None
        if reads[0].biases is not None:
            self.biases = sum(x.biases for x in reads)
        self.largest = ops.maximum(*(x.largest for x in reads))

    def weights(self, largest):
        return [x.weights(largest) for x in self._reads]

    def totals(self, weights):
        return sum(x.totals(own) for x, own in zip(self._reads, weights))

    def output(self, weights, shares):
        return sum(x.output(own, shares) for x, own in zip(self._reads, weights))


class GatheredReads(_Reads):
    """Reads of a few queries, which copy what they read.

    S is the number of pairs that a query reads of all clusters together.

    Args:
        group: the heads.
        query: `<float32>[B, G, 1, R, D]`.
        key: `<float32>[B, G, 1, R, S, D]`, and values likewise.
        value: see `key`.
        bias: `<float32>[B, G, 1, R, S]`.
        visible: `<bool>[B, G, 1, R, P, S]`, which pairs are read of each cluster.
        numbers: as in `_Reads`.
    """

    def __init__(self, group, query, key, value, bias, visible, numbers):
        query, bias = query[..., None, :], bias[..., None, :]
        super().__init__(group, query, key, value, bias, visible, numbers)

    def _of_queries(self, x):
        return x

    def _of_reads(self, x):
        return x

    def _summed(self, x):
        return ops.sum(x, axis=-2)
