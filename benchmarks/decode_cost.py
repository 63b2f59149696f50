"""What a decoding step costs, by kind of heads and context that a cache is made for.

    python benchmarks/decode_cost.py --output=decode_cost.json

Prints a Markdown table: size of the cache of one sequence, and the median time of a
step near the end of the context. The contexts of a kind take turns.
"""

import fnmatch
import functools
import json
import pathlib
import statistics
import time

import keras
import numpy as np
from absl import app
from absl import flags

from routing_tf import layers
from routing_tf.models.compiled import compiled

_HEADS = flags.DEFINE_integer("num_heads", 4, "Heads of a layer.", lower_bound=1)
_KEY_DIM = flags.DEFINE_integer("key_dim", 32, "Size of a head.", lower_bound=2)
_WINDOW = flags.DEFINE_integer("attention_window", 128, "Window.", lower_bound=1)
_CLUSTERS = flags.DEFINE_integer("num_clusters", 16, "Clusters.", lower_bound=2)
_LENGTHS = flags.DEFINE_list("lengths", ["1024", "8192", "65536"], "Contexts, tokens.")
_KINDS = flags.DEFINE_multi_string(
    "kinds",
    ["*"],
    "A name, or a pattern such as 'routed*'; may be repeated.",
)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps that are timed.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write the figures to.")


def kinds():
    """Returns the kinds of heads by their names, as functions."""
    heads, window = _HEADS.value, _WINDOW.value
    clustered = (heads, _CLUSTERS.value, window)
    routed = functools.partial(layers.RoutedHeads, *clustered)
    return {
        "local": lambda: layers.LocalHeads(heads, (window,)),
        "routed, token choice": lambda: routed(routing="token_choice"),
        "routed, four clusters": lambda: routed(
            routing="token_choice", clusters_per_query=4, share_query_key=False
        ),
        "routed, expert choice": lambda: routed(routing="expert_choice"),
        "multipole": lambda: layers.MultipoleHeads(
            heads, _CLUSTERS.value, window // 2, num_recent=window - window // 2
        ),
        "hashed": lambda: layers.HashedHeads(*clustered),
        "random": lambda: layers.RandomHeads(*clustered),
        "full": lambda: layers.FullHeads(heads),
        "strided": lambda: layers.StridedHeads(heads, (window,)),
        "fixed": lambda: layers.FixedHeads(heads, (window,), 8),
        "cluster-strided": lambda: layers.ClusterStridedHeads(*clustered),
    }


class Steps:
    """A layer of one kind of heads with a cache for one context."""

    def __init__(self, make_heads, length):
        dim = _HEADS.value * _KEY_DIM.value
        attention = layers.MixedAttention([make_heads()], _KEY_DIM.value)
        inputs = keras.Input((None, dim))
        attention.build(inputs.shape)
        self.length, self.times = length, []
        self.cache = attention.make_cache(1, length)
        self.bytes = sum(
            int(np.prod(x.shape)) * keras.ops.convert_to_numpy(x).itemsize
            for x in keras.tree.flatten(self.cache)
        )
        model = keras.Sequential([keras.Input((dim,)), keras.layers.Dense(1)])
        model.attention = attention

        def step(x, cache, index):
            return attention(x, cache=cache, cache_index=index)

        self.step = compiled(model, step)
        self.x = np.random.default_rng(0).normal(size=(1, 1, dim)).astype("float32")

    def run(self, index, is_timed):
        start = time.perf_counter()
        output, self.cache = self.step(self.x, self.cache, np.int32(index))
        keras.ops.convert_to_numpy(output)
        if is_timed:
            self.times.append(time.perf_counter() - start)


def measure(make_heads, lengths):
    """Returns for each context the bytes of a cache and the seconds of a step."""
    runs = [Steps(make_heads, length) for length in lengths]
    for number in range(_STEPS.value + 2):
        for run in runs:
            start = run.length - _STEPS.value - 2
            run.run(start + number, is_timed=number >= 2)
    return [
        {
            "length": run.length,
            "bytes": run.bytes,
            "seconds": statistics.median(run.times),
        }
        for run in runs
    ]


def main(argv):
    """Measures all kinds and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}")
    lengths = [int(length) for length in _LENGTHS.value]
    names = [f"{length // 1024}k" for length in lengths]
    print("| heads |", " | ".join(f"cache for {name}" for name in names), end=" | ")
    print(" | ".join(f"step at {name}" for name in names), "|")
    print("| --- " * (1 + 2 * len(names)) + "|")
    figures = {}
    for kind, make_heads in kinds().items():
        if not any(fnmatch.fnmatchcase(kind, pattern) for pattern in _KINDS.value):
            continue
        figures[kind] = measure(make_heads, lengths)
        cells = [f"{each['bytes'] / 2**20:.2f} MiB" for each in figures[kind]]
        cells += [f"{1000 * each['seconds']:.2f} ms" for each in figures[kind]]
        print("|", " | ".join([kind, *cells]), "|", flush=True)
    if _OUTPUT.value:
        pathlib.Path(_OUTPUT.value).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
