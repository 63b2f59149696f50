"""Scores continuations of a context that SmolLM2-135M reads in part, or compresses.

    pip install kvpress
    python -m benchmarks.retrofit.continuation --texts=TEXTS

Presses of kvpress read the context with full attention and keep some pairs of each key
head; the continuation sees those and itself, so up to as many more. Multipole heads
read context and continuation with the same number of keys for every token. Figures of
each window go into a file: a second call goes on where the first was stopped, and
`--print_only` prints what is there.
"""

import itertools
import os
import statistics

import numpy as np
from absl import app
from absl import flags
from tqdm import tqdm

from benchmarks import machine
from benchmarks import record
from benchmarks.retrofit import contenders
from benchmarks.retrofit import texts

FULL = "full attention"
#: Names of presses, with their arguments.
PRESSES = {
    "StreamingLLMPress": {"n_sink": contenders.NUM_SINKS},
    "SnapKVPress": {},
    "TOVAPress": {},
    "ExpectedAttentionPress": {},
    "KeyDiffPress": {},
}
NAMES = (FULL, "multipole with 128 clusters", *PRESSES)


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    texts.define_folder(values)
    flags.DEFINE_list("contenders", list(NAMES), f"Any of: {list(NAMES)}.", **define)
    flags.DEFINE_integer("length", 2048, "Tokens of a window.", **define)
    flags.DEFINE_integer("continuation", 256, "Tokens that are scored.", **define)
    flags.DEFINE_list("read", [], "Last tokens that are read. Default: all.", **define)
    flags.DEFINE_integer(
        "chunk",
        None,
        "Tokens that heads that are not presses read at once, through their caches, "
        "for contexts that do not fit in memory otherwise. Default: all.",
        **define,
    )
    flags.DEFINE_integer("keys", 260, "Keys that a query reads.", **define)
    flags.DEFINE_integer("num_windows", 4, "Windows of each text.", **define)
    flags.DEFINE_string(
        "results",
        "benchmarks/retrofit/continuation.json",
        "File of the figures.",
        **define,
    )
    flags.DEFINE_bool("print_only", False, "Whether to run nothing.", **define)


def main(argv):
    """Scores what the record does not have, and prints it."""
    del argv
    options = flags.FLAGS
    unknown = set(options.contenders) - {*NAMES, *contenders.CONTENDERS}
    if unknown:
        raise app.UsageError(f"--contenders has unknown names: {sorted(unknown)}")
    if options.read and set(options.contenders) & set(PRESSES):
        raise app.UsageError("--read is for heads that are not presses")
    if options.chunk and any(number % options.chunk for number in reads(options)):
        raise app.UsageError("--chunk must divide the numbers of tokens that are read")
    runs = record.Record(options.results)
    if not options.print_only:
        for name in options.contenders:
            add_missing(runs, name, options)
    print("\n".join(table(runs, options)))


def reads(options):
    """Returns how many last tokens of a window are read."""
    return [int(number) for number in options.read or [options.length]]


def settings_of(name, read, text, window, options):
    """Returns what identifies a run."""
    return {
        "contender": name,
        "keys": 0 if name == FULL else options.keys,
        "length": options.length,
        "read": read,
        "continuation": options.continuation,
        "text": text,
        "window": window,
    }


def add_missing(runs, name, options):
    """Scores with one contender, and writes each window into the record at once."""
    from benchmarks.retrofit import smollm2

    missing = runs.missing(
        settings_of(name, read, text, window, options)
        for read in reads(options)
        for window in range(options.num_windows)
        for text in texts.SCORED
    )
    if not missing:
        return
    tokenizer = smollm2.tokenizer_of(smollm2.File())
    score = (pressed if name in PRESSES else changed)(name, options)
    for settings in missing:
        rows = texts.windows_of(
            tokenizer,
            texts.SCORED[settings["text"]],
            options.texts,
            options.length,
            options.num_windows,
        )
        row = rows[settings["window"]][-settings["read"] :]
        # What the last token of the context predicts is known before the compression.
        found = score(row)[1 - options.continuation :]
        nats = -float(np.mean(found))
        runs.add(settings, {"nats": nats, **machine.describe()})
        print(f"{settings}: {nats:.4f}", flush=True)


