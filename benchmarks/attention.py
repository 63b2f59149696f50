"""Attention patterns against KmeansAttention and full attention, by length.

    python -m benchmarks.attention --output=attention.json --plot=attention.png

Each contender runs in a process of its own, in turns with the reference. Prints a
Markdown table for each kind of pass and length; `benchmarks/README.md` explains it.
"""

from absl import app
from absl import flags

from benchmarks import contenders
from benchmarks import contest
from benchmarks import report

LENGTHS = ["1024", "2048", "4096", "8192", "16384", "32768", "65536"]
PASSES = ["forward", "forward+backward"]


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    contest.define_flags(values, LENGTHS, ["float32", "bfloat16"], contenders.KMEANS)
    flags.DEFINE_list("passes", PASSES, "Any of these.", flag_values=values)
    contest.define_sizes(values)
    flags.DEFINE_integer(
        "attention_window",
        256,
        "Tokens in a cluster; there are length / window clusters.",
        lower_bound=1,
        flag_values=values,
    )


def main(argv):
    return contest.command(argv, benchmark)


def benchmark(options):
    """Runs all passes, prints tables and draws a plot."""
    passes = contest.check_list("passes", options.passes, PASSES)
    rows = contest.run(options, contenders.attention, passes)
    draw(options, rows)


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
