"""What a decoding step costs, by kind of heads and context that a cache is made for.

    python -m benchmarks.decode_cost --output=decode_cost.json

Prints a Markdown table: size of the cache of one sequence, and the median time of a
step near the end of the context. The contexts of a kind take turns, and with them those
of the kind `--compare`.
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

TORCH_FULL = "full attention (PyTorch)"
WARM_UP_STEPS = 2


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    flags.DEFINE_integer("num_heads", 4, "Heads of a layer.", lower_bound=1, **define)
    flags.DEFINE_integer("key_dim", 32, "Size of a head.", lower_bound=2, **define)
    flags.DEFINE_integer("attention_window", 128, "Window.", lower_bound=1, **define)
    flags.DEFINE_integer("num_clusters", 16, "Clusters.", lower_bound=2, **define)
    flags.DEFINE_list("lengths", ["1024", "8192", "65536"], "Contexts.", **define)
    flags.DEFINE_multi_string(
        "kinds",
        ["*"],
        "A name, or a pattern such as 'routed*'; may be repeated.",
        **define,
    )
    flags.DEFINE_string(
        "compare", None, "Name of a kind that takes turns with each.", **define
    )
    flags.DEFINE_integer("steps", 20, "Steps that are timed.", lower_bound=1, **define)
    flags.DEFINE_string("output", None, "JSON file to write the figures to.", **define)


def kinds(options):
    """Returns functions from a context to what takes steps there, by their names."""
    heads, window = options.num_heads, options.attention_window
    clustered = (heads, options.num_clusters, window)
    routed = functools.partial(layers.RoutedHeads, *clustered)
    makers = {
        "full": lambda: layers.FullHeads(heads),
        "routed, token choice": lambda: routed(routing="token_choice"),
        "hashed": lambda: layers.HashedHeads(*clustered),
        "local": lambda: layers.LocalHeads(heads, (window,)),
        "multipole": lambda: layers.MultipoleHeads(
            heads, options.num_clusters, window // 2, num_recent=window - window // 2
        ),
        "routed, four clusters": lambda: routed(
            routing="token_choice", clusters_per_query=4, share_query_key=False
        ),
        "routed, expert choice": lambda: routed(routing="expert_choice"),
        "random": lambda: layers.RandomHeads(*clustered),
        "strided": lambda: layers.StridedHeads(heads, (window,)),
        "fixed": lambda: layers.FixedHeads(heads, (window,), 8),
        "cluster-strided": lambda: layers.ClusterStridedHeads(*clustered),
    }
    found = {
        name: functools.partial(Steps, maker, heads, options.key_dim)
        for name, maker in makers.items()
    }
    found[TORCH_FULL] = functools.partial(TorchSteps, heads, options.key_dim)
    return found


class Steps:
    """A layer of one kind of heads with a cache for one context."""

    def __init__(self, make_heads, num_heads, key_dim, length):
        dim = num_heads * key_dim
        attention = layers.MixedAttention([make_heads()], key_dim)
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

    def run(self, index):
        """Takes the step of a position."""
        output, self.cache = self.step(self.x, self.cache, np.int32(index))
        keras.ops.convert_to_numpy(output)


class TorchSteps:
    """The same of PyTorch's full attention, whose cache is written in place."""

    def __init__(self, num_heads, key_dim, length):
        import torch

        dim = num_heads * key_dim
        self.length, self.times = length, []
        self.cache = torch.zeros((2, 1, num_heads, length, key_dim))
        self.bytes = self.cache.nbytes
        self.project, self.output = (
            torch.nn.Linear(dim, 3 * dim),
            torch.nn.Linear(dim, dim),
        )
        self.x, self.torch = torch.randn(1, 1, dim), torch

    def run(self, index):
        """Takes the step of a position."""
        with self.torch.no_grad():
            heads = self.cache.shape[2]
            query, *pair = self.project(self.x).reshape(3, 1, heads, 1, -1)
            self.cache[:, :, :, index : index + 1] = self.torch.stack(pair)
            key, value = self.cache[:, :, :, : index + 1]
            attend = self.torch.nn.functional.scaled_dot_product_attention
            self.output(attend(query, key, value).reshape(1, 1, -1))


def measure(groups, num_steps):
    """Returns for each group of contexts the bytes of caches and seconds of steps.

    Args:
        groups: list of lists of `Steps`, all of which take turns.
        num_steps: number of steps of each that are timed, the last of its context.
    """
    for number in range(WARM_UP_STEPS + num_steps):
        for run in sum(groups, []):
            start = time.perf_counter()
            run.run(run.length - WARM_UP_STEPS - num_steps + number)
            if number >= WARM_UP_STEPS:
                run.times.append(time.perf_counter() - start)
    return [
        [
            {
                "length": run.length,
                "bytes": run.bytes,
                "seconds": statistics.median(run.times),
            }
            for run in group
        ]
        for group in groups
    ]


def measure_kind(kind, found, options):
    """Returns what `measure` does of one kind, and of the reference, if there is one.

    Where there is one, each dict has its seconds as `reference_seconds`.
    """
    names = [kind, options.compare]
    # The threads of two libraries in one process wait for each other.
    if options.compare in (None, kind) or kind == TORCH_FULL:
        names = [kind]
    lengths = [int(length) for length in options.lengths]
    groups = [[found[name](length) for length in lengths] for name in names]
    own, *others = measure(groups, options.steps)
    for each, other in zip(own, sum(others, [])):
        each["reference_seconds"] = other["seconds"]
    return own


def cells(figures):
    """Returns the cells of a kind: sizes of caches, then times of steps."""
    sizes = [f"{each['bytes'] / 2**20:.2f} MiB" for each in figures]
    return sizes + [f"{1000 * each['seconds']:.2f} ms" for each in figures]


def heads_of(lengths):
    """Returns the heads of the table's columns."""
    names = [f"{length // 1024}k" for length in lengths]
    caches = [f"cache for {name}" for name in names]
    return ["heads", *caches, *(f"step at {name}" for name in names)]


def main(argv):
    """Measures all kinds and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}")
    options = flags.FLAGS
    columns = heads_of([int(length) for length in options.lengths])
    print(f"| {' | '.join(columns)} |\n" + "| --- " * len(columns) + "|")
    figures, found = {}, kinds(options)
    for kind in found:
        if any(fnmatch.fnmatchcase(kind, pattern) for pattern in options.kinds):
            figures[kind] = measure_kind(kind, found, options)
            print("|", " | ".join([kind, *cells(figures[kind])]), "|", flush=True)
    if options.output:
        pathlib.Path(options.output).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    define_flags()
    app.run(main)
