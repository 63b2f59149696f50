"""Asks SmolLM2-135M for a number that it has read long before.

    python -m benchmarks.retrofit.needles --texts=TEXTS

The two tasks are those of RULER (https://arxiv.org/abs/2404.06654) with one needle: in
sentences that repeat, and in WikiText. The question goes through the same heads as all
other tokens, and an answer is right if each of its tokens is the most likely one. The
figures of each sample go into a file: a second call goes on where the first was
stopped, and `--print_only` prints what is there.
"""

import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from keras import ops

from benchmarks import machine
from benchmarks import record
from benchmarks.retrofit import contenders
from benchmarks.retrofit import texts

TASKS = ("repeated sentences", "WikiText")
NAMES = (
    "full attention",
    "multipole with 128 clusters",
    "multipole with whole clusters",
    "multipole with 16 whole clusters",
)
SENTENCES = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and "
    "back again. "
)
START = (
    "Some special magic numbers are hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the numbers afterwards.\n"
)
NEEDLE = "One of the special magic numbers for {word} is: {number}. "
QUESTION = (
    "\nWhat is the special magic number for {word} mentioned in the provided text? The "
    "special magic number for {word} mentioned in the provided text is"
)
WORDS = ("apple", "river", "window", "garden", "silver", "planet", "winter", "music")


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    texts.define_folder(values)
    known = list(contenders.CONTENDERS)
    flags.DEFINE_list("contenders", list(NAMES), f"Any of: {known}.", **define)
    flags.DEFINE_integer("length", 1024, "Tokens of a sample.", **define)
    flags.DEFINE_integer("keys", 260, "Keys that a query reads.", **define)
    flags.DEFINE_integer("num_samples", 30, "Samples of each task.", **define)
    flags.DEFINE_string(
        "results", "benchmarks/retrofit/needles.json", "File of the figures.", **define
    )
    flags.DEFINE_bool("print_only", False, "Whether to run nothing.", **define)


def main(argv):
    """Runs what the record does not have, and prints it."""
    del argv
    options = flags.FLAGS
    runs = record.Record(options.results)
    if not options.print_only:
        for name in options.contenders:
            add_missing(runs, name, options)
    print("\n".join(table(runs, options)))


def settings_of(name, task, sample, options):
    """Returns what identifies a run."""
    return {
        "contender": name,
        "keys": 0 if name == "full attention" else options.keys,
        "length": options.length,
        "task": task,
        "sample": sample,
    }


def add_missing(runs, name, options):
    """Asks one model, and writes each answer into the record at once."""
    from benchmarks.retrofit import smollm2

    missing = runs.missing(
        settings_of(name, task, sample, options)
        for sample in range(options.num_samples)
        for task in TASKS
    )
    if not missing:
        return
    lm = smollm2.load()
    tokenizer = lm.preprocessor.tokenizer
    calibration = texts.calibration_of(tokenizer, options.texts)
    contenders.CONTENDERS[name].put_into(lm, options.keys, calibration)
    model = tf.function(lm)
    wiki = texts.ids_of(tokenizer, texts.SCORED["WikiText"], options.texts, 2**16)
    hay = {
        "repeated sentences": ids_of(tokenizer, SENTENCES * (options.length // 10)),
        "WikiText": wiki,
    }
    for settings in missing:
        number = settings["sample"]
        row, answer = sample_of(
            tokenizer, hay[settings["task"]], options.length, number
        )
        is_right = is_answered(model, row, answer)
        runs.add(settings, {"is_right": is_right, **machine.describe()})
        print(f"{settings}: {is_right}", flush=True)


def ids_of(tokenizer, text):
    """Returns the ids of a text, `<int32>[length]`."""
    return np.asarray(tokenizer(text), "int32")


def sample_of(tokenizer, hay, length, seed):
    """Returns a row of ids with its answer at the end, and the length of the answer.

    Args:
        tokenizer: of the model.
        hay: ids of which a part surrounds the needle.
        length: number of ids of the row.
        seed: of the needle, its place and the part.
    """
    rng = np.random.default_rng(seed)
    words = {
        "word": str(rng.choice(WORDS)),
        "number": str(rng.integers(1_000_000, 10_000_000)),
    }
    needle = ids_of(tokenizer, NEEDLE.format(**words))
    question = ids_of(tokenizer, QUESTION.format(**words))
    answer = ids_of(tokenizer, " {number}".format(**words))
    start = ids_of(tokenizer, START)
    others = (start, needle, question, answer)
    room = length - sum(len(part) for part in others)
    first = rng.integers(max(len(hay) - room, 1))
    hay, place = hay[first : first + room], rng.integers(room)
    parts = (start, hay[:place], needle, hay[place:], question, answer)
    return np.concatenate(parts), len(answer)


def is_answered(model, row, number):
    """Whether each of the last `number` ids is the most likely one."""
    ids = tf.constant(row[None, :-1])
    logits = model({"token_ids": ids, "padding_mask": tf.ones_like(ids)})
    found = ops.convert_to_numpy(ops.argmax(logits[0, -number:], axis=-1))
    return bool(np.array_equal(found, row[-number:]))


def table(runs, options):
    """Returns the lines of a table: the share of right answers, and their number."""
    rows = []
    for name in options.contenders:
        cells = [name]
        for task in TASKS:
            found = [
                runs.find(settings_of(name, task, sample, options))
                for sample in range(options.num_samples)
            ]
            found = [run["is_right"] for run in found if run]
            share = f"{np.mean(found):.2f} ({sum(found)} of {len(found)})"
            cells.append(share if found else "-")
        rows.append(cells)
    title = f"right answers, {options.length:,} tokens, {options.keys} keys"
    return record.table([title, *TASKS], rows)


if __name__ == "__main__":
    define_flags()
    app.run(main)
