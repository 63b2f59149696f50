"""The error of each layer when other heads replace full attention."""

import dataclasses
from typing import Any

import keras
import numpy as np
from keras import ops

from routing_tf.layers import FullHeads
from routing_tf.layers.support.configs import serialize
from routing_tf.retrofit import calibration
from routing_tf.retrofit.slots import made_group
from routing_tf.retrofit.slots import settings_of

#: Tokens of the calibration that are compared, which takes time by the cube of their
#: number, and columns of attention maps that are held at once.
LENGTH, COLUMNS = 1024, 256


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One attention layer.

    Args:
        index: its place among the attention layers of the model.
        name: its path.
        heads: the class of its heads; `"full"` where it stays.
        reason: why it stays; empty where it does not.
        exact_mass: share of the full attention that falls on keys that are read, the
            mean over queries and heads; None if it was not measured.
        error: relative error of the layer's output, for the input that it has in the
            full model; None if it was not measured.
        keys_per_query: mean number of keys that a query reads; None likewise.
        cache_bytes: size of the cache of one sequence of `length` tokens.
        length: number of tokens that were compared.
    """

    index: int
    name: str
    heads: str
    reason: str = ""
    exact_mass: float | None = None
    error: float | None = None
    keys_per_query: float | None = None
    cache_bytes: int | None = None
    length: int | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `sparsify`; `print` shows a table.

    Args:
        model: the changed model.
        layers: a `LayerReport` for each attention layer.
    """

    model: Any
    layers: tuple

    @property
    def kept(self):
        """Indices of the layers that stay as they were."""
        return tuple(layer.index for layer in self.layers if layer.reason)

    def __str__(self):
        head = ("layer", "heads", "exact mass", "error", "keys", "cache, kB", "")
        rows = [head, *(_row(layer) for layer in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


def _row(layer):
    def number(x, form):
        return "" if x is None else format(x, form)

    return (
        f"{layer.index} {layer.name}",
        layer.heads,
        number(layer.exact_mass, ".3f"),
        number(layer.error, ".3f"),
        number(layer.keys_per_query, ".0f"),
        number(layer.cache_bytes and layer.cache_bytes / 1000, ".0f"),
        layer.reason,
    )


class Comparison:
    """Compares the heads of slots with full ones, on what the full model computes.

    Args:
        slots: the slots whose groups are made, with their centroids.
    """

    def __init__(self):
        self.found = {}

    def watch(self, slot, x, mask, original):
        """Compares in the first call of a layer, and attends as before."""
        output = original()
        if slot.index not in self.found and not slot.attends_to_another:
            dense = output[0] if isinstance(output, tuple) else output
            limit = min(LENGTH, x.shape[1], slot.limit or LENGTH)
            x, dense = x[:1, :limit], dense[:1, :limit]
            mask = None if mask is None else mask[:1, :limit]
            if not slot.is_causal and limit < output.shape[1]:
                return output  # what was cut off was seen
            self.found[slot.index] = compared(slot, x, mask, dense)
        return output


def compared(slot, x, mask, dense):
    """Returns the figures of a `LayerReport` for one sequence, by their names."""
    watch, slot.watch = slot.watch, None
    try:
        sparse = slot.attend(x, mask)
    finally:
        slot.watch = watch
    sparse = sparse[0] if isinstance(sparse, tuple) else sparse
    real = np.ones(x.shape[1], bool)
    if mask is not None:
        real = np.asarray(ops.convert_to_numpy(mask))[0]
    dense, sparse = (_numpy(each)[0, real] for each in (dense, sparse))
    error = np.linalg.norm(sparse - dense) / max(np.linalg.norm(dense), 1e-30)
    mass, number = mass_and_number(slot, x, mask, real)
    return {
        "error": float(error),
        "exact_mass": mass,
        "keys_per_query": number,
        "length": int(x.shape[1]),
        "cache_bytes": cache_bytes(slot, int(x.shape[1])),
    }


def mass_and_number(slot, x, mask, real):
    """Returns the share of full attention on keys that are read, and their number.

    Args:
        slot: a `Slot`.
        x: `<float>[1, length, dim]`.
        mask: `<bool>[1, length]`, or None.
        real: `<bool>[length]`, of NumPy.
    """
    length = x.shape[1]
    width = min(COLUMNS, length)
    full = made_group(slot, FullHeads(slot.adapter.num_heads), width, **_plain(slot))
    groups = full, _reading(slot, width)
    query, key, value = slot.adapter.projected(x)
    mass = number = 0.0
    for first in range(0, length, width):
        # Values that are columns of an identity matrix make outputs the weights.
        columns = np.eye(length, width, -first, dtype="float32")
        columns = np.broadcast_to(columns, (1, value.shape[1], *columns.shape))
        projected = query, key, ops.cast(columns, value.dtype)
        weights, read = (
            _numpy(group(inputs=slot.prepared(projected, x, mask, group=group)))
            for group in groups
        )
        is_read = read[0][:, real] > 0
        mass += np.sum(weights[0][:, real] * is_read)
        number += np.sum(is_read)
    queries = slot.adapter.num_heads * max(int(real.sum()), 1)
    return float(mass / queries), float(number / queries)


def _numpy(x):
    return np.asarray(ops.convert_to_numpy(ops.cast(x, "float32")))


def _plain(slot):
    settings = settings_of(slot)
    settings.pop("sink_logits", None)
    return {**settings, "dropout": 0.0}


def _reading(slot, value_dim):
    """Returns heads that read what those of a slot read exactly, and nothing else."""
    config = serialize(slot.group)
    options = {"summaries": False} if "summaries" in config["config"] else {}
    twin = made_group(slot, config, value_dim, **options)
    twin.set_weights(slot.group.get_weights())
    return twin


def cache_bytes(slot, length):
    """Returns the size of a cache of one sequence."""
    if not slot.is_causal:
        return None
    leaves = keras.tree.flatten(slot.group.make_cache(1, length))
    sizes = (np.prod(x.shape) * np.dtype(_numpy_name(x.dtype)).itemsize for x in leaves)
    return int(sum(sizes))


def _numpy_name(dtype):
    name = keras.backend.standardize_dtype(dtype)
    return "float16" if name == "bfloat16" else name


def compare(model, slots, batches):
    """Returns the figures of all slots, by index."""
    comparison = Comparison()
    calibration.run(model, slots, comparison.watch, batches)
    return comparison.found
