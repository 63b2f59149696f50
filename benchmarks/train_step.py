"""Whole training steps of language models: tokens per second and peak memory.

    python -m benchmarks.train_step --output=train_step.json --plot=train_step.png

Ours are trained as `routing_tf.train` trains them; against them stand
`RoutingTransformerLM` of the PyTorch package `routing-transformer`, and a dense Keras
transformer: our model with full heads alone. `benchmarks/README.md` explains the table.
"""

from absl import app
from absl import flags

from benchmarks import contenders
from benchmarks import contest
from benchmarks import report


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    contest.define_flags(values, ["8192"], ["float32", "bfloat16"], contenders.PACKAGE)


def main(argv):
    return contest.command(argv, benchmark)


def benchmark(options):
    """Runs all steps, prints a table and draws a plot."""
    rows = contest.run(options, cases_of, ["train step"])
    panels = [("tokens per second", _speed), ("peak memory, MiB", report.mebibytes)]
    report.plot_bars(options.plot, rows, panels, "one training step, batch 1")


def cases_of(length, kind, dtype, options):
    """Returns the cases of one length and dtype."""
    del kind
    return contenders.train_step(length, dtype, options)


def _speed(row):
    return row.units / row.seconds


if __name__ == "__main__":
    define_flags()
    app.run(main)
