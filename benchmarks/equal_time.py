"""Trains the main job on long contexts, with each pattern for the same time.

    python -m benchmarks.equal_time
    python -m benchmarks.equal_time --minutes=120 --patterns=full,multipole
    python -m benchmarks.equal_time --print_only --plot=docs/equal_time.png

All models have the same width, data and key shift; a step reads one text of 8,192
bytes. First all take turns in training steps, which tells their speed. Each then trains
as many steps as it makes in the time at this speed. The learning rate ends with the
last step, and warm-up is the same share of the steps as in the main job. Scores do not
count as training.

The runs stay in the output folder; the figures, speeds too, are kept in a file, and
what it has is not computed again, so a second call goes on where the first was stopped.
Another machine, or another number of cores (`taskset -c 0` before the command gives all
models one core), needs another `--results`.
"""

import json
import pathlib

import tqdm
from absl import app
from absl import flags

from benchmarks import compare_patterns
from benchmarks import contest
from benchmarks import machine
from benchmarks.compare_patterns import Figures
from routing_tf.models.presets import preset_hyperparameters

KEY_SHIFT = 1
SEED = 0
POINTS = 10  # of a curve
DEFAULT_PATTERNS = ["full", "local", "token choice", "multipole"]


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}

    def size(name, default, text):
        flags.DEFINE_integer(name, default, text, lower_bound=1, **define)

    flags.DEFINE_string(
        "output_dir", "runs/equal_time", "Folder of the runs.", **define
    )
    flags.DEFINE_string(
        "results", "benchmarks/equal_time.json", "File of the figures.", **define
    )
    known = ", ".join(compare_patterns.PATTERNS)
    flags.DEFINE_list("patterns", DEFAULT_PATTERNS, f"Any of: {known}.", **define)
    size("minutes", 60, "Minutes of training steps of each model.")
    size("length", 8192, "Bytes of a text.")
    size("rounds", 8, "Timed steps of each model.")
    size("eval_examples", 32, "Windows of the test split to score.")
    size("curve_examples", 8, "Windows of the validation split in a curve.")
    flags.DEFINE_string("plot", None, "Plot to write: .png, .svg, .pdf.", **define)
    flags.DEFINE_bool("print_only", False, "Print what the file has.", **define)


def hparams_of(length, steps=None):
    """Returns the hyperparameters that are not the main job's, as flags take them.

    Args:
        length: bytes of a text, and of a batch.
        steps: number of training steps, of which warm-up is the same share as in the
            main job; None (the default) for as many steps of warm-up as there.
    """
    changes = {"max_sequence_length": length, "batch_tokens": length}
    if steps is not None:
        main_job = preset_hyperparameters(compare_patterns.PRESET)
        share = main_job.warmup_steps / main_job.train_steps
        changes["warmup_steps"] = max(1, round(share * steps))
    return ",".join(f"{name}={value}" for name, value in changes.items())


def speeds_of(options, patterns, figures):
    """Returns tokens per second by pattern; all that are missing take turns."""
    keys = {"kind": "speed", "length": options.length}
    missing = [each for each in patterns if not figures.find(**keys, pattern=each)]
    if missing:
        measured = compare_patterns.time_steps(
            [(pattern, KEY_SHIFT) for pattern in missing],
            options.rounds,
            hparams_of(options.length),
        )
        for pattern, (speed, weights) in zip(missing, measured, strict=True):
            figures.add(
                **keys,
                pattern=pattern,
                tokens_per_second=round(speed),
                weights=weights,
                machine=machine.words(),
            )
    return {
        pattern: figures.find(**keys, pattern=pattern)[0]["tokens_per_second"]
        for pattern in patterns
    }


def steps_in(minutes, tokens_per_second, length):
    """Returns the number of steps of one text each nearest to the time, at least 1."""
    return max(1, round(60 * minutes * tokens_per_second / length))


def curve_of(folder):
    """Returns pairs of step and held-out bits per byte of a run."""
    lines = pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
    name = "held_out_bits_per_byte"
    entries = [entry for entry in map(json.loads, lines) if name in entry]
    return [[entry["step"], round(entry[name], 4)] for entry in entries]


def train_and_score(options, patterns, figures):
    """Trains and scores the runs that have no figures yet."""
    speeds = speeds_of(options, patterns, figures)
    for pattern in tqdm.tqdm(patterns, unit="run", disable=None):
        keys = keys_of(options, pattern)
        if figures.find(**keys):
            continue
        steps = steps_in(options.minutes, speeds[pattern], options.length)
        hparams = hparams_of(options.length, steps)
        folder = compare_patterns.model_dir(
            options.output_dir, pattern, KEY_SHIFT, steps, SEED, hparams
        )
        compare_patterns.train(
            folder,
            pattern,
            KEY_SHIFT,
            SEED,
            steps,
            hparams=hparams,
            eval_every=max(1, -(-steps // POINTS)),
            eval_examples=options.curve_examples,
        )
        bits = compare_patterns.score(folder, options.eval_examples)
        figures.add(
            **keys,
            tokens_per_second=speeds[pattern],
            steps=steps,
            # Of a pattern that sees later tokens, the scope without them.
            bits_per_byte=round(bits.get("prefix", bits["full"]), 4),
            curve=curve_of(folder),
        )


def keys_of(options, pattern):
    """Returns what tells one run from the others."""
    return {
        "kind": "bits",
        "pattern": pattern,
        "length": options.length,
        "minutes": options.minutes,
        "windows": options.eval_examples,
        "curve_windows": options.curve_examples,
    }


def found_runs(options, figures):
    """Returns the runs of the chosen patterns that have figures, in their order."""
    found = (figures.find(**keys_of(options, each)) for each in options.patterns)
    return [runs[-1] for runs in found if runs]


def table(options, figures):
    """Returns the lines of a table in Markdown."""
    lines = [
        "| heads | tokens/s | steps | bytes read | bits per byte |",
        "| --- | --- | --- | --- | --- |",
    ]
    for run in found_runs(options, figures):
        lines.append(
            f"| {run['pattern']} | {run['tokens_per_second']:,} | {run['steps']:,} | "
            f"{run['steps'] * options.length / 1e6:.1f} million | "
            f"{run['bits_per_byte']:.3f} |"
        )
    return lines


def draw(options, figures):
    """Draws held-out bits per byte against minutes; returns a matplotlib figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for run in found_runs(options, figures):
        curve = [point for point in run["curve"] if point[0]]
        axes.plot(
            [step * options.minutes / run["steps"] for step, _ in curve],
            [bits for _, bits in curve],
            marker="o",
            label=f"{run['pattern']}, {run['steps']:,} steps",
        )
    axes.set_xlabel("minutes of training, at the measured speed")
    axes.set_yscale("log")
    axes.set_yticks([1, 1.5, 2, 3, 4])
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("held-out bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def run(options):
    """Trains what is missing; prints the table and draws the plot.

    Args:
        options: the parsed flags.

    Raises:
        ValueError: if a pattern is unknown.
    """
    patterns = contest.check_list(
        "patterns", options.patterns, list(compare_patterns.PATTERNS)
    )
    figures = Figures(options.results)
    if not options.print_only:
        train_and_score(options, patterns, figures)
    print("\n".join(table(options, figures)))
    if options.plot:
        draw(options, figures).savefig(options.plot, dpi=150)


def main(argv):
    return contest.command(argv, run)


if __name__ == "__main__":
    define_flags()
    app.run(main)
