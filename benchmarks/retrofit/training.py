"""Trains SmolLM2-135M with multipole heads to say what it said with full attention.

    python -m benchmarks.retrofit.training --texts=TEXTS

First `retrofit.distill` fits queries and keys, layer by layer. Then adapters
(`enable_lora`) are trained on the divergence from the full model's predictions, so that
nothing is learned of the texts that the full model did not know. Nats per token of
windows that are not trained on go into a file, before, between and after. Training
goes on where it was stopped (`--weights`), and `--print_only` prints what is there.
"""

import json
import pathlib
import statistics

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from keras import ops
from tqdm import tqdm

from benchmarks import machine
from benchmarks import record
from benchmarks.retrofit import contenders
from benchmarks.retrofit import texts
from routing_tf import retrofit
from routing_tf.retrofit import scoring

#: Texts to train on, none of them scored: one of WikiText, the others Python source.
TRAINED_ON = (
    "wikitext/valid.txt",
    *("inspect.py", "typing.py", "subprocess.py", "threading.py", "pydoc.py"),
    *("turtle.py", "doctest.py", "zipfile.py", "mailbox.py", "datetime.py"),
)
STAGES = ("full attention", "not trained", "fitted", "fitted, adapters trained")
FULL, UNTRAINED, FITTED, TRAINED = STAGES
#: Flags that decide what is learned.
TRAINING = (
    *("contender", "keys", "length", "fit_steps", "fit_learning_rate"),
    *("steps", "rank", "learning_rate"),
)
SETTINGS = "settings.json"
#: Steps between two files of weights, and those in which the learning rate rises.
SAVED_EVERY, WARMUP = 20, 10


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    texts.define_folder(values)
    known = [name for name in contenders.CONTENDERS if name != FULL]
    flags.DEFINE_enum(
        "contender", "multipole with 128 clusters", known, "What to train.", **define
    )
    flags.DEFINE_integer("keys", 260, "Keys that a query reads.", **define)
    flags.DEFINE_integer("length", 1024, "Tokens of a row to train on.", **define)
    flags.DEFINE_integer("fit_steps", 20, "Rows to fit layers on.", **define)
    flags.DEFINE_float(
        "fit_learning_rate",
        None,
        "The largest one of the fit; None for the constant one of `distill`.",
        **define,
    )
    flags.DEFINE_integer("steps", 280, "Rows to train adapters on.", **define)
    flags.DEFINE_integer("rank", 8, "Rank of the adapters.", **define)
    flags.DEFINE_float("learning_rate", 2e-4, "That of the adapters.", **define)
    flags.DEFINE_integer("scored_length", 2048, "Tokens of a window.", **define)
    flags.DEFINE_integer("num_windows", 2, "Windows of each text.", **define)
    flags.DEFINE_string(
        "weights", "adapters", "Folder to go on from after a stop.", **define
    )
    flags.DEFINE_string(
        "results", "benchmarks/retrofit/training.json", "File of the figures.", **define
    )
    flags.DEFINE_bool("print_only", False, "Whether to run nothing.", **define)


def main(argv):
    """Trains and scores if the record lacks something, and prints it."""
    del argv
    options = flags.FLAGS
    runs = record.Record(options.results)
    missing = [runs.missing(all_settings(stage, options)) for stage in STAGES]
    if any(missing) and not options.print_only:
        train(runs, options)
    print("\n".join(table(runs, options)))


def settings_of(stage, text, window, options):
    """Returns what identifies a run."""
    settings = {"stage": stage, "length": options.scored_length}
    settings |= {"text": text, "window": window}
    if stage != FULL:
        settings |= {"contender": options.contender, "keys": options.keys}
    if stage in (FITTED, TRAINED):
        settings |= {"trained_length": options.length, "fit_steps": options.fit_steps}
        if options.fit_learning_rate:
            settings["fit_learning_rate"] = options.fit_learning_rate
    if stage == TRAINED:
        settings |= {
            "steps": options.steps,
            "rank": options.rank,
            "learning_rate": options.learning_rate,
        }
    return settings


def all_settings(stage, options):
    """Returns the settings of all windows of a stage."""
    return [
        settings_of(stage, text, window, options)
        for window in range(options.num_windows)
        for text in texts.SCORED
    ]


def check_weights(options):
    """Checks that the weights of the folder, if any, were trained with these settings.

    Raises:
        ValueError: if they were trained with others.
    """
    folder = pathlib.Path(options.weights)
    if not folder.exists() or not any(folder.iterdir()):
        return
    path = folder / SETTINGS
    found = json.loads(path.read_text()) if path.exists() else {}
    own = {name: getattr(options, name) for name in TRAINING}
    other = [name for name in own if name not in found or found[name] != own[name]]
    if other:
        has = {name: found.get(name, "unknown") for name in other}
        raise ValueError(
            "`--weights` must be a new folder, or one of the same settings. Received: "
            f"{options.weights}, which has {has}. Name another folder"
        )


def keep_settings(options):
    """Writes beside the weights what they are trained with."""
    path = pathlib.Path(options.weights, SETTINGS)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: getattr(options, name) for name in TRAINING}))


