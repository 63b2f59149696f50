"""The field's own tests, with the figures of others beside ours.

    python -m benchmarks.tasks --only=mqar_64x4 --patterns=full,local,token_choice
    python -m benchmarks.tasks --print_only

Trains patterns of heads on tasks that others have published, and scores them. Finished
runs go into a JSON file (`--output`) at once. A run that is stopped, or takes longer
than `--minutes`, goes on where it was when the same command comes again. Prints a table
of all that the file has of what is asked for; rows of others are marked as published.
"""

import fnmatch
import functools
import itertools
import pathlib
import time

from absl import app
from absl import flags

from benchmarks import contest
from benchmarks import multipole_rows  # noqa: F401, registers patterns
from benchmarks import pattern_heads
from benchmarks import record
from benchmarks.report import say
from benchmarks.tasks import network
from benchmarks.tasks.settings import CONVOLUTION
from benchmarks.tasks.settings import FIRST_LAYERS
from benchmarks.tasks.settings import LOCAL
from benchmarks.tasks.settings import TASKS
from benchmarks.tasks.settings import Settings
from routing_tf.files.names import did_you_mean
from routing_tf.models import patterns
from routing_tf.models.hyperparameters import parse_overrides

# All but the changes that MAD makes of each of its own.
MAIN = [
    *("mqar_*", "forgetting_*", "compositional_*", "mad_recall", "mad_recall_v*_l*"),
    *("mad_noisy", "mad_fuzzy", "mad_copying", "mad_memorization", "mad_compression"),
    *("selective_copying_*", "induction_*", "needles_*", "phonebook_*", "listops_*"),
]
PATTERNS = ["full", LOCAL, "token_choice"]
SEEN = {"full": "all", "linear": "sums over all"}  # others: a number of tokens
MOST_CACHE_BYTES = 2**32


def named(flag, names, known):
    """Returns the known names that names, or patterns such as `'mad_*'`, stand for."""
    found = {}
    for name in names:
        own = fnmatch.filter(known, name.strip().replace(" ", "_"))
        if not own:
            raise ValueError(
                f"--{flag} must be names, or patterns such as 'mqar*'. Received: "
                f"{name!r}.{did_you_mean(name, known)} Names are: {', '.join(known)}"
            )
        found |= dict.fromkeys(own)
    return list(found)


def fits(task, pattern):
    """Returns whether a pattern has a form for a task: causal, or for encoders."""
    own = patterns.find(pattern)
    if pattern == LOCAL:
        return True
    if task.is_of_encoders:
        return patterns.is_of_encoders(pattern)
    return own is None or (own.of_decoders and not own.of_images)


class Benchmark:
    """The runs that the parsed flags ask for, and their record.

    `rows` is a dict from names of tasks to rows, lists of the `Settings` of all seeds.
    """

    def __init__(self, options):
        self.options = options
        known = [LOCAL, *filter(None, patterns.OWN), *patterns.all_patterns()]
        names = named("patterns", options.patterns, known)
        tasks = [TASKS[name] for name in named("only", options.only, list(TASKS))]
        self.rows = {
            task.name: [
                [
                    Settings(task.name, name, seed, **row)
                    for seed in range(options.seeds)
                ]
                for name in names
                if fits(task, name)
                for row in self._choices(task, name)
            ]
            for task in tasks
        }
        for row in self._all_rows():
            _ = row[0].hyperparameters  # which refuses what does not go together
        self.record = record.Record(options.output, "--output")

    def _choices(self, task, pattern):
        """Yields what the rows of a pattern differ in, as arguments of `Settings`."""
        options, changes = self.options, parse_overrides(self.options.hparams)
        shifts = contest.check_list("key_shifts", options.key_shifts, ("0", "1"))
        firsts = contest.check_list("first_layers", options.first_layers, FIRST_LAYERS)
        name = pattern if patterns.find(pattern) else pattern.replace("_", " ")
        if task.is_of_encoders or not pattern_heads.key_shift_of(name):
            shifts = ["0"]
        firsts = [LOCAL] if task.is_of_encoders else firsts
        for shift, first in itertools.product(sorted(shifts), firsts):
            own = {"routed_key_shift": 1} | changes if shift == "1" else changes
            yield {"first_layer": first, "stop_at": options.stop_at, "changes": own}

    def train(self):
        """Trains and scores what the record lacks."""
        for settings in itertools.chain(*self._all_rows()):
            known = self.record.find(settings.key)
            if known and not self._missing(settings, known):
                continue
            try:
                self._run(settings, known or {})
            except network.TooSlow as error:
                say(f"{settings.folder} is left, as --minutes are over: {error}.")

    def _missing(self, settings, known):
        """The contexts to score; a convolution has no cache."""
        done = known.get("contexts", {})
        missing = [n for n in settings.of_task.contexts if str(n) not in done]
        if settings.first_layer == CONVOLUTION:
            return []
        return [length for length in missing if length <= self.options.longest]

    def _run(self, settings, known):
        """Trains a run, or takes it as it was trained, and scores it."""
        started, model = time.perf_counter(), network.Network(settings)
        folder = pathlib.Path(self.options.runs_dir, settings.folder)
        model.train(folder, self.options.minutes, known.get("steps"))
        if not known:
            known = {"score": round(model.score(), 4), "steps": model.steps_done}
            known["seconds"] = round(time.perf_counter() - started)
            known["contexts"] = {}
            self.record.add(settings.key, known)
        for length in self._missing(settings, known):
            size, number = model.cache_bytes(length), self.options.context_rows
            score = None
            if number * size <= MOST_CACHE_BYTES:
                score = round(model.score_stream(number, length), 4)
            known["contexts"][str(length)] = {"score": score, "cache_bytes": size}
            self.record.add(settings.key, known)
        say(f"{settings.folder}: {known['score']:.4f} after {known['steps']:,} steps")

    def lines(self):
        """Returns the lines of the table."""
        rows = []
        for task, own in self.rows.items():
            for settings in own:
                rows += self._cells(settings)
            peers = TASKS[task].published if self.options.peers else ()
            rows += [[task, f"{x} (published)", *others] for x, *others in peers]
        return record.table(["task", "heads", "score", "with"], rows)

    def _cells(self, row):
        settings, runs = row[0], self._runs(row)
        task, name = settings.of_task, title(settings)
        scores = [run["score"] for run in runs] or "not run"
        rows = [[task.name, name, scores, budget(settings, runs)]]
        for length in task.contexts:
            found = [x for run in runs if (x := run["contexts"].get(str(length)))]
            scores = [each["score"] for each in found if each["score"] is not None]
            for size in {each["cache_bytes"] / 2**10 for each in found}:
                place = f"{task.name}, {length:,} tokens"
                rows.append([place, name, scores, f"a cache of {size:,.0f} KiB"])
        return rows

    def draw(self):
        """Returns a figure of score and memory against context."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.5), layout="constrained")
        panels = dict(zip(("score", "cache_bytes"), figure.subplots(1, 2)))
        for row, (kind, axes) in itertools.product(self._all_rows(), panels.items()):
            for run in self._runs(row):
                found = {int(n): x[kind] for n, x in run["contexts"].items()}
                points = sorted((n, x) for n, x in found.items() if x is not None)
                axes.plot(
                    *zip(*points), marker=".", label=f"{row[0].task}, {title(row[0])}"
                )
            axes.set_xscale("log", base=2)
            axes.set(xlabel="context, tokens", ylabel=kind.replace("_", " "))
        panels["cache_bytes"].set_yscale("log")
        panels["score"].legend(fontsize="x-small")
        return figure

    def _all_rows(self):
        return itertools.chain(*self.rows.values())

    def _runs(self, row):
        found = [self.record.find(settings.key) for settings in row]
        return [run for run in found if run]


def title(settings):
    """Returns a row's name: pattern, key shift, first layer and what was changed."""
    changes = {"routed_key_shift": 0, **settings.changes}
    parts = [settings.pattern, f"key_shift {changes.pop('routed_key_shift')}"]
    parts += ["above a convolution"] * (settings.first_layer == CONVOLUTION)
    told = ("learning_rate", "train_steps", "batch_tokens")  # by `budget`
    parts += [f"{name}={x}" for name, x in changes.items() if name not in told]
    return ", ".join(parts)


