"""Draws the loss curve of a run from its metrics.jsonl.

python tools/loss_curve.py --model_dir=my_run --output=loss.png
"""

import json
import pathlib
import sys

from absl import app
from absl import flags
from matplotlib.figure import Figure


def read_metrics(model_dir):
    """Reads what a run logged.

    Args:
        model_dir: the model directory.

    Returns:
        Dict from the name of each figure to a pair of lists, steps and values.

    Raises:
        ValueError: if the run logged nothing.
    """
    path = pathlib.Path(model_dir, "metrics.jsonl")
    lines = path.read_text().splitlines() if path.is_file() else []
    curves = {}
    for entry in map(json.loads, lines):
        step = entry.pop("step")
        for name, value in entry.items():
            steps, values = curves.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    if not curves:
        raise ValueError(
            "`model_dir` must hold the metrics.jsonl of a run. Received: "
            f"{str(model_dir)!r}"
        )
    return curves


def draw(curves):
    """Draws the training loss and the held-out score.

    Args:
        curves: what `read_metrics` returns.

    Returns:
        A matplotlib figure.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    held_out = [name for name in curves if name.startswith("held_out_")]
    metric = held_out[0].removeprefix("held_out_") if held_out else "loss"
    if metric in curves:
        axes.plot(*curves[metric], label="training")
    for name in held_out:
        axes.plot(*curves[name], marker="o", label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel(metric.replace("_", " "))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    flags.DEFINE_string(
        "model_dir", None, "Folder of the run.", required=True, flag_values=values
    )
    flags.DEFINE_string(
        "output", "loss.png", "Picture to write: .png, .svg, .pdf.", flag_values=values
    )


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(
            f"Settings are given as --name=value. Received: {argv[1:]}"
        )
    options = flags.FLAGS
    try:
        draw(read_metrics(options.model_dir)).savefig(options.output, dpi=150)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    define_flags()
    app.run(main)
