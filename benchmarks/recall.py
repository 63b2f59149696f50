"""Multi-query associative recall (MQAR): which patterns find what they have read?

    python -m benchmarks.recall --seeds=0,1,2 --plot=recall.png

Two layers of attention, the first one local, the second one the pattern, are trained
from scratch to tell the value of a key that comes again. Finished runs go into a JSON
file (`--results`) at once, and a second call goes on from there. Prints a Markdown
table of all that the file has of the settings asked for: accuracy on held-out
sequences, mean ± standard deviation over the seeds, and their number.

With `--synonyms` keys are alike and not equal: a key comes again as another token.
With several `--learning_rates` each row takes the one that is best for the first seed
at 128 tokens, 8 pairs and window 32.
"""

import ast
import itertools
import re

import numpy as np
from absl import app
from absl import flags

from benchmarks import contest
from benchmarks import recall_data
from benchmarks import recall_model
from benchmarks import record
from benchmarks.recall_model import scopes
from benchmarks.report import say
from benchmarks.tasks import mqar

OF_TABLE = ("full", "local", "hashed", "random", "expert choice", "token choice")
PATTERNS = (*OF_TABLE, "multipole")
CLUSTERED, ROUTED = PATTERNS[2:], PATTERNS[4:]
CHOOSING = ("hashed", "random", "token choice")  # each token its cluster
OF_ALL_CLUSTERED = ("share_query_key", "query_cluster")  # arguments
OF_HASHED = ("num_rounds",)
TUNING = (128, 8, 32)  # length, pairs and window


