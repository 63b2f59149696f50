"""The field's own tests, with the figures of others beside ours.

    python -m benchmarks.tasks --only=mqar_64x4 --patterns=full,local,token_choice
    python -m benchmarks.tasks --only='mad_*' --hparams=train_steps=2000
    python -m benchmarks.tasks --print_only

Trains patterns of heads on tasks that others have published, and scores them. Finished
runs go into a JSON file (`--output`) at once. A run that is stopped, or takes longer
than `--minutes`, goes on where it was when the same command comes again. Prints a table
of all that the file has of what is asked for; rows of others are marked as published.
"""

import fnmatch
import itertools
import pathlib
import time

from absl import app
from absl import flags

from benchmarks import contest
from benchmarks import pattern_heads
from benchmarks.report import say
from benchmarks.tasks import network
from benchmarks.tasks import record
from benchmarks.tasks.settings import CONVOLUTION
from benchmarks.tasks.settings import FIRST_LAYERS
from benchmarks.tasks.settings import LOCAL
from benchmarks.tasks.settings import TASKS
from benchmarks.tasks.settings import Settings
from routing_tf.files.misspelt import did_you_mean
from routing_tf.models import patterns
from routing_tf.models.hyperparameters import parse_overrides

# All but the changes that MAD makes of each of its own.
MAIN = "mqar_*,forgetting_*,compositional_*,mad_recall,mad_recall_v*_l*,mad_noisy"
MAIN += ",mad_fuzzy,mad_copying,mad_memorization,mad_compression,selective_copying_*"
MAIN += ",induction_*,needles_*,phonebook_*,listops_*"
MOST_CACHE_BYTES = 2**32


def named(flag, names, known):
    """Returns the known names that names, or patterns such as `'mad_*'`, stand for."""
    found = {}
    for name in names:
        own = fnmatch.filter(known, name.strip().replace(" ", "_"))
        if not own:
            raise ValueError(
                f"--{flag} must be any of {', '.join(known)}, or patterns of them such "
                f"as '{known[0][:3]}*', joined by commas. Received: {name!r}."
                f"{did_you_mean(name, known)}"
            )
        found |= dict.fromkeys(own)
    return list(found)


def fits(task, pattern):
    """Tells whether a pattern has a form for a task: causal, or for encoders."""
    own = patterns.find(pattern)
    if pattern == LOCAL:
        return True
    if task.readout == "mean":
        return patterns.is_of_encoders(pattern)
    return own is None or (own.of_decoders and not own.of_images)


def shifts_of(task, pattern, asked):
    """Returns the key shifts asked for, or 0 where the pattern has no other."""
    name = pattern if patterns.find(pattern) else pattern.replace("_", " ")
    return asked if task.readout != "mean" and pattern_heads.key_shift_of(name) else [0]


