"""Streams tokens far past the trained length; prints and draws memory and time.

    python benchmarks/stream.py --num_tokens=20000 --output=docs/stream.png

Without a model directory the model is a preset with its initial weights, which changes
neither memory nor time. The picture is drawn by matplotlib (extra `bench`).
"""

import itertools
import os
import pathlib
import sys
import time

import keras
import keras_hub
import numpy as np
from absl import app
from absl import flags
from matplotlib.figure import Figure

from routing_tf import models
from routing_tf.generation.token_stream import TokenStream
from routing_tf.training import loading

# Tokens of one point of the picture.
GROUP = 1000


def memory():
    """Returns the resident memory of this process in MiB."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(lm, num_tokens):
    """Streams tokens.

    Args:
        lm: a `RoutingTransformerCausalLM`.
        num_tokens: number of tokens after the first, in which the step is compiled.

    Returns:
        For each thousand tokens, or what is left of one, the number of the last, the
        median of milliseconds per token, and MiB after the last: three arrays.
    """
    sampler = keras_hub.samplers.TopPSampler(p=0.95, seed=1)
    tokens = TokenStream(lm, sampler)([[0]])
    next(tokens)
    rows = []
    for start in range(0, num_tokens, GROUP):
        number = min(GROUP, num_tokens - start)
        times = [time.perf_counter()]
        for _ in itertools.islice(tokens, number):
            times.append(time.perf_counter())
        milliseconds = np.median(np.diff(times)) * 1e3
        rows.append((start + number, milliseconds, memory()))
    return np.array(rows).T


def table(numbers, milliseconds, mebibytes):
    """Returns the table of the first and the last thousand, in Markdown."""
    lines = ["| tokens | ms per token | MiB |", "| --- | --- | --- |"]
    for row in (0, -1):
        begin = numbers[row] - (numbers[row] - 1) % GROUP
        lines.append(
            f"| {begin:,.0f} to {numbers[row]:,.0f} | {milliseconds[row]:.2f} | "
            f"{mebibytes[row]:,.0f} |"
        )
    return "\n".join(lines)


def draw(numbers, milliseconds, mebibytes, trained_length):
    """Draws memory and time per token.

    Args:
        numbers: numbers of tokens.
        milliseconds: time per token.
        mebibytes: resident memory.
        trained_length: length of the sequences the model is trained on.

    Returns:
        A matplotlib figure.
    """
    figure = Figure(figsize=(7, 5), layout="constrained")
    panels = figure.subplots(2, sharex=True)
    for axes, values, label in zip(
        panels, (mebibytes, milliseconds), ("resident memory, MiB", "ms per token")
    ):
        axes.plot(numbers, values, marker=".")
        axes.axvline(
            trained_length, color="gray", linestyle="--", label="trained length"
        )
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.25 * max(values))
        axes.grid(alpha=0.3)
    panels[0].legend(loc="lower right")
    panels[1].set_xlabel("tokens")
    return figure


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    flags.DEFINE_string(
        "model_dir", None, "Folder of a run. Default: --preset.", flag_values=values
    )
    flags.DEFINE_string(
        "preset", "python_small", "Model with initial weights.", flag_values=values
    )
    flags.DEFINE_integer(
        "num_tokens", 20_000, "Tokens to stream.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_string(
        "output",
        "stream.png",
        "Picture to write: .png, .svg, .pdf.",
        flag_values=values,
    )


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(
            f"Settings are given as --name=value. Received: {argv[1:]}"
        )
    options = flags.FLAGS
    try:
        if options.model_dir:
            lm = loading.load_language_model(options.model_dir)
        else:
            lm = models.RoutingTransformerCausalLM.from_preset(options.preset)
        measured = measure(lm, options.num_tokens)
        trained_length = lm.hyperparameters.max_sequence_length
        draw(*measured, trained_length).savefig(options.output, dpi=150)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.model_dir or options.preset}, {keras.backend.backend()} backend")
    print(table(*measured))
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    define_flags()
    app.run(main)