def settings_of(options, pattern, key_shift, place, rate=None, seed=0):
    """Returns the `Settings` of a run.

    Args:
        options: the parsed flags.
        pattern: one of `PATTERNS`.
        key_shift: 0 or 1.
        place: tuple of length, pairs, window and number of steps; None for the
            pattern's default.
        rate: learning rate; None (the default) for the pattern's default.
        seed: of weights and data. Defaults to 0.
    """
    length, pairs, window, steps = place
    arguments = parse_options(options.options) if pattern in CLUSTERED else {}
    arguments = {k: v for k, v in arguments.items() if takes(pattern, k)}
    num_clusters = options.num_clusters or max(2, 2 * length // window)
    vocabulary = options.vocabulary or max(512, 2 * length)
    mqar.check_sizes(length, pairs, vocabulary, options.synonyms)
    return recall_data.Settings(
        pattern=pattern,
        key_shift=key_shift,
        length=length,
        pairs=pairs,
        window=None if pattern == "full" else window,
        num_clusters=num_clusters if pattern in CLUSTERED else None,
        steps=steps or 800,
        learning_rate=rate or 3e-3,
        seed=seed,
        vocabulary=vocabulary,
        batch_size=options.batch_size or max(1, 8192 // length),
        width=options.width,
        num_heads=options.num_heads,
        key_dim=options.key_dim,
        options=arguments,
        synonyms=options.synonyms,
        exploring_queries=options.exploring_queries if pattern in CLUSTERED else 0,
    )


def takes(pattern, name):
    """Returns whether heads of a pattern take an argument that is not of all."""
    if name in OF_ALL_CLUSTERED:
        return True
    return pattern == "hashed" if name in OF_HASHED else pattern in ROUTED


def parse_options(items):
    """Reads `name=value` items into a dict; values are Python's, or words."""
    found = {}
    for item in items:
        name, separator, value = (part.strip() for part in item.partition("="))
        if not name.isidentifier() or not separator:
            raise ValueError(
                "--options must be name=value, joined by commas. Received: "
                f"{item!r}. Write for example --options=decay=0.99,revive_after=50"
            )
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def numbers_of(name, texts, kind, least, example):
    """Returns the items of a list flag as numbers of a kind, none below the least."""
    try:
        found = [kind(text) for text in texts]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise ValueError(
            f"--{name} must be numbers of at least {least}, joined by commas. Received:"
            f" --{name}={','.join(texts)}. Write for example --{name}={example}"
        )
    return found


def places_of(options):
    """Returns the columns of the table: tuples of length, pairs, window and steps."""
    for text in options.sizes:
        if not re.fullmatch(r"\d+x\d+", text):
            raise ValueError(
                "--sizes must be LENGTHxPAIRS, joined by commas. Received: "
                f"{text!r}. Write for example --sizes=128x8,256x16"
            )
    sizes = [tuple(map(int, text.split("x"))) for text in options.sizes]
    windows = numbers_of("windows", options.windows, int, 2, "32,64")
    if any(window % 2 for window in windows):
        raise ValueError(
            "--windows must be even: two blocks of local heads. Received: "
            f"--windows={','.join(options.windows)}. Write for example --windows=32,64"
        )
    steps = [None]
    if options.steps:
        steps = numbers_of("steps", options.steps, int, 1, "800")
    if len(steps) not in (1, len(sizes)):
        raise ValueError(
            "--steps must be one number, or one for each of --sizes. Received: "
            f"--steps={','.join(options.steps)} with --sizes={','.join(options.sizes)}"
        )
    pairs = zip(sizes, itertools.cycle(steps))
    return [(*size, window, own) for size, own in pairs for window in windows]


class Benchmark:
    """The runs that the flags ask for, and their record.

    Args:
        options: the parsed flags.
    """

    def __init__(self, options):
        patterns = contest.check_list("patterns", options.patterns, PATTERNS)
        shifts = contest.check_list("key_shifts", options.key_shifts, ("0", "1"))
        self.options = options
        self.rows = list(itertools.product(patterns, map(int, shifts)))
        self.places = places_of(options)
        self.seeds = numbers_of("seeds", options.seeds, int, 0, "0,1,2")
        self.rates = [None]
        if rates := options.learning_rates:
            self.rates = numbers_of("learning_rates", rates, float, 1e-9, "3e-3,1e-2")
        self.record = record.Record(options.results)

    def settings(self, row, place, seed):
        """Returns the settings of a run, at the best learning rate for its row."""
        tried = [self._found(self._tuning(row, rate)) for rate in self.rates]
        accuracies = [run["accuracy"]["full"] if run else -1.0 for run in tried]
        rate = self.rates[int(np.argmax(accuracies))]
        return settings_of(self.options, *row, place, rate, seed)

    def _tuning(self, row, rate):
        steps = {place[:3]: place[3] for place in self.places}
        place = (*TUNING, steps.get(TUNING))
        return settings_of(self.options, *row, place, rate, self.seeds[0])

    def _found(self, settings):
        return self.record.find(settings.key)

    def train(self):
        """Trains what the record lacks."""
        if len(self.rates) > 1:
            for row, rate in itertools.product(self.rows, self.rates):
                self._train(self._tuning(row, rate))
        if self.options.seeds_at_once:
            for place, row in itertools.product(self.places, self.rows):
                all_seeds = [self.settings(row, place, seed) for seed in self.seeds]
                self._train_at_once([s for s in all_seeds if not self._found(s)])
            return
        for seed, place, row in itertools.product(self.seeds, self.places, self.rows):
            self._train(self.settings(row, place, seed))

    def _train(self, settings):
        by_centroid = settings.options.get("choice") == "centroid"
        chooses = settings.pattern in CHOOSING or by_centroid
        diagnose = self.options.diagnose and chooses
        known = self._found(settings)
        if known and (not diagnose or "diagnosis" in known):
            return
        found = recall_model.train(settings, self.options.eval_every, diagnose)
        self.record.add(settings.key, found)
        scores = ", ".join(f"{v:.3f} ({k})" for k, v in found["accuracy"].items())
        say(f"{settings.name}: {scores}, {found['seconds_per_step']} s per step")

    def _train_at_once(self, settings):
        """Trains the same model from several seeds, on JAX."""
        from benchmarks.seeds_at_once import train_recall

        if any(len(scopes(each.pattern)) > 1 for each in settings):
            raise ValueError(
                "--seeds_at_once scores in one routing scope. Received: "
                "--patterns=expert choice. Leave one of the two out"
            )
        curves = train_recall(settings, self.options.eval_every) if settings else []
        for each, curve in zip(settings, curves):
            self.record.add(
                each.key, {"accuracy": {"full": curve[-1][1]}, "curve": curve}
            )
            say(f"{each.name}: {curve[-1][1]:.3f}")

    def runs(self, row, place):
        """Returns the finished runs of a cell of the table."""
        found = [self._found(self.settings(row, place, seed)) for seed in self.seeds]
        return [run for run in found if run]

    def about(self):
        """Returns lines that tell the settings of the rows."""
        lines = []
        for row, place in itertools.product(self.rows, self.places):
            s = self.settings(row, place, 0)
            lines.append(
                f"{s.length} tokens: vocabulary "
                f"{s.vocabulary}, {s.steps:,} steps of {s.batch_size} sequences, width "
                f"{s.width}, heads of {s.key_dim}: {s.num_heads}."
            )
            if s.synonyms > 1:
                lines[-1] += f" A key comes again as another of {s.synonyms} tokens."
            if s.exploring_queries:
                lines[-1] += f" {s.exploring_queries} queries of a head explore."
        if self.options.options:
            lines.append(f"Options: {', '.join(self.options.options)}.")
        return list(dict.fromkeys(lines))

    def table(self):
        """Returns the lines of the table."""
        rows = []
        for row in self.rows:
            runs = [self.runs(row, place) for place in self.places]
            rate = self.settings(row, self.places[0], 0).learning_rate
            for scope in scopes(row[0]):
                shown = scope if len(scopes(row[0])) > 1 else "both"
                found = [[run["accuracy"][scope] for run in each] for each in runs]
                rows.append([row[0], str(row[1]), shown, f"{rate:g}", *found])
        heads = ["pattern", "key_shift", "scope", "learning rate", *self._titles()]
        return record.table(heads, rows)

    def diagnoses(self):
        """Returns the lines of a table of what routing made of the sequences."""
        heads, rows = [], []
        places = list(zip(self.places, self._titles()))
        for row, (place, title) in itertools.product(self.rows, places):
            runs = [run.get("diagnosis", []) for run in self.runs(row, place)]
            for each in zip(*filter(None, runs)):
                cells = recall_data.columns_of([figures for _, figures in each])
                heads = ["pattern", "key_shift", "size", "step", *cells]
                rows.append([row[0], str(row[1]), title, f"{each[0][0]:,}"])
                rows[-1] += cells.values()
        return record.table(heads, rows) if rows else ["No run is diagnosed."]

    def _titles(self):
        return ["{} tokens, {} pairs, window {}".format(*x) for x in self.places]

    def draw(self):
        """Returns a figure of accuracy against steps, a panel for each column."""
        panels = {
            title: {row: runs for row in self.rows if (runs := self.runs(row, place))}
            for title, place in zip(self._titles(), self.places)
        }
        return recall_data.draw(panels)


def benchmark(options):
    """Trains what the record lacks; prints the table and draws the plot."""
    runs = Benchmark(options)
    if not options.print_only:
        runs.train()
    print("\n".join([*runs.about(), "", *runs.table()]))
    if options.diagnose:
        print("\n".join(["", *runs.diagnoses()]))
    if options.plot:
        runs.draw().savefig(options.plot, dpi=150)


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}

    def many(name, default, text):
        flags.DEFINE_list(name, default, text, **define)

    def size(name, default, text):
        flags.DEFINE_integer(name, default, text, lower_bound=1, **define)

    flags.DEFINE_string(
        "results", "benchmarks/recall.json", "JSON file with all runs.", **define
    )
    flags.DEFINE_string("plot", None, "Plot to write: .png, .svg, .pdf.", **define)
    flags.DEFINE_bool("print_only", False, "Whether nothing is trained.", **define)
    flags.DEFINE_bool(
        "diagnose",
        False,
        "Whether evaluations tell how many queries find their match, where tokens "
        "choose their clusters; a second table shows it by step.",
        **define,
    )
    flags.DEFINE_bool(
        "seeds_at_once",
        False,
        "Whether all seeds take each step together, on JAX; not for expert choice.",
        **define,
    )
    many("patterns", list(OF_TABLE), f"Any of {', '.join(PATTERNS)}.")
    many("key_shifts", ["0", "1"], "0, 1 or both.")
    many("sizes", ["128x8"], "LENGTHxPAIRS.")
    many("windows", ["32"], "Tokens that a query sees, even numbers.")
    many("seeds", ["0"], "A run for each.")
    many("steps", None, "One number, or one for each of --sizes; default: 800.")
    many("learning_rates", None, "Each row takes the best; default: 0.003.")
    many(
        "options",
        ["balance_rate=0.01"],
        f"NAME=VALUE for routed heads ({', '.join(OF_ALL_CLUSTERED)}: for hashed and "
        f"random ones too; {', '.join(OF_HASHED)}: for hashed ones alone).",
    )
    size("num_heads", 1, "Heads of the pattern.")
    size("key_dim", 64, "Size of a head.")
    size("num_clusters", None, "Default: 2 * length / window, and at least 2.")
    size("vocabulary", None, "Default: 512, or twice the length where that is more.")
    size("batch_size", None, "Sequences of a step; default: 8192 / length.")
    size("synonyms", 1, "Tokens that are one key, which comes again as another one.")
    flags.DEFINE_integer(
        "exploring_queries",
        0,
        "Queries of a clustered head that see all earlier tokens while training.",
        lower_bound=0,
        **define,
    )
    size("width", 64, "Size of a hidden state.")
    size("eval_every", 100, "Steps between evaluations.")


def main(argv):
    return contest.command(argv, benchmark)


if __name__ == "__main__":
    define_flags()
    app.run(main)
