"""The far field of multipole heads: sums of clusters, the choice, and one softmax.

Letters: B batch, G key heads, N blocks, R queries of a block, K clusters, P clusters
that a query reads, Y pairs, D dim.
"""

import dataclasses
from typing import Any

import keras
from keras import ops

from routing_tf.layers.support import backends
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product

HIDDEN = large_negative("float32")
# Masses nearly tie up to this share of the largest one (of 1 where that is less). It
# exceeds what rounding makes of equal ones, which depends on the order of sums.
NEAR_TIE = 1e-5


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Table:
    """Sums over pairs, by cluster.

    Args:
        keys: `<float32>[B, G, N, K, D]`, sums of keys.
        values: the same of values.
        counts: `<float32>[B, G, N, K]`, numbers of pairs.
        biases: the same for sums of biases; None (the default) without any.
        is_own: `<float32>[B, 1, N, R, 1]`, 0 for queries that do not see these pairs;
            None (the default) for none.
    """

    keys: Any
    values: Any
    counts: Any
    biases: Any = None
    is_own: Any = None

    def __add__(self, other):
        """Returns the sums over the pairs of two tables."""
        biases = None if self.biases is None else self.biases + other.biases
        counts = self.counts + other.counts
        return Table(self.keys + other.keys, self.values + other.values, counts, biases)

    def seen_by(self, query):
        """Returns sums of logits, numbers of pairs, and sums of biases or None.

        They are `<float32>`, broadcastable to `[B, G, N, R, K]`.
        """
        logits = product(query, self.keys, transpose_y=True)
        found = [
            None if x is None else x[..., None, :] for x in (self.counts, self.biases)
        ]
        found = logits, *found
        if self.is_own is None:
            return found
        return [None if x is None else x * self.is_own for x in found]

    def output(self, weights):
        """Returns sums of values, for weights of pairs `<float32>[B, G, N, R, K]`."""
        weights = weights if self.is_own is None else weights * self.is_own
        return product(weights, self.values)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Poles:
    """What queries know of the pairs of each cluster that are not near.

    Args:
        logits: `<float32>[B, G, N, R, K]`, sums of the logits of all pairs, without
            their biases and a soft cap.
        counts: `<float32>`, broadcastable to that, how many pairs.
        biases: the same for the sums of their biases; None without any.
        tables: list of the `Table`s of pairs that are not in windows.
    """

    logits: Any
    counts: Any
    biases: Any
    tables: Any

    def means(self, group, logits=None, counts=None, biases=None):
        """Returns mean logits, `<float32>[B, G, N, R, K]`; hidden in empty clusters.

        Sums, counts and biases are those of all pairs unless `logits` is given.
        """
        if logits is None:
            logits, counts, biases = self.logits, self.counts, self.biases
        share = 1.0 / ops.maximum(counts, 1.0)
        means = group.capped(logits * share)
        if biases is not None:
            means = means + biases * share
        return means + ops.where(counts > 0, 0.0, HIDDEN)

    def output(self, weights):
        """Returns sums of the values in tables, see `Table.output`."""
        return sum(table.output(weights) for table in self.tables)


class Choice:
    """The clusters that each query reads: those that may hold the most mass.

    Of masses that nearly tie, the lower number goes first.

    Args:
        means: as `Poles.means` returns them.
        counts: as in `Poles`.
        number: how many clusters P a query reads.
        scores: `<float32>[B, G, N, R, K]`, which then take the place of masses; None
            (the default) for masses.

    Attributes:
        clusters: `<int32>[B, G, N, R, P]`.
        counts: `<int32>[B, G, N, R, P]`, numbers of their pairs; 0 where there is no
            cluster left that has one.
    """

    def __init__(self, means, counts, number, scores=None):
        if scores is None:
            masses = ops.stop_gradient(means) + ops.log(ops.maximum(counts, 1.0))
        else:
            hidden = ops.where(counts > 0, 0.0, HIDDEN)
            masses = ops.stop_gradient(scores) + hidden
        self._num_clusters, clusters = masses.shape[-1], []
        for place in range(number):
            best = tensors.largest(masses, axis=-1, keepdims=True)
            near_tie = NEAR_TIE * ops.maximum(1.0, ops.abs(best))
            is_best = ops.cast(masses >= best - near_tie, "float32")
            cluster = tensors.place_of_largest(is_best)
            clusters.append(cluster)
            if place < number - 1:
                own = backends.one_hot(cluster, self._num_clusters, "float32")
                # Below those of empty clusters.
                masses = masses + own * (2 * HIDDEN)
        self.clusters = ops.stack(clusters, axis=-1)
        self.counts = ops.cast(self.of_chosen(counts), "int32")

    def of_chosen(self, x):
        """Returns what chosen clusters have, `[B, G, N, R, P]`, of what all have."""
        x = ops.broadcast_to(x, (*ops.shape(self.clusters)[:-1], self._num_clusters))
        found = ops.take(ops.reshape(x, (-1,)), self._places(), axis=0)
        return ops.reshape(found, ops.shape(self.clusters))

    def replaced(self, x, values):
        """Returns `[B, G, N, R, K]` with `[B, G, N, R, P]` at the chosen clusters."""
        flat, values = ops.reshape(x, (-1,)), ops.reshape(values, (-1,))
        flat = ops.scatter_update(flat, self._places()[:, None], values)
        return ops.reshape(flat, ops.shape(x))

    def _places(self):
        """Returns where chosen clusters stand among those of all queries."""
        clusters = ops.reshape(self.clusters, (-1, self.clusters.shape[-1]))
        first = numbers(length_of(clusters, 0))[:, None] * self._num_clusters
        return ops.reshape(clusters + first, (-1,))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Near:
    """Pairs that are near the queries of a block, and others that stand among them.

    Args:
        logits: `<float32>[B, G, N, R, Y]`, hidden where a pair is not near.
        value: `<float>[B, G, N, Y, D]`, or with 1 for N, for all blocks.
        flushed: `<float32>`, broadcastable to `logits`, 1 for a pair that is in its
            cluster, though in no `Table`; None (the default) for none.
        clusters: `<float32>[B, G, N, Y, K]`, one-hot, zero for pairs in none; None (the
            default) with `flushed` None.
    """

    logits: Any
    value: Any
    flushed: Any = None
    clusters: Any = None

    def output(self, weights, of_poles=None):
        """Returns sums of values, `<float32>[B, G, N, R, D]`.

        `of_poles` has the weights of pairs of clusters, `<float32>[B, G, N, R, K]`.
        """
        if self.flushed is not None:
            shares = product(of_poles, self.clusters, transpose_y=True)
            weights = weights + self.flushed * shares
        weights = ops.cast(weights, self.value.dtype)
        return ops.cast(of_all_blocks(weights, self.value), "float32")