def train(runs, options):
    """Goes through all stages, and scores each that is missing."""
    check_weights(options)
    from benchmarks.retrofit import smollm2

    lm, teacher = smollm2.load(), smollm2.load()
    tokenizer = lm.preprocessor.tokenizer
    score(runs, teacher, FULL, options)
    calibration = texts.calibration_of(tokenizer, options.texts)
    contenders.CONTENDERS[options.contender].put_into(lm, options.keys, calibration)
    score(runs, lm, UNTRAINED, options)
    rows = rows_of(tokenizer, options)
    keep_settings(options)
    fit_layers(lm, rows[: options.fit_steps], options)
    score(runs, lm, FITTED, options)
    train_adapters(lm, teacher, rows[options.fit_steps :], options)
    score(runs, lm, TRAINED, options)


def rows_of(tokenizer, options):
    """Returns ids to train on, both kinds of text mixed, `<int32>[number, length]`."""
    number = options.fit_steps + options.steps
    parts = []
    for name in TRAINED_ON:
        found = texts.windows_of(
            tokenizer, [name], options.texts, options.length, number
        )
        # Centroids come from the start of the first one.
        parts.append(found[texts.CALIBRATION_LENGTH // options.length :])
    wiki, python = parts[0], np.concatenate(parts[1:])
    half = -(-number // 2)
    rng = np.random.default_rng(0)
    rows = [
        rng.permutation(np.resize(kind, (half, options.length)))
        for kind in (wiki, python)
    ]
    return np.stack(rows, axis=1).reshape(2 * half, options.length)[:number]


def fit_layers(lm, rows, options):
    """Fits layers on a row a step, or reads from `--weights` what was fitted."""
    path = pathlib.Path(options.weights, "fitted.weights.h5")
    if path.exists():
        lm.backbone.load_weights(path)
    elif len(rows):
        rate = options.fit_learning_rate
        optimizer = adam(rate, len(rows)) if rate else None
        retrofit.distill(lm, rows, len(rows), optimizer)
        lm.backbone.save_weights(path)


def adam(learning_rate, steps):
    """Makes an optimizer whose learning rate rises, and then falls until the end."""
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=learning_rate, warmup_steps=WARMUP
    )
    return keras.optimizers.Adam(schedule, clipnorm=1.0)


def train_adapters(lm, teacher, rows, options):
    """Trains adapters on a row a step, from where `--weights` has them."""
    lm.backbone.enable_lora(options.rank)
    student = Student(lm, teacher)
    optimizer = adam(options.learning_rate, len(rows))
    student.compile(optimizer=optimizer, jit_compile=False)
    adapters = lm.backbone.trainable_variables
    optimizer.build(adapters)
    values = {str(number): each.value for number, each in enumerate(adapters)}
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(optimizer=optimizer, **values), options.weights, 1
    )
    manager.restore_or_initialize()
    steps = range(int(optimizer.iterations), len(rows))
    for step in tqdm(steps, initial=steps.start, total=len(rows), unit="step"):
        loss = float(student.train_on_batch(rows[step : step + 1]))
        if (step + 1) % SAVED_EVERY == 0 or step + 1 == len(rows):
            manager.save()
            tqdm.write(f"step {step + 1}: divergence {loss:.4f}")


class Student(keras.Model):
    """A model whose loss is its divergence from another one, the mean over tokens.

    Args:
        lm: the model that is trained.
        teacher: the other one, which is not saved with it.
    """

    def __init__(self, lm, teacher):
        super().__init__(name="student")
        self.lm = lm
        # As a function: Keras would take the model for a part of this one.
        self._teacher = lambda: teacher

    def build(self, *args, **kwargs):
        self.built = True

    def call(self, ids, training=None):
        inputs = {"token_ids": ids, "padding_mask": ops.ones_like(ids)}
        said = ops.stop_gradient(self._teacher()(inputs, training=False))
        own = self.lm(inputs, training=training)
        said, own = (ops.log_softmax(ops.cast(x, "float32")) for x in (said, own))
        loss = ops.mean(ops.sum(ops.exp(said) * (said - own), axis=-1))
        self.add_loss(loss)
        return loss


def score(runs, lm, stage, options):
    """Scores the windows that are missing, and writes each into the record at once."""
    tokenizer = lm.preprocessor.tokenizer
    for settings in runs.missing(all_settings(stage, options)):
        rows = texts.windows_of(
            tokenizer,
            texts.SCORED[settings["text"]],
            options.texts,
            settings["length"],
            options.num_windows,
        )
        nats = scoring.nats(lm, rows[settings["window"]])
        runs.add(settings, {"nats": nats, **machine.describe()})
        print(f"{settings}: {nats:.4f}", flush=True)


def table(runs, options):
    """Returns the lines of a table: what is lost at each stage, in each window."""
    rows = []
    for stage in STAGES:
        own = [nats_of(runs, stage, text, options) for text in texts.SCORED]
        full = [nats_of(runs, FULL, text, options) for text in texts.SCORED]
        rows.append([stage, *map(_cell, own, full)])
    words = f"{options.scored_length:,} tokens, {options.keys} keys"
    return record.table([f"nats beyond full attention, {words}", *texts.SCORED], rows)


def _cell(nats, full):
    if nats and nats == full:
        return f"0 ({statistics.mean(full):.3f})"
    return record.mean_and_each([a - b for a, b in zip(nats, full, strict=False)])


def nats_of(runs, stage, text, options):
    """Returns the nats per token of all windows; none if some are missing."""
    found = [
        runs.find(settings_of(stage, text, window, options))
        for window in range(options.num_windows)
    ]
    return [] if None in found else [run["nats"] for run in found]


if __name__ == "__main__":
    define_flags()
    app.run(main)
