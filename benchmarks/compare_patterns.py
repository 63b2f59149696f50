"""Trains the main job with other attention patterns instead of its routed heads.

    python -m benchmarks.compare_patterns
    python -m benchmarks.compare_patterns --train_steps=10000 --seeds=1
    python -m benchmarks.compare_patterns --files='books/*.txt' --output_dir=runs/books
    python -m benchmarks.compare_patterns --hparams=key_dim=16
    python -m benchmarks.compare_patterns --print_only

All models have the same width, data and steps, and each pattern reads its own keys
(`key_shift` 0) or those of the token before (1). Each model is trained from several
seeds, and scored on the test split in both routing scopes where they differ. Then all
take turns in training steps, which tells their speed. The runs stay in the output
folder; the figures are kept in a file, and what it has is not computed again, so a
second call goes on where the first was stopped. A table is printed for all data,
hyperparameters and numbers of steps that are there.
"""

import itertools
import json
import logging
import pathlib
import re
import statistics
import subprocess
import sys
import time

import keras
import tqdm
from absl import app
from absl import flags

from benchmarks import contest
from benchmarks import multipole_rows
from benchmarks import pattern_heads
from routing_tf import training
from routing_tf.models.hyperparameters import parse_overrides
from routing_tf.models.presets import preset_hyperparameters
from routing_tf.models.score import TokenScorer
from routing_tf.training import checkpoints
from routing_tf.training import evaluation
from routing_tf.training import loading
from routing_tf.training import run_folder
from routing_tf.zoo import FEED_FORWARDS

PRESET = "python_small"
# Its routed heads, in the last layers, are replaced; window and clusters stay. Local
# heads have that window too, own block and the one before it together.
PATTERNS = {
    "full": {"routing": "full"},
    "local": {"num_local_only_layers": 4, "local_block_length": 32},
    "random": {"routing": "random"},
    "hashed": {"routing": "hashed"},
    "expert choice": {"routing": "expert_choice"},
    "token choice": {"routing": "token_choice"},
    **{name: {"routing": name} for name in pattern_heads.OF_TEXT},
    **{name: {"routing": name} for name in multipole_rows.ROWS},
    "expert threshold": {"routing": "expert_threshold"},
    # Token choice, and other layers in place of its feed-forward layers.
    **{
        name.replace("_", " "): {"routing": "token_choice", "feed_forward": name}
        for name in FEED_FORWARDS
    },
}
DEFAULT_PATTERNS = ["full", "local", "expert choice", "token choice"]
WARM_UP_STEPS = 3
logging.getLogger("tensorflow").setLevel("ERROR")  # many models: many traces


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    flags.DEFINE_string("output_dir", "runs/patterns", "Folder of the runs.", **define)
    flags.DEFINE_string(
        "results", "benchmarks/patterns.json", "File of the figures.", **define
    )
    flags.DEFINE_list(
        "patterns", DEFAULT_PATTERNS, f"Any of: {', '.join(PATTERNS)}.", **define
    )
    flags.DEFINE_list("key_shifts", ["0", "1"], "Any of: 0, 1.", **define)
    flags.DEFINE_integer(
        "seeds", 3, "Runs of each model; 0: only time it.", lower_bound=0, **define
    )
    flags.DEFINE_integer(
        "train_steps",
        preset_hyperparameters(PRESET).train_steps,
        "Steps of each run.",
        lower_bound=1,
        **define,
    )
    flags.DEFINE_integer(
        "eval_examples",
        128,
        "Windows of the test split to score; 0: all.",
        lower_bound=0,
        **define,
    )
    flags.DEFINE_integer(
        "rounds", 20, "Timed steps of each model; 0: none.", lower_bound=0, **define
    )
    flags.DEFINE_string(
        "files",
        None,
        "Text files to train and score on, as `--files` of `routing_tf.train`. They "
        "need an --output_dir of their own. Default: Python's source.",
        **define,
    )
    flags.DEFINE_string(
        "hparams",
        None,
        "Hyperparameters of all models that are not the main job's, as `--hparams` of "
        "`routing_tf.train`.",
        **define,
    )
    flags.DEFINE_bool("print_only", False, "Print what the file has.", **define)


def changes_of(pattern, key_shift):
    """Returns the hyperparameters of a model that differ from the main job's."""
    changes = {**PATTERNS[pattern], "routed_key_shift": key_shift}
    # Where all heads are local, the shift concerns all.
    local_shift = key_shift if pattern == "local" else 0
    return {**changes, "local_key_shift": local_shift}