def of_all_blocks(x, y, transpose_y=False):
    """Returns products of `[B, G, N, R, .]` with matrices of each block, or of all."""
    if x.shape[2] == y.shape[2]:
        return product(x, y, transpose_y=transpose_y)
    batch, heads, number, rows, size = ops.shape(x)
    x = ops.reshape(x, (batch, heads, 1, number * rows, size))
    x = product(x, y, transpose_y=transpose_y)
    return ops.reshape(x, (batch, heads, number, rows, ops.shape(x)[-1]))


class OneSoftmax:
    """The softmax over near pairs, pairs of chosen clusters, and means of the rest.

    A cluster's mean has the weight of all its pairs that are not read. Sums of these
    pairs are those of all pairs less those of read ones, so a read pair has the weight
    of its own less that of an unread one, and the sums are never taken apart.

    Args:
        group: the `MultipoleHeads`.
        near: list of `Near`.
        poles: `Poles`; None (the default) where all pairs are near.
        reads_of: function of a `Choice` that returns how its clusters are read, see
            `cluster_reads`; None (the default) likewise.
        scores: as of `Choice`.
    """

    def __init__(self, group, near, poles=None, reads_of=None, scores=None):
        self._group, self._near, self._poles = group, near, poles
        largest = [tensors.largest(each.logits, axis=-1) for each in near]
        if poles is not None:
            means = poles.means(group)
            choice = Choice(means, poles.counts, group.clusters_per_query, scores)
            self._choice, self._reads = choice, reads_of(choice)
            of_chosen = self._of_unread()
            means = choice.replaced(means, of_chosen)
            if not group.summaries:
                means = ops.full_like(means, HIDDEN)
                of_chosen = ops.full_like(of_chosen, HIDDEN)
            largest.append(tensors.largest(means, axis=-1))
            largest.append(tensors.largest(self._reads.largest, axis=-1))
        if group.sink_logits:
            sink = group.sinks_of_rows(near[0].logits.shape[-2])
            largest.append(sink)
        # Where nothing is seen, nothing has weight.
        most = ops.full_like(largest[0], HIDDEN / 4)
        for x in largest:
            most = ops.maximum(most, ops.stop_gradient(x))
        most = most[..., None]
        self._of_near = [ops.exp(each.logits - most) for each in near]
        self._total = sum(ops.sum(x, axis=-1) for x in self._of_near)
        if poles is not None:
            self._of_reads = self._reads.weights(most)
            self._of_poles = ops.exp(means - most)
            of_chosen = ops.exp(of_chosen - most)
            num_read = ops.cast(self._reads.numbers, "float32")
            self._total = self._total + (
                ops.sum(self._of_poles * poles.counts, axis=-1)
                + ops.sum(self._reads.totals(self._of_reads), axis=-1)
                - ops.sum(of_chosen * num_read, axis=-1)
            )
        if group.sink_logits:
            self._total = self._total + ops.exp(sink - most[..., 0])

    def _of_unread(self):
        """Returns mean logits of pairs of chosen clusters that are not read."""
        poles, choice, reads = self._poles, self._choice, self._reads
        logits = choice.of_chosen(poles.logits)
        biases = None
        if poles.biases is not None:
            biases = choice.of_chosen(poles.biases) - reads.biases
        unread = ops.cast(choice.counts - reads.numbers, "float32")
        return poles.means(self._group, logits - reads.sums, unread, biases)

    def output(self, training=None):
        """Returns `<float32>[B, G, N, R, D]`; `training` says whether dropout is on."""

        def drop(x):
            # A call of the layer would cast them.
            return self._group.dot_product.dropout_layer.call(x, training=training)

        output, of_poles = 0.0, None
        if self._poles is not None:
            of_poles = drop(self._of_poles)
            of_reads = keras.tree.map_structure(drop, self._of_reads)
            shares = self._choice.of_chosen(of_poles)
            output = self._poles.output(of_poles)
            output = output + self._reads.output(of_reads, shares)
        for near, weights in zip(self._near, self._of_near):
            output = output + near.output(drop(weights), of_poles)
        # Not a tiny divisor: its square in the gradient would be zero.
        total = ops.where(self._total > 0, self._total, 1.0)
        return output / total[..., None]
