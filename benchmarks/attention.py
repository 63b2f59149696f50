"""Attention patterns against KmeansAttention and full attention, by length.

    python -m benchmarks.attention --output=attention.json --plot=attention.png

Each contender runs in a process of its own, in turns with the reference. Prints a
Markdown table for each kind of pass and length; `benchmarks/README.md` explains it.
"""

import sys

from absl import app
from absl import flags

from benchmarks import contenders
from benchmarks import contest
from benchmarks import report

LENGTHS = ["1024", "2048", "4096", "8192", "16384", "32768", "65536"]
PASSES = ["forward", "forward+backward"]


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    contest.define_flags(
        flags, values, LENGTHS, ["float32", "bfloat16"], contenders.KMEANS
    )
    flags.DEFINE_list("passes", PASSES, "Any of these.", flag_values=values)
    flags.DEFINE_integer("num_heads", 8, "Heads.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "key_dim", 64, "Size of a head.", lower_bound=2, flag_values=values
    )
    flags.DEFINE_integer(
        "attention_window",
        256,
        "Tokens in a cluster; there are length / window clusters.",
        lower_bound=1,
        flag_values=values,
    )


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(
            f"Settings are given as --name=value. Received: {argv[1:]}"
        )
    options = flags.FLAGS
    try:
        passes = contest.check_list("passes", options.passes, PASSES)
        rows = contest.run(options, contenders.attention, passes)
        draw(options, rows)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def draw(options, rows):
    """Draws a panel for each kind of pass."""
    panels = [
        (
            f"{passes}, seconds",
            lambda row, passes=passes: row.seconds if row.passes == passes else None,
        )
        for passes in options.passes
    ]
    heads = f"{options.num_heads} heads of {options.key_dim}"
    title = f"{heads}, window {options.attention_window}, causal"
    report.plot_lines(options.plot, rows, panels, title)


if __name__ == "__main__":
    define_flags()
    app.run(main)