def model_dir(output_dir, pattern, key_shift, steps, seed, hparams=None):
    """Returns the folder of one run."""
    name = pattern.replace(" ", "_")
    changed = "_" + re.sub(r"[^\w.=-]", "_", hparams) if hparams else ""
    return pathlib.Path(output_dir, f"{name}_{key_shift}_{steps}_{seed}{changed}")


def train(
    folder,
    pattern,
    key_shift,
    seed,
    steps,
    files=None,
    hparams=None,
    eval_every=0,
    eval_examples=2,
):
    """Trains one run, or finishes it, in a process of its own.

    Args:
        folder: the model directory.
        pattern: name of the pattern.
        key_shift: 0 or 1.
        seed: that of weights and order of the data.
        steps: number of training steps.
        files: text files as `--files` takes them; None for Python's source.
        hparams: hyperparameters that are not the main job's; None for none.
        eval_every: steps between evaluations and checkpoints; 0 (the default): no
            evaluations between the first and the last step.
        eval_examples: number of held-out windows in an evaluation.

    Raises:
        ChildProcessError: if the run was stopped before its last step.
    """
    # The last evaluation comes after the last checkpoint.
    if not eval_every and is_done(folder, steps):
        return
    changes = {**changes_of(pattern, key_shift), "train_steps": steps}
    changed = [f"{name}={value}" for name, value in changes.items()]
    command = [
        sys.executable,
        "-m",
        "routing_tf.train",
        f"--model_dir={folder}",
        f"--import={multipole_rows.__name__}",
        *(["--problem=text_files", f"--files={files}"] if files else []),
        f"--hparams_set={PRESET}",
        "--hparams=" + ",".join([*([hparams] if hparams else []), *changed]),
        f"--seed={seed}",
        f"--eval_every={eval_every}",
        *([f"--checkpoint_every={eval_every}"] if eval_every else []),
        f"--eval_examples={eval_examples}",
        "--sample_bytes=0",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if not is_done(folder, steps):
        raise ChildProcessError(
            f"the run in {folder} was stopped before step {steps:,}. Give the command "
            "again to go on"
        )


def is_done(folder, steps):
    """Returns whether the last checkpoint of a run is of this step."""
    saved = checkpoints.paths(folder)
    return bool(saved) and checkpoints.step_of(saved[-1]) == steps


def score(folder, num_examples):
    """Scores one run on the test split.

    Args:
        folder: the model directory.
        num_examples: number of windows; None for all.

    Returns:
        Dict from the routing scope to bits per byte.
    """
    config = run_folder.RunConfig.load(folder)
    problem = config.make_problem()
    lm = loading.load_language_model(checkpoints.paths(folder)[-1])
    scopes = ["full"]
    if config.hyperparameters.sees_later_tokens("full"):
        scopes.append("prefix")
    return {
        scope: evaluation.evaluate(
            TokenScorer(lm, scope), problem, "test", num_examples
        ).bits
        for scope in scopes
    }


def time_steps(models, rounds, hparams=None):
    """Times training steps of several models, one after the other, round by round.

    Args:
        models: list of pairs of pattern and key shift.
        rounds: number of timed steps of each.
        hparams: hyperparameters that are not the main job's; None (the default) for
            none.

    Returns:
        List of pairs of the median tokens per second and the number of weights.
    """
    steps = [training_step(*model, hparams) for model in models]
    seconds = [[] for _ in models]
    for number in tqdm.trange(WARM_UP_STEPS + rounds, desc="timing", disable=None):
        for (step, *_), times in zip(steps, seconds, strict=True):
            started = time.perf_counter()
            step()
            if number >= WARM_UP_STEPS:
                times.append(time.perf_counter() - started)
    return [
        (num_tokens / statistics.median(times), num_weights)
        for (_, num_tokens, num_weights), times in zip(steps, seconds, strict=True)
    ]


def training_step(pattern, key_shift, hparams):
    """Returns a function that takes a training step; how many tokens and weights."""
    changes = parse_overrides(hparams or "") | changes_of(pattern, key_shift)
    settings = preset_hyperparameters(PRESET).replace(**changes)
    config, problem = run_folder.configure("python_source", settings)
    lm = training.build_model(config.hyperparameters, problem)
    training.compile_for_training(lm)
    batch_size = evaluation.batch_size_of(config.hyperparameters, problem)
    dataset = problem.dataset(problem.train_split, batch_size, seed=0)
    inputs, targets, weights = next(dataset.as_numpy_iterator())
    inputs = {name: inputs[name] for name in lm.input}

    def step():
        keras.Model.train_on_batch(lm, inputs, targets, weights)

    return step, float(weights.sum()), lm.count_params()


class Figures:
    """The figures of all runs, in a file that is written after each.

    Args:
        path: the file, which need not be there.
    """

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.entries = []
        if self.path.is_file():
            self.entries = json.loads(self.path.read_text())

    def find(self, **keys):
        """Returns the entries that have all these values."""
        return [
            entry
            for entry in self.entries
            if all(entry.get(name) == value for name, value in keys.items())
        ]

    def add(self, **entry):
        """Adds an entry and writes the file, whole or not at all."""
        self.entries.append(entry)
        lines = ",\n".join(json.dumps(entry) for entry in self.entries)
        written = self.path.with_suffix(".new")
        written.write_text(f"[\n{lines}\n]\n")
        written.replace(self.path)


def table(figures, steps, files, hparams):
    """Returns the lines of a table in Markdown.

    Args:
        figures: `Figures`.
        steps: number of training steps of the runs.
        files: names of the text files they were trained on; None for Python's source.
        hparams: hyperparameters that are not the main job's; None for none.

    Returns:
        List of strings.
    """
    lines = [
        "| in place of the routed heads | key_shift | scope | bits per byte | seeds "
        "| tokens/s | weights |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for pattern, shift in itertools.product(PATTERNS, (0, 1)):
        model = {"pattern": pattern, "key_shift": shift}
        data = {"steps": steps, "files": files, "hparams": hparams}
        runs = figures.find(**model, **data, kind="bits")
        speeds = figures.find(**model, hparams=hparams, kind="speed")
        scopes = list(runs[0]["bits_per_byte"]) if runs else []
        for scope in scopes:
            values = [run["bits_per_byte"][scope] for run in runs]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            speed = f"{speeds[-1]['tokens_per_second']:,.0f}" if speeds else ""
            weights = speeds[-1].get("weights") if speeds else None
            size = f"{weights:,}" if weights else ""
            shown = scope if len(scopes) > 1 else "both"
            speed_and_size = f"{speed} | {size} |" if scope == "full" else " | |"
            lines.append(
                f"| {pattern} | {shift} | {shown} | {statistics.mean(values):.3f}"
                f"{spread} | {len(values)} | {speed_and_size}"
            )
    return lines


def run(options):
    """Trains, scores and times all models; prints the tables.

    Args:
        options: the parsed flags.

    Raises:
        ValueError: if a pattern or a key shift is unknown.
    """
    patterns = contest.check_list("patterns", options.patterns, list(PATTERNS))
    shifts = contest.check_list("key_shifts", options.key_shifts, ["0", "1"])
    models = list(itertools.product(patterns, map(int, shifts)))
    figures = Figures(options.results)
    if not options.print_only:
        train_and_score(options, models, figures)
        if options.rounds:
            speeds = time_steps(models, options.rounds, options.hparams)
            for (pattern, shift), measured in zip(models, speeds, strict=True):
                speed, num_weights = measured
                figures.add(
                    kind="speed",
                    pattern=pattern,
                    key_shift=shift,
                    tokens_per_second=round(speed),
                    weights=num_weights,
                    **({"hparams": options.hparams} if options.hparams else {}),
                )
    tables = {
        (run.get("files"), run["steps"], run.get("hparams"))
        for run in figures.find(kind="bits")
    }
    own_first = sorted(tables, key=lambda each: (each[0] or "", each[1], each[2] or ""))
    for files, steps, hparams in own_first:
        data = files or "Python's source"
        changed = f", {hparams}" if hparams else ""
        print(f"\n{data}, {steps:,} steps{changed}\n")
        print("\n".join(table(figures, steps, files, hparams)))


def names_of(files):
    """Returns the names of text files without their folders; None for none."""
    return files and ",".join(pathlib.Path(path).name for path in files.split(","))


def train_and_score(options, models, figures):
    """Trains and scores the runs that have no figures yet."""
    steps = options.train_steps
    runs = list(itertools.product(range(options.seeds), models))
    for seed, (pattern, shift) in tqdm.tqdm(runs, unit="run", disable=None):
        keys = {
            "kind": "bits",
            "pattern": pattern,
            "key_shift": shift,
            "steps": steps,
            "seed": seed,
            "windows": options.eval_examples,
        }
        if options.files:
            keys["files"] = names_of(options.files)
        if options.hparams:
            keys["hparams"] = options.hparams
        if figures.find(**{"files": None, "hparams": None, **keys}):
            continue
        run = (options.output_dir, pattern, shift, steps, seed)
        folder = model_dir(*run, options.hparams)
        train(folder, pattern, shift, seed, steps, options.files, options.hparams)
        bits = score(folder, options.eval_examples or None)
        rounded = {scope: round(value, 4) for scope, value in bits.items()}
        figures.add(**keys, bits_per_byte=rounded)


def main(argv):
    return contest.command(argv, run)


if __name__ == "__main__":
    define_flags()
    app.run(main)
