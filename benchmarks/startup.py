"""Measures how long each command takes to answer `--help`, and a layer to import.

python -m benchmarks.startup --runs=5

Prints the median seconds of several runs, one of each in turn.
"""

import statistics
import subprocess
import sys
import time

from absl import app
from absl import flags

COMMANDS = ("train", "evaluate", "generate", "export", "convert", "datagen", "analyse")
CALLS = {
    **{name: ["-m", f"routing_tf.{name}", "--help"] for name in COMMANDS},
    "import keras": ["-c", "import keras"],
    "import routing_tf.layers": ["-c", "import routing_tf.layers"],
}


def seconds(call):
    """Returns how long a call of Python takes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *call], capture_output=True)
    return time.perf_counter() - start


def main(_):
    """Measures and prints a line for each call."""
    times = {name: [] for name in CALLS}
    for _ in range(flags.FLAGS.runs):
        for name, call in CALLS.items():
            times[name].append(seconds(call))
    for name, values in times.items():
        print(f"{name}: {statistics.median(values):.2f} s")


if __name__ == "__main__":
    flags.DEFINE_integer("runs", 5, "Calls of each.", lower_bound=1)
    app.run(main)
