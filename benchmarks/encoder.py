"""Training steps of a classifier of padded texts, by length: routed heads and Keras'.

    python -m benchmarks.encoder --lengths=128,512,2048

The model is that of docs/recipes.md: two layers of 4 heads of 16 without a causal mask,
on batches of which a quarter is padding. Prints a Markdown table of the median seconds
of a step; the two models of a length take turns.
"""

import json
import pathlib
import statistics
import time

import keras
import numpy as np
import tqdm
from absl import app
from absl import flags

from benchmarks import contest
from benchmarks import record
from routing_tf import layers

VOCABULARY, CLASSES, WINDOW = 5000, 3, 128
HEADS = ("RoutingAttention", "MultiHeadAttention")


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    lengths = ["128", "256", "512", "1024", "2048", "4096"]
    flags.DEFINE_list("lengths", lengths, "Numbers of tokens.", **define)
    flags.DEFINE_integer("batch_size", 8, "Texts in a batch.", **define)
    flags.DEFINE_integer("steps", 5, "Steps that are timed.", lower_bound=1, **define)
    flags.DEFINE_string("output", None, "JSON file to write.", **define)


def attention(heads, length):
    """Returns a layer of attention."""
    if heads == "MultiHeadAttention":
        layer = keras.layers.MultiHeadAttention(4, 16)
        return lambda x: layer(x, x)
    return layers.RoutingAttention(
        num_heads=4,
        key_dim=16,
        num_clusters=max(1, length // WINDOW),
        attention_window=min(WINDOW, length),
        num_local_heads=2,
        local_block_size=min(WINDOW // 2, length),
    )


def training_step(heads, length, batch_size):
    """Returns a function that takes a training step of the classifier."""
    keras.utils.set_random_seed(0)
    token_ids = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 64, mask_zero=True)(token_ids)
    for _ in range(2):
        normalized = keras.layers.LayerNormalization()(x)
        x = keras.layers.Add()([x, attention(heads, length)(normalized)])
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(token_ids, keras.layers.Dense(CLASSES)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    generator = np.random.default_rng(0)
    ids = generator.integers(1, VOCABULARY, (batch_size, length))
    ids[:, 3 * length // 4 :] = 0
    labels = generator.integers(0, CLASSES, batch_size)
    return lambda: model.train_on_batch(ids, labels)


def measure(length, options):
    """Returns the median seconds of a step by the names of `HEADS`."""
    steps = {x: training_step(x, length, options.batch_size) for x in HEADS}
    times = {name: [] for name in steps}
    for number in range(2 + options.steps):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def table(found):
    """Returns the lines of a table of what `measure` returns, by length."""
    rows = [
        [f"{int(length):,}", *(f"{1e3 * each[x]:,.0f} ms" for x in HEADS)]
        + [f"{each[HEADS[1]] / each[HEADS[0]]:.2f}"]
        for length, each in found.items()
    ]
    return record.table(["tokens", *(f"`{x}`" for x in HEADS), "times as fast"], rows)


def benchmark(options):
    """Measures all lengths and prints a table."""
    lengths = tqdm.tqdm(contest.lengths_of(options), disable=None)
    found = {length: measure(length, options) for length in lengths}
    print("\n".join(table(found)))
    if options.output:
        pathlib.Path(options.output).write_text(json.dumps(found) + "\n")


def main(argv):
    return contest.command(argv, benchmark)


if __name__ == "__main__":
    define_flags()
    app.run(main)
