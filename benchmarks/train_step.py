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
from routing_tf.models import presets


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    contest.define_flags(values, ["8192"], ["float32", "bfloat16"], contenders.PACKAGE)
    flags.DEFINE_enum(
        "preset",
        None,
        presets.preset_names("text"),
        "A preset to train in its full size, at its own length; as it is, with local "
        "heads alone, and without relative positions.",
        flag_values=values,
    )


def main(argv):
    return contest.command(argv, benchmark)


def benchmark(options):
    """Runs all steps, prints a table and draws a plot."""
    if options.preset:
        length = presets.preset_hyperparameters(options.preset).max_sequence_length
        options.lengths = [str(length)]
        if options.compare == contenders.PACKAGE:
            options.compare = f"{options.preset} (JAX)"
    rows = contest.run(options, cases_of, ["train step"])
    panels = [("tokens per second", _speed), ("peak memory, MiB", report.mebibytes)]
    report.plot_bars(options.plot, rows, panels, "one training step, batch 1")


def cases_of(length, kind, dtype, options):
    """Returns the cases of one length and dtype."""
    del kind
    if options.preset:
        return contenders.preset_step(options.preset, length, dtype, options)
    return contenders.train_step(length, dtype, options)


def _speed(row):
    return row.units / row.seconds


if __name__ == "__main__":
    define_flags()
    app.run(main)