class Benchmark:
    """The runs that the flags ask for, and their record.

    Args:
        options: the parsed flags.

    Attributes:
        rows: dict from names of tasks to rows, each a list of the `Settings` of all
            seeds.
    """

    def __init__(self, options):
        self.options = options
        shifts = contest.check_list("key_shifts", options.key_shifts, ("0", "1"))
        firsts = contest.check_list("first_layers", options.first_layers, FIRST_LAYERS)
        known = [LOCAL, *filter(None, patterns.OWN), *patterns.all_patterns()]
        names = named("patterns", options.patterns, known)
        self.rows = {}
        for task in named("only", options.only, list(TASKS)):
            self.rows[task] = [
                self._row(task, name, shift, first)
                for name in names
                if fits(TASKS[task], name)
                for shift in shifts_of(TASKS[task], name, sorted(map(int, shifts)))
                for first in firsts
            ]
        self.record = record.Record(options.output, "--output")

    def _row(self, task, pattern, shift, first):
        shifted = {"routed_key_shift": shift} if shift else {}
        changes = shifted | parse_overrides(self.options.hparams)
        row = [
            Settings(task, pattern, seed, first, self.options.stop_at, changes)
            for seed in range(self.options.seeds)
        ]
        _ = row[0].hyperparameters  # which refuses what does not go together
        return row

    def train(self):
        """Trains and scores what the record lacks."""
        for settings in itertools.chain(*itertools.chain(*self.rows.values())):
            known = self.record.find(settings.key)
            if known and not self._missing(settings, known):
                continue
            try:
                self._run(settings, known or {})
            except network.TooSlow as error:
                say(f"{settings.folder} is left, as --minutes are over: {error}.")

    def _missing(self, settings, known):
        """The longer contexts that are asked for and not scored yet."""
        if settings.first_layer == CONVOLUTION:  # which has no cache
            return []
        return [
            length
            for length in settings.of_task.contexts
            if length <= self.options.longest
            and str(length) not in known.get("contexts", {})
        ]

    def _run(self, settings, known):
        """Trains a run, or takes it as it was trained, and scores it."""
        started, model = time.perf_counter(), network.Network(settings)
        folder = pathlib.Path(self.options.runs_dir, settings.folder)
        model.train(folder, self.options.minutes)
        if not known:
            known = {"score": round(model.score(), 4), "steps": model.steps_done}
            known["seconds"] = round(time.perf_counter() - started)
            known["contexts"] = {}
            self.record.add(settings.key, known)
        for length in self._missing(settings, known):
            size, number = model.cache_bytes(length), self.options.context_rows
            fits = number * size <= MOST_CACHE_BYTES
            score = round(model.score_stream(number, length), 4) if fits else None
            known["contexts"][str(length)] = {"score": score, "cache_bytes": size}
            self.record.add(settings.key, known)
        say(f"{settings.folder}: {known['score']:.4f} after {known['steps']:,} steps")

    def lines(self):
        """Returns the lines of the table."""
        rows = []
        for task, own in self.rows.items():
            for settings in own:
                rows += self._cells(settings)
            for system, score, source in TASKS[task].published:
                rows.append([task, f"{system} (published)", score, source])
        return record.table(["task", "heads", "score", "with"], rows)

    def _cells(self, row):
        settings, runs = row[0], self._runs(row)
        task, name = settings.of_task, title(settings)
        scores = [run["score"] for run in runs] or "not run"
        rows = [[task.name, name, scores, budget(settings, runs)]]
        for length in task.contexts:
            found = [run["contexts"].get(str(length)) for run in runs]
            if found := [each for each in found if each]:
                scores = [each["score"] for each in found if each["score"] is not None]
                size = found[0]["cache_bytes"] / 2**10
                place = f"{task.name}, {length:,} tokens"
                rows.append([place, name, scores or "-", f"a cache of {size:,.0f} KiB"])
        return rows

    def _runs(self, row):
        found = [self.record.find(settings.key) for settings in row]
        return [run for run in found if run]

    def draw(self):
        """Returns a figure of score and memory against context."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.5), layout="constrained")
        panels = dict(zip(("score", "cache_bytes"), figure.subplots(1, 2)))
        for row in itertools.chain(*self.rows.values()):
            for run in self._runs(row):
                name, found = f"{row[0].task}, {title(row[0])}", run["contexts"].items()
                for kind, axes in panels.items():
                    points = [
                        (int(n), x[kind]) for n, x in found if x[kind] is not None
                    ]
                    if points:
                        axes.plot(*zip(*sorted(points)), marker=".", label=name)
        for kind, axes in panels.items():
            axes.set_xscale("log", base=2)
            axes.set(xlabel="context, tokens", ylabel=kind.replace("_", " "))
            axes.grid(alpha=0.3)
        panels["cache_bytes"].set_yscale("log")
        panels["score"].legend(fontsize="x-small")
        return figure


def title(settings):
    """Returns a row's name: pattern, key shift, first layer and what was changed."""
    changes = {"routed_key_shift": 0, **settings.changes}
    parts = [settings.pattern, f"key_shift {changes.pop('routed_key_shift')}"]
    if settings.first_layer == CONVOLUTION:
        parts.append("above a convolution")
    for name in ("learning_rate", "train_steps", "batch_tokens"):
        changes.pop(name, None)  # which `budget` tells
    return ", ".join([*parts, *(f"{name}={value}" for name, value in changes.items())])


def budget(settings, runs):
    """Returns what a row was trained with, in words."""
    h, task = settings.hyperparameters, settings.of_task
    seen = "all" if settings.pattern == "full" else f"{h.attention_window:,}"
    steps = sorted({run["steps"] for run in runs} or {h.train_steps})
    shown = " to ".join(dict.fromkeys(f"{n:,}" for n in (steps[0], steps[-1])))
    return (
        f"{seen} of {task.length:,} tokens in sight, width {h.hidden_dim}, {shown} "
        f"steps of {settings.batch_size}, learning rate {h.learning_rate:g}; "
        f"{task.score}"
    )


def benchmark(options):
    """Trains what the record lacks; prints the table and draws the plot."""
    runs = Benchmark(options)
    if not options.print_only:
        runs.train()
    print("\n".join(runs.lines()))
    if options.plot:
        runs.draw().savefig(options.plot, dpi=150)


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    texts = {
        "hparams": ("", "Hyperparameters that are not the task's, as name=value,..."),
        "output": ("benchmarks/tasks/runs.json", "JSON file with all runs."),
        "runs_dir": ("runs/tasks", "Folder of what runs have learned."),
        "plot": (None, "Plot of longer contexts to write: .png, .svg, .pdf."),
    }
    for name, (default, text) in texts.items():
        flags.DEFINE_string(name, default, text, **define)
    lists = {
        "only": (MAIN, "Tasks, or patterns of their names such as 'mad_*'."),
        "patterns": (
            "full,local,token_choice",
            "Names that the hyperparameter `routing` can have, or local. Those that "
            "have no form for a task have no row there.",
        ),
        "key_shifts": ("1", "0, 1 or both, where a pattern has both."),
        "first_layers": (LOCAL, f"Any of {', '.join(FIRST_LAYERS)}."),
    }
    for name, (default, text) in lists.items():
        flags.DEFINE_list(name, default.split(","), text, **define)
    numbers = {
        "seeds": (1, "Runs of each row."),
        "longest": (65536, "Longest context of tasks that have several."),
        "context_rows": (16, "Sequences of each context."),
    }
    for name, (default, text) in numbers.items():
        flags.DEFINE_integer(name, default, text, lower_bound=1, **define)
    flags.DEFINE_float(
        "stop_at", 1.0, "Accuracy at which a run ends, on 256 sequences.", **define
    )
    flags.DEFINE_float(
        "minutes", 30.0, "A run that takes longer is left, and goes on later.", **define
    )
    flags.DEFINE_bool("print_only", False, "Whether nothing is trained.", **define)


def main(argv):
    return contest.command(argv, benchmark)


if __name__ == "__main__":
    define_flags()
    app.run(main)
