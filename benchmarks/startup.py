"""Measures how long commands and models take to begin.

python -m benchmarks.startup --runs=5

Prints the median seconds of several runs, one of each in turn: of `--help`, of imports,
of the main job with two steps, and of the first step of `fit` and the first call of
`predict` of a model of two layers.
"""

import itertools
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags

COMMANDS = ("train", "evaluate", "generate", "export", "convert", "datagen", "analyse")
CALLS = {
    **{name: ["-m", f"routing_tf.{name}", "--help"] for name in COMMANDS},
    "import keras": ["-c", "import keras"],
    "import routing_tf.layers": ["-c", "import routing_tf.layers"],
}
FIRST_STEPS = """
import sys, time
import keras, numpy as np
from routing_tf import layers

def attend(x):
    if sys.argv[1] == "routed":
        layer = layers.RoutingAttention(4, 8, 4, 16, key_shift=1)
        return layer(x, use_causal_mask=True)
    return keras.layers.MultiHeadAttention(4, 8)(x, x, use_causal_mask=True)

inputs = x = keras.Input((None, 32))
for _ in range(2):
    x = keras.layers.Add()([x, attend(x)])
model = keras.Model(inputs, x)
model.compile("adam", "mse")
tokens = np.random.default_rng(0).normal(size=(8, 128, 32)).astype("float32")
start = time.perf_counter()
model.fit(tokens, tokens, batch_size=8, verbose=0)
fitted = time.perf_counter()
model.predict(tokens, verbose=0)
print(fitted - start, time.perf_counter() - fitted)
"""
LAYERS = {"token choice": "routed", "keras.layers.MultiHeadAttention": "keras"}


def seconds(call):
    """Returns how long a call of Python takes."""
    start = time.perf_counter()
    _output(call, check="--help" not in call)  # absl exits with 1 there
    return time.perf_counter() - start


def main_job():
    """Yields pairs of a name and the seconds of the main job with two steps."""
    with tempfile.TemporaryDirectory() as folder:
        run = ["-m", "routing_tf.train", f"--model_dir={pathlib.Path(folder, 'run')}"]
        yield "main job, two steps", seconds([*run, "--train_steps=2"])


def first_steps():
    """Yields pairs of a name and seconds, for our attention and Keras' own."""
    for name, argument in LAYERS.items():
        output = _output(["-c", FIRST_STEPS, argument]).split()[-2:]
        for call, value in zip(("fit", "predict"), output, strict=True):
            yield f"first `{call}` of two layers, {name}", float(value)


def _output(call, check=True):
    """What a call of Python prints; raises a CalledProcessError if it fails."""
    return subprocess.run(
        [sys.executable, *call], capture_output=True, check=check, text=True
    ).stdout


def main(_):
    """Measures and prints a line for each call."""
    times = {}
    for _ in range(flags.FLAGS.runs):
        commands = ((name, seconds(call)) for name, call in CALLS.items())
        for name, value in itertools.chain(commands, main_job(), first_steps()):
            times.setdefault(name, []).append(value)
    for name, values in times.items():
        print(f"{name}: {statistics.median(values):.2f} s")


if __name__ == "__main__":
    flags.DEFINE_integer("runs", 5, "Calls of each.", lower_bound=1)
    app.run(main)
