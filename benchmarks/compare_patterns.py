"""Trains the main job with other attention patterns in place of its routed heads.

    python benchmarks/compare_patterns.py --output_dir=runs/patterns

All models have the same width, data and steps. Each is trained from several seeds, and
scored on the test split in both routing scopes where they differ. Then all take turns
in training steps, which tells their speed. The runs stay in the output folder, where a
second call goes on; the table is printed, and written there with all figures as
`patterns.md` and `patterns.json`.
"""

import json
import logging
import pathlib
import statistics
import subprocess
import sys
import time

import keras
import tqdm
from absl import app
from absl import flags

from routing_tf import evaluation
from routing_tf import run_checkpoints
from routing_tf import run_directory
from routing_tf import training
from routing_tf.models.presets import preset_hyperparameters
from routing_tf.models.token_scorer import TokenScorer

PRESET = "python_small"
# Its routed heads, in the last layers, are replaced; window and clusters stay.
PATTERNS = {
    "full": {"routing": "full"},
    "local, blocks of 16": {"num_local_only_layers": 4},
    "local, blocks of 64": {"num_local_only_layers": 4, "local_block_length": 64},
    "random": {"routing": "random"},
    "expert choice": {"routing": "expert_choice"},
    "token choice": {"routing": "token_choice"},
}
WARM_UP_STEPS = 3
logging.getLogger("tensorflow").setLevel("ERROR")  # many models: many traces


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    flags.DEFINE_string(
        "output_dir", "runs/patterns", "Folder of the runs.", flag_values=values
    )
    flags.DEFINE_integer(
        "seeds", 3, "Runs of each pattern.", lower_bound=2, flag_values=values
    )
    flags.DEFINE_integer(
        "train_steps",
        preset_hyperparameters(PRESET).train_steps,
        "Steps of each run.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "eval_examples",
        128,
        "Windows of the test split to score; 0: all.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "rounds", 20, "Timed steps of each model.", lower_bound=1, flag_values=values
    )


def model_dir(output_dir, pattern, seed):
    """Returns the folder of one run."""
    name = pattern.replace(",", "").replace(" ", "_")
    return pathlib.Path(output_dir) / f"{name}_{seed}"


def train(folder, pattern, seed, steps):
    """Trains one run, or finishes it, in a process of its own."""
    saved = run_checkpoints.paths(folder)
    if saved and run_checkpoints.step_of(saved[-1]) == steps:
        return
    changes = {**PATTERNS[pattern], "train_steps": steps}
    command = [
        sys.executable,
        "-m",
        "routing_tf.train",
        f"--model_dir={folder}",
        "--problem=python_source",
        f"--hparams_set={PRESET}",
        "--hparams=" + ",".join(f"{name}={value}" for name, value in changes.items()),
        f"--seed={seed}",
        "--eval_every=0",
        "--eval_examples=2",
        "--sample_bytes=0",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def score(folder, num_examples):
    """Scores one run on the test split.

    Args:
        folder: the model directory.
        num_examples: number of windows; None for all.

    Returns:
        Dict from the routing scope to bits per byte.
    """
    config = run_directory.RunConfig.load(folder)
    problem = config.make_problem()
    lm = run_directory.load_language_model(run_checkpoints.paths(folder)[-1])
    scopes = ["full"]
    if config.hyperparameters.sees_later_tokens("full"):
        scopes.append("prefix")
    return {
        scope: evaluation.evaluate(
            TokenScorer(lm, scope), problem, "test", num_examples
        ).bits
        for scope in scopes
    }


def time_steps(folders, rounds):
    """Times training steps of several runs, one after the other, round by round.

    Args:
        folders: dict of model directories.
        rounds: number of timed steps of each.

    Returns:
        Dict of the median tokens per second.
    """
    steps = {name: training_step(folder) for name, folder in folders.items()}
    seconds = {name: [] for name in steps}
    for number in tqdm.trange(WARM_UP_STEPS + rounds, desc="timing", disable=None):
        for name, (step, _) in steps.items():
            started = time.perf_counter()
            step()
            if number >= WARM_UP_STEPS:
                seconds[name].append(time.perf_counter() - started)
    return {
        name: num_tokens / statistics.median(seconds[name])
        for name, (_, num_tokens) in steps.items()
    }


def training_step(folder):
    """Returns a function that takes a training step, and its number of tokens."""
    config = run_directory.RunConfig.load(folder)
    problem = config.make_problem()
    lm = training.build_model(config.hyperparameters, problem)
    training.compile_for_training(lm)
    batch_size = evaluation.batch_size_of(config.hyperparameters, problem)
    dataset = problem.dataset(problem.train_split, batch_size, seed=0)
    inputs, targets, weights = next(dataset.as_numpy_iterator())
    inputs = {name: inputs[name] for name in lm.input}

    def step():
        keras.Model.train_on_batch(lm, inputs, targets, weights)

    return step, float(weights.sum())


def table(bits, tokens_per_second):
    """Returns the lines of a table in Markdown.

    Args:
        bits: dict from the pattern to a list with what `score` returns for each seed.
        tokens_per_second: dict from the pattern to the speed of training.

    Returns:
        List of strings.
    """
    lines = [
        "| in place of the routed heads | scope | bits per byte | tokens/s |",
        "| --- | --- | --- | --- |",
    ]
    for pattern, runs in bits.items():
        for scope in runs[0]:
            values = [run[scope] for run in runs]
            spread = statistics.stdev(values)
            speed = f"{tokens_per_second[pattern]:,.0f}" if scope == "full" else ""
            shown = scope if len(runs[0]) > 1 else "both"
            lines.append(
                f"| {pattern} | {shown} | {statistics.mean(values):.3f} ± "
                f"{spread:.3f} | {speed} |"
            )
    return lines


def run(options):
    """Trains, scores and times all patterns; prints the table.

    Args:
        options: the parsed flags.
    """
    seeds = range(options.seeds)
    runs = [(pattern, seed) for seed in seeds for pattern in PATTERNS]
    for pattern, seed in tqdm.tqdm(runs, unit="run", disable=None):
        folder = model_dir(options.output_dir, pattern, seed)
        train(folder, pattern, seed, options.train_steps)
    bits = {pattern: [] for pattern in PATTERNS}
    for pattern, seed in tqdm.tqdm(runs, unit="run", desc="scoring", disable=None):
        folder = model_dir(options.output_dir, pattern, seed)
        bits[pattern].append(score(folder, options.eval_examples or None))
    folders = {name: model_dir(options.output_dir, name, 0) for name in PATTERNS}
    speeds = time_steps(folders, options.rounds)
    lines = table(bits, speeds)
    print("\n".join(lines))
    folder = pathlib.Path(options.output_dir)
    folder.joinpath("patterns.md").write_text("\n".join(lines) + "\n")
    figures = {"bits_per_byte": bits, "tokens_per_second": speeds}
    folder.joinpath("patterns.json").write_text(json.dumps(figures, indent=1) + "\n")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(
            f"Settings are given as --name=value. Received: {argv[1:]}"
        )
    try:
        run(flags.FLAGS)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    define_flags()
    app.run(main)
