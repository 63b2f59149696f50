"""The inputs of multipole heads: queries, and pairs of a key and a value.

Letters: B batch, H heads, G key heads, L length, X pairs, D dim.
"""

import dataclasses
from typing import Any

from keras import ops

from routing_tf.layers.routing.cluster_reads import Members
from routing_tf.layers.support import masks as segment
from routing_tf.layers.support import tensors
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pairs:
    """Pairs of keys and values, in order of position.

    Args:
        key: `<float>[B, G, X, D]`, as near queries see it.
        far_key: the same, as queries see it from far.
        value: `<float>[B, G, X, D]`.
        clusters: `<int32>[B, G, X]`.
        places: `<int32>`, broadcastable to `[B, G, X]`, counted from the start of a
            document; negative for what is no pair.
        bias: `<float32>`, broadcastable to `[B, G, X]`; None without any.
        segments: `<int32>[B, 1, X]`, numbers of documents; None for one.
    """

    key: Any
    far_key: Any
    value: Any
    clusters: Any
    places: Any
    bias: Any = None
    segments: Any = None

    def far_clusters(self, group):
        """Returns clusters of pairs seen from far; their number for all others."""
        is_far = self.places >= group.num_sinks
        return ops.where(is_far, self.clusters, group.num_clusters)

    def parts(self):
        """Returns keys as seen from far, values, and biases if any, to be added up.

        They are `<float32>[B, G, X, .]`.
        """
        key, value = (ops.cast(x, "float32") for x in (self.far_key, self.value))
        if self.bias is None:
            return [key, value]
        return [key, value, ops.ones_like(key[..., :1]) * self.bias[..., None]]

    def members(self, clusters):
        """Returns the pairs as `Members` of clusters `<int32>[B, G, X]`."""
        key, value = (ops.cast(x, "float32") for x in (self.far_key, self.value))
        bias = self.bias
        bias = None if bias is None else ops.broadcast_to(bias, ops.shape(clusters))
        return Members(clusters, key, value, bias)

    def first(self, starts, number):
        """Returns the `Pairs` of the first `number` places, `[B, G, number, ...]`.

        Their places are -1 for what is no pair.
        """
        wanted = numbers(number)[None, None]
        found = {
            name: at_places(getattr(self, name), wanted + starts)
            for name in ("key", "far_key", "value", "clusters", "places", "bias")
            if getattr(self, name) is not None
        }
        places = ops.where(found["places"] == wanted, wanted, -1)
        return Pairs(**{**found, "places": places})


def at_places(x, index):
    """Returns `[B, G, X, ...]` at places `<int32>[B, 1, ...]`; the last beyond it."""
    index = ops.minimum(index, length_of(x, 2) - 1)
    index = ops.broadcast_to(index, (*ops.shape(x)[:2], *ops.shape(index)[2:]))
    if len(x.shape) == 3:
        return tensors.entries_at(x, index)
    return tensors.gather(x, index)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Queries:
    """Queries `<float>[B, H, L, D]`, as they see near pairs and pairs from far.

    `scores` `<float32>[B, H, L, K]` are those of clusters, None where mass counts.
    `starts` are the positions at which their documents start, as `[B, 1, L]`.
    """

    near: Any
    far: Any
    scores: Any
    places: Any
    segments: Any = None
    starts: Any = None


def document_places(length, mask, segments):
    """Returns the place of each token in its document, and where documents start.

    A document starts at its first real token. Both are `<int32>`, broadcastable to
    `[B, 1, L]`.

    Args:
        length: number of tokens.
        mask: `<bool>[B, 1, L]`, False for padding; None for no padding.
        segments: `Segments`; None for one document.
    """
    positions = numbers(length)[None, None]
    if mask is None and segments is None:
        return ops.convert_to_tensor(positions), 0
    if segments is None:
        first = ops.argmax(ops.cast(mask, "int32"), axis=-1)
        starts = ops.cast(first, "int32")[..., None]
        return positions - starts, starts
    starts = segments.value_starts
    if mask is not None:
        real = ops.cast(mask, "int32")
        earlier = ops.cumsum(real, axis=-1) - real
        own = earlier - ops.take_along_axis(earlier, starts, axis=-1)
        is_first = ops.logical_and(mask, own == 0)
        is_first = ops.logical_or(is_first, positions == 0)
        starts = ops.maximum(starts, segment.first_positions(is_first))
    return positions - starts, starts


class Turn:
    """Turns rows of tokens until their documents start at the first place.

    Padding before a document goes after all others.

    Args:
        starts: `<int32>`, broadcastable to `[B, 1, 1]`, where documents start.
        length: number of tokens.
    """

    def __init__(self, starts, length):
        places = numbers(length)[None, None]
        self._places = ops.convert_to_tensor(places)
        self._sources = (places + starts) % length
        self._targets = (places + length - starts) % length

    def of_queries(self, queries):
        """Returns turned `Queries`, in one document without padding before it."""
        same = queries.near is queries.far
        near = self._turned(queries.near)
        far = near if same else self._turned(queries.far)
        scores = self._turned(queries.scores)
        return Queries(near, far, scores, self._places, starts=0)

    def of_pairs(self, pairs):
        """Returns turned `Pairs`."""
        same = pairs.key is pairs.far_key
        fields = ("key", "value", "clusters", "places", "bias")
        fields += () if same else ("far_key",)
        found = {name: self._turned(getattr(pairs, name)) for name in fields}
        return Pairs(**{"far_key": found["key"], **found})

    def back(self, x):
        """Returns `[B, H, L, D]` in the order of before."""
        return tensors.permuted(x, self._targets, self._sources)

    def _turned(self, x):
        if x is None:
            return None
        if len(x.shape) == 4:
            return tensors.permuted(x, self._sources, self._targets)
        of_all = x + ops.zeros_like(self._sources, dtype=x.dtype)
        return at_places(of_all, self._sources)