def changed(name, options):
    """Returns a function from ids to the log-likelihoods of all but the first."""
    from benchmarks.retrofit import smollm2
    from routing_tf.retrofit import scoring

    lm = smollm2.load()
    calibration = texts.calibration_of(lm.preprocessor.tokenizer, options.texts)
    contenders.CONTENDERS[name].put_into(lm, options.keys, calibration)
    if options.chunk:
        return in_chunks(lm, options.chunk)
    return lambda ids: scoring.log_likelihoods(lm, ids[None, :-1], ids[None, 1:])[0]


def in_chunks(lm, size):
    """Returns such a function that reads so many ids at once, through caches."""
    import tensorflow as tf

    from routing_tf.retrofit import generation

    decoder = generation.Decoder(lm)

    @tf.function
    def read(ids, targets, caches, first):
        logits, _, caches = decoder.call_with_cache(ids, caches, first)
        found = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
        return -found[0], caches

    def score(ids):
        caches, found = decoder.make_caches(1, len(ids)), []
        targets = np.append(ids[1:], 0)  # the last one is not scored
        for first in tqdm(range(0, len(ids), size), unit="chunk", disable=None):
            rows = (x[None, first : first + size] for x in (ids, targets))
            scores, caches = read(*map(tf.constant, rows), caches, tf.constant(first))
            found.append(scores.numpy())
        return np.concatenate(found)[:-1]

    return score


def pressed(name, options):
    """Returns such a function of ids after those of the context, by kvpress."""
    import kvpress
    import torch
    import transformers

    from benchmarks.retrofit import smollm2

    path = smollm2.path_of_package()
    folder, file = os.path.split(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32
    ).eval()
    context = options.length - options.continuation
    # Half a key more, so that rounding leaves as many as said.
    ratio = 1 - (options.keys + 0.5) / context
    press = getattr(kvpress, name)(compression_ratio=ratio, **PRESSES[name])

    @torch.no_grad()
    def score(ids):
        ids = torch.tensor(ids, dtype=torch.int64)[None]
        cache = transformers.DynamicCache()
        with press(model):
            model.model(ids[:, :context], past_key_values=cache)
        logits = model(
            ids[:, context:-1],
            past_key_values=cache,
            position_ids=torch.arange(context, options.length - 1)[None],
        ).logits
        found = torch.log_softmax(logits, -1)
        return found.gather(-1, ids[:, context + 1 :, None])[0, :, 0].numpy()

    return score


def table(runs, options):
    """Returns the lines of a table: losses, and those of each window in brackets.

    They are those beyond full attention; or nats where several numbers are read.
    """
    rows = []
    is_loss = not options.read
    for name, read in itertools.product(options.contenders, reads(options)):
        cells = [name if is_loss else f"{name}, {read:,} tokens"]
        for text in texts.SCORED:
            full = nats_of(runs, FULL, read, text, options)
            own = nats_of(runs, name, read, text, options)
            if is_loss and name != FULL:
                losses = [a - b for a, b in zip(own, full, strict=False)]
                cells.append(record.mean_and_each(losses))
            else:
                prefix = "0 " if is_loss else ""
                cells.append(f"{prefix}({statistics.mean(own):.3f})" if own else "-")
        rows.append(cells)
    words = f"the last {options.continuation:,} of {options.length:,} tokens"
    return record.table([f"nats per token, {words}", *texts.SCORED], rows)


def nats_of(runs, name, read, text, options):
    """Returns the nats per token of all windows; none if some are missing."""
    found = [
        runs.find(settings_of(name, read, text, window, options))
        for window in range(options.num_windows)
    ]
    return [] if None in found else [run["nats"] for run in found]


if __name__ == "__main__":
    define_flags()
    app.run(main)