def budget(settings, runs):
    """Returns what a row was trained with, in words."""
    h, task = settings.hyperparameters, settings.of_task
    seen = SEEN.get(settings.pattern, f"{h.attention_window:,}")
    steps = sorted({run["steps"] for run in runs} or {h.train_steps})
    shown = " to ".join(dict.fromkeys(f"{n:,}" for n in (steps[0], steps[-1])))
    return (
        f"{task.score}; sees {seen} of {task.length:,} tokens, width {h.hidden_dim}, "
        f"{shown} steps of {settings.batch_size}, learning rate {h.learning_rate:g}"
    )


def benchmark(options):
    """Trains what the record lacks; prints the table and draws the plot."""
    runs = Benchmark(options)
    if not options.print_only:
        runs.train()
    print("\n".join(runs.lines()))
    if options.plot:
        runs.draw().savefig(options.plot, dpi=150)


_COUNT = functools.partial(flags.DEFINE_integer, lower_bound=1)
FLAGS = (
    (flags.DEFINE_list, "only", MAIN, "Tasks, or patterns of names such as 'mad_*'."),
    (flags.DEFINE_list, "patterns", PATTERNS, "Any name of `routing`, or local."),
    (flags.DEFINE_list, "key_shifts", ["1"], "0, 1 or both, where a pattern has both."),
    (flags.DEFINE_list, "first_layers", [LOCAL], f"Any of {', '.join(FIRST_LAYERS)}."),
    (flags.DEFINE_string, "hparams", "", "Other hyperparameters, as name=value,..."),
    (_COUNT, "seeds", 1, "Runs of each row."),
    (_COUNT, "longest", 65536, "Longest context of tasks that have several."),
    (_COUNT, "context_rows", 16, "Sequences of each context."),
    (flags.DEFINE_float, "stop_at", 1.0, "Held-out accuracy at which a run ends."),
    (flags.DEFINE_float, "minutes", 30.0, "Longer runs are left, and go on later."),
    (flags.DEFINE_string, "output", "benchmarks/tasks/runs.json", "File of all runs."),
    (flags.DEFINE_string, "runs_dir", "runs/tasks", "Folder of trained weights."),
    (flags.DEFINE_string, "plot", None, "Plot of contexts to write: .png, .svg, .pdf."),
    (flags.DEFINE_bool, "peers", True, "Whether to print what others published."),
    (flags.DEFINE_bool, "print_only", False, "Whether nothing is trained."),
)


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    for define, name, default, text in FLAGS:
        define(name, default, text, flag_values=values)


def main(argv):
    return contest.command(argv, benchmark)


if __name__ == "__main__":
    define_flags()
    app.run(main)
