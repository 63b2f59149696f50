"""The far field of multipole heads: sums of clusters, the choice, and one softmax.

Letters: B batch, G key heads, N blocks, R queries of a block, K clusters, P clusters
that a query reads, Y near pairs, D dim.
"""

import dataclasses
from typing import Any

import keras
from keras import ops

from routing_tf.layers.support import backends
from routing_tf.layers.support import extremes
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.products import product

HIDDEN = large_negative("float32")
# Masses nearly tie up to this share of the largest one (of 1 where that is less). It
# exceeds what rounding makes of equal ones, which depends on the order of sums.
NEAR_TIE = 1e-5


class Table:
    """Sums over pairs, by cluster.

    Args:
        sums: `<float32>[B, G, N, K, E]`; columns are those of keys and of values, the
            number of pairs, and that of their biases, if any.
        key_dim: size of a key.
        value_dim: size of a value.
        is_own: `<float32>[B, 1, N, R, 1]`, 0 for queries that do not see these pairs;
            None (the default) for none.
    """

    def __init__(self, sums, key_dim, value_dim, is_own=None):
        self._key, first = sums[..., :key_dim], key_dim + value_dim
        self._value, self._is_own = sums[..., key_dim:first], is_own
        self._count = sums[..., None, :, first]
        has_bias = sums.shape[-1] > first + 1
        self._bias = sums[..., None, :, first + 1] if has_bias else None

    def seen_by(self, query):
        """Returns sums of logits, numbers of pairs, and sums of biases or None.

        They are `<float32>`, broadcastable to `[B, G, N, R, K]`.
        """
        logits = product(query, self._key, transpose_y=True)
        found = logits, self._count, self._bias
        if self._is_own is None:
            return found
        return [None if x is None else x * self._is_own for x in found]

    def output(self, weights):
        """Returns sums of values, for weights of pairs `<float32>[B, G, N, R, K]`."""
        weights = weights if self._is_own is None else weights * self._is_own
        return product(weights, self._value)


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

        Args:
            group: the `MultipoleHeads`.
            logits: sums of other pairs; None (the default) for those of all.
            counts: likewise.
            biases: likewise.
        """
        if logits is None:
            logits, counts, biases = self.logits, self.counts, self.biases
        number = ops.maximum(counts, 1.0)
        means = group.capped(logits / number)
        if biases is not None:
            means = means + biases / number
        return ops.where(counts > 0, means, HIDDEN)

    def choice(self, group):
        """Returns the `Choice` of the clusters that may hold the most mass."""
        return choose(self.means(group), self.counts, group.clusters_per_query)

    def output(self, weights):
        """Returns sums of the values in tables, see `Table.output`."""
        return sum(table.output(weights) for table in self.tables)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Choice:
    """The clusters that each query reads.

    Args:
        clusters: `<int32>[B, G, N, R, P]`.
        is_chosen: list of P tensors `<bool>[B, G, N, R, K]`.
        counts: `<int32>[B, G, N, R, P]`, numbers of their pairs; 0 where there is no
            cluster left that has one.
    """

    clusters: Any
    is_chosen: Any
    counts: Any

    def of_chosen(self, x):
        """Returns `[B, G, N, R, K]` at the chosen clusters, `[B, G, N, R, P]`."""
        zero = ops.zeros((), x.dtype)
        return ops.stack(
            [ops.sum(ops.where(own, x, zero), -1) for own in self.is_chosen], axis=-1
        )

    def replaced(self, x, values):
        """Returns `[B, G, N, R, K]` with `[B, G, N, R, P]` at the chosen clusters."""
        for place, own in enumerate(self.is_chosen):
            x = ops.where(own, values[..., place, None], x)
        return x


def choose(means, counts, number):
    """Returns the `Choice` of the clusters that may hold the most mass.

    Of masses that nearly tie, the lower number goes first.

    Args:
        means: as `Poles.means` returns them.
        counts: as in `Poles`.
        number: how many clusters P a query reads.
    """
    counts = ops.broadcast_to(counts, ops.shape(means))
    masses = ops.stop_gradient(means) + ops.log(ops.maximum(counts, 1.0))
    num_clusters, clusters, is_chosen, found = masses.shape[-1], [], [], []
    for _ in range(number):
        best = extremes.largest(masses, axis=-1, keepdims=True)
        near_tie = NEAR_TIE * ops.maximum(1.0, ops.abs(best))
        is_best = ops.cast(masses >= best - near_tie, "float32")
        cluster = extremes.place_of_largest(is_best)
        own = backends.one_hot(cluster, num_clusters, dtype="bool")
        clusters.append(cluster)
        is_chosen.append(own)
        found.append(ops.sum(ops.where(own, counts, 0.0), axis=-1))
        masses = ops.where(own, 2 * HIDDEN, masses)
    found = ops.cast(ops.stack(found, axis=-1), "int32")
    return Choice(ops.stack(clusters, axis=-1), is_chosen, found)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Near:
    """The near pairs of the queries of a block, and others that stand between them.

    Args:
        logits: `<float32>[B, G, N, R, Y]`, hidden where a pair is not near.
        value: `<float>[B, G, N, Y, D]`.
        signs: `<float32>`, broadcastable to `logits`: 1 for a pair that is in its
            cluster, though not in `Poles.sums`, -1 for a pair that is not, though in
            these sums; None for neither.
        clusters: `<float32>[B, G, N, Y, K]`, one-hot, zero for pairs in none; None
            with no signs.
    """

    logits: Any
    value: Any
    signs: Any = None
    clusters: Any = None


class OneSoftmax:
    """The softmax over near pairs, pairs of chosen clusters, and means of the rest.

    A cluster's mean has the weight of all its pairs that are not read. Sums of these
    pairs are those of all pairs less those of read ones, so a read pair has the weight
    of its own less that of an unread one, and the sums are never taken apart.

    Args:
        group: the `MultipoleHeads`.
        near: `Near`.
        poles: `Poles`; None where all pairs are near.
        choice: `Choice`.
        reads: how chosen clusters are read, see `cluster_reads`.
    """

    def __init__(self, group, near, poles=None, choice=None, reads=None):
        self.near, self.poles, self.choice, self.reads = near, poles, choice, reads
        self._dropout = group.dot_product.dropout_layer
        largest = extremes.largest(near.logits, axis=-1)
        if poles is not None:
            self._means, unread = self._of_unread(group)
            largest = ops.maximum(largest, extremes.largest(self._means, axis=-1))
            of_reads = extremes.largest(reads.largest, axis=-1)
            largest = ops.maximum(largest, of_reads)
        sink = None
        if group.sink_logits:
            sink = group.sinks_of_rows(near.logits.shape[-2])
            largest = ops.maximum(largest, sink)
        # Where nothing is seen, nothing has weight.
        self.largest = ops.stop_gradient(ops.maximum(largest, HIDDEN / 4))[..., None]
        self.of_near = ops.exp(near.logits - self.largest)
        self.total = ops.sum(self.of_near, axis=-1)
        if poles is not None:
            self.of_reads = reads.weights(self.largest)
            self.of_poles = ops.exp(self._means - self.largest)
            self.total = self.total + ops.sum(reads.totals(self.of_reads), axis=-1)
            self.total = self.total + ops.sum(self.of_poles * unread, axis=-1)
        if sink is not None:
            self.total = self.total + ops.exp(sink - self.largest[..., 0])

    def _of_unread(self, group):
        """Returns mean logits of pairs that are not read, and their numbers."""
        poles, choice, reads = self.poles, self.choice, self.reads
        means = poles.means(group)
        shape = ops.shape(means)
        counts = ops.broadcast_to(poles.counts, shape)
        num_read = ops.cast(reads.numbers, "float32")
        unread = ops.cast(choice.counts, "float32") - num_read
        biases = None
        if poles.biases is not None:
            biases = choice.of_chosen(ops.broadcast_to(poles.biases, shape))
            biases = biases - reads.biases
        logits = choice.of_chosen(poles.logits) - reads.sums
        of_chosen = poles.means(group, logits, unread, biases)
        means = choice.replaced(means, of_chosen)
        if not group.summaries:
            means = ops.full_like(means, HIDDEN)
        return means, choice.replaced(counts, unread)

    def output(self, training=None):
        """Returns `<float32>[B, G, N, R, D]`; `training` says whether dropout is on."""
        of_near, output = self._dropout(self.of_near, training=training), 0.0
        if self.poles is not None:
            of_poles = self._dropout(self.of_poles, training=training)
            of_reads = keras.tree.map_structure(
                lambda x: self._dropout(x, training=training), self.of_reads
            )
            output = self.poles.output(of_poles)
            shares = self.choice.of_chosen(of_poles)
            output = output + self.reads.output(of_reads, shares)
            if self.near.signs is not None:
                shares = product(of_poles, self.near.clusters, transpose_y=True)
                of_near = of_near + self.near.signs * shares
        value = self.near.value
        output = output + ops.cast(
            product(ops.cast(of_near, value.dtype), value), "float32"
        )
        return output / ops.maximum(self.total, 1e-30)[..., None]
