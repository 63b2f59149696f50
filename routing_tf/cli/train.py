r"""Trains a language model and reports how well it predicts held-out text.

With only a model directory, it trains on the source code of the running Python's
standard library:

    python -m routing_tf.train --model_dir=my_run

On your own texts:

    python -m routing_tf.train --model_dir=my_run --files='books/*.txt'

A problem of images, such as digits, trains a model of images, and one of pairs of texts
a model with an encoder:

    python -m routing_tf.train --model_dir=my_digits --problem=digits

On your own images, in a folder:

    python -m routing_tf.train --model_dir=my_images --problem=image_folder \
        --problem_option=folder=pictures

The same model directory continues its run, without its settings repeated. The last line
on standard output is the score of the held-out data.
"""

import contextlib
import os
import shlex
import signal
import sys

from absl import flags

from routing_tf.cli import commands
from routing_tf.cli import flag_kinds
from routing_tf.files.names import SPLITS
from routing_tf.settings.hyperparameters import by_subject

# The flags of splits, and the splits of a problem.
SPLIT_FLAGS = {"train_split": "train", "eval_split": "validation"}
HPARAMS = "\n".join(
    f"{subject}: {', '.join(names)}." for subject, names in by_subject().items()
)
# The settings that a model of images takes from them.
DECIDED_BY_IMAGES = (
    "image_height",
    "image_width",
    "num_channels",
    "num_classes",
    "max_sequence_length",
)
FLAGS = {
    **commands.BACKEND,
    "model_dir": flag_kinds.path(
        "Folder of the run: settings, checkpoints, logs. It is made if missing; a run "
        "in it continues.",
        required=True,
    ),
    **commands.DATA,
    "train_split": flag_kinds.choice(
        None,
        SPLITS,
        "Split of the data to train on. Default: that of the problem, train.",
    ),
    "eval_split": flag_kinds.choice(
        None,
        SPLITS,
        "Split that is scored during training and at the end. Default: that of the "
        "problem, validation.",
    ),
    "hparams_set": flag_kinds.string(
        None,
        "Preset of the hyperparameters; docs/presets.md lists all. Default: that of "
        "the problem, such as python_small.",
    ),
    "hparams": flag_kinds.string(
        "",
        "Changes of hyperparameters, as name=value,name=value; of two values of one "
        "name the last counts. Names by subject (docs/hyperparameters.md explains "
        "them):\n" + HPARAMS,
    ),
    "init_checkpoint": flag_kinds.path(
        "Source of the initial weights of a new run: a model directory, a .keras file, "
        "a preset directory, or a checkpoint of the original release (its path without "
        ".index; --hparams_set names its set)."
    ),
    # Where and how the run computes.
    "strategy": flag_kinds.choice(
        None,
        flag_kinds.STRATEGIES,
        "Where to compute. one: one device; mirrored: all devices of this machine; "
        "multi_worker: those of several machines (TF_CONFIG names them on TensorFlow, "
        "KERAS_DISTRIBUTION_* on JAX); tpu: a TPU. All devices share a batch, and "
        "results are those of one device. Default: one, or tpu with --tpu.",
    ),
    "tpu": flag_kinds.string(
        None, "Name or address of the TPU, for TensorFlow; 'local' on a TPU VM."
    ),
    "virtual_devices": flag_kinds.integer(
        None,
        1,
        "Number of virtual devices into which the CPU is split, to try a strategy "
        "without accelerators.",
    ),
    "precision": flag_kinds.choice(
        None,
        flag_kinds.PRECISIONS,
        "Dtype of computations; weights, centroids and the optimizer stay float32. "
        "float16 scales the loss. Default: float32.",
    ),
    "on_nan": flag_kinds.choice(
        "stop",
        flag_kinds.ON_NAN,
        "What to do if the loss or a gradient is not finite (weights do not change). "
        "stop: end the run, and report the place in the data and the first bad "
        "variable; skip: skip the batch.",
    ),
    "jit_compile": flag_kinds.switch(
        None,
        "Whether XLA compiles the training step, on one device of TensorFlow. Default: "
        "only with a GPU. On a CPU, XLA delays the first step and takes more memory.",
    ),
    "remat": flag_kinds.switch(
        None,
        "Whether to recompute the activations of blocks for the gradients: less "
        "memory, more time, the same results. Default: that of the hyperparameters.",
    ),
    "accumulation_steps": flag_kinds.integer(
        None,
        1,
        "Number of micro-batches per step (gradient accumulation); saves memory. "
        "Results equal those of the whole batch, except for rounding, dropout, "
        "tokens that revive or start centroids, and the load balancing loss of "
        "experts. Default: 1.",
    ),
    "steps_per_call": flag_kinds.integer(
        1, 1, "Number of training steps in one call: less overhead if steps are small."
    ),
    # Duration and reports.
    "train_steps": flag_kinds.integer(
        None, 1, "Total number of training steps. Default: that of the hyperparameters."
    ),
    "eval_every": flag_kinds.integer(
        250, 0, "Steps between evaluations; 0: only before and after training."
    ),
    "eval_examples": flag_kinds.integer(
        64, 0, "Number of held-out windows in an evaluation; 0: all."
    ),
    "checkpoint_every": flag_kinds.integer(
        100, 0, "Steps between checkpoints; 0: only at the end."
    ),
    "log_every": flag_kinds.integer(10, 1, "Steps between entries in metrics.jsonl."),
    "sample_bytes": flag_kinds.integer(
        128,
        0,
        "Number of tokens (bytes) to sample at the end; with an encoder, to show of a "
        "held-out text, its target and a sample; 0: none.",
    ),
    "sample_images": flag_kinds.integer(
        40,
        0,
        "Number of images to sample at the end; half as many are completed. 0: none.",
    ),
    "seed": flag_kinds.integer(
        None,
        0,
        "Seed of weights, data order and dropout. Default: 0.",
        largest=2**32 - 1,  # Keras's and NumPy's
    ),
}
# What a run does not keep, and each call may have another way.
OF_A_CALL = (
    *commands.BACKEND,
    *("strategy", "tpu", "virtual_devices", "on_nan", "jit_compile", "steps_per_call"),
    *("eval_every", "eval_examples", "checkpoint_every", "log_every"),
    *("sample_bytes", "sample_images"),
)


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `absl.flags.FlagValues`."""
    flag_kinds.define(values, FLAGS)


def configure(options):
    """Makes the `RunConfig`, and its prepared problem, from the flags.

    A missing flag has its value in the run of the model directory, if there is one.
    """
    from routing_tf import models
    from routing_tf import problems
    from routing_tf.models.hyperparameters import parse_overrides
    from routing_tf.training import run_folder

    earlier = run_folder.RunConfig.load(options.model_dir)
    problem_fields = commands.problem_fields(options, earlier)
    problem_options = problem_fields["problem_options"]
    for split, default in SPLIT_FLAGS.items():
        value = options[split].value
        if value is not None and value != problem_options.get(split, default):
            problem_options[split] = value
    name, source = options.hparams_set, options.init_checkpoint
    source = source and os.path.abspath(source)
    settings = {"seed": 0, "precision": "float32", "accumulation_steps": 1}
    for setting, default in settings.items():
        given = options[setting].value
        if given is None:
            given = getattr(earlier, setting, default)
        settings[setting] = given
    if earlier is not None:
        source = source or earlier.init_checkpoint
    if name is None and earlier is not None:
        name, hyperparameters = earlier.hparams_set, earlier.hyperparameters
    else:
        name = name or problems.default_hparams_set(problem_fields["problem"])
        hyperparameters = models.preset_hyperparameters(name)
    changes = parse_overrides(options.hparams)
    if "vocabulary_size" in changes:
        raise ValueError(
            "`vocabulary_size` is that of the problem. Received: "
            f"vocabulary_size={changes['vocabulary_size']} in --hparams; remove it"
        )
    for field in ("train_steps", "remat"):
        value = getattr(options, field)
        if value is not None and changes.get(field, value) != value:
            raise ValueError(
                f"`--{field}` and `--hparams` must agree. Received: --{field}={value}, "
                f"--hparams={options.hparams}"
            )
        if value is not None:
            changes[field] = value
    hyperparameters = hyperparameters.replace(**changes)
    config, problem = run_folder.configure(
        model_dir=options.model_dir,
        hyperparameters=hyperparameters,
        hparams_set=name,
        init_checkpoint=source,
        **settings,
        **problem_fields,
    )
    check_changes(changes, config)
    return config, problem


def check_changes(changes, config):
    """Raises a `ValueError` if `--hparams` contradicts the data."""
    h = config.hyperparameters
    others = [
        name
        for name, value in changes.items()
        if name in DECIDED_BY_IMAGES and getattr(h, name) != value
    ]
    if others:
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in others)} must follow from the "
            f"images of {config.problem!r}, "
            f"{', '.join(f'{name}={getattr(h, name)}' for name in others)}. Received: "
            f"{', '.join(f'{name}={changes[name]}' for name in others)} in --hparams. "
            "Leave it out"
        )


def make_engine(options):
    """Makes the engine that the flags name."""
    from routing_tf.training import engines

    strategy = options.strategy or ("tpu" if options.tpu else "one")
    return engines.make(strategy, options.tpu, options.virtual_devices)


def run(options):
    """Trains as the flags say; returns the exit code."""
    from routing_tf.training import run_folder

    engine = make_engine(options)  # before anything else uses the devices
    config, problem = configure(options)
    with contextlib.ExitStack() as stack:
        if engine.is_chief:
            stack.enter_context(run_folder.hold(options.model_dir))
        return train(config, problem, engine, options)


def train(config, problem, engine, options):
    """Trains, reports and samples; returns the exit code."""
    from routing_tf.training.log import describe
    from routing_tf.training.trainer import Trainer

    trainer = Trainer(
        config,
        problem,
        options.model_dir,
        "auto" if options.jit_compile is None else options.jit_compile,
        engine,
        options.steps_per_call,
    )
    if engine.is_chief:
        for line in describe(trainer):
            print(line, flush=True)
    result = trainer.train(
        eval_every=options.eval_every,
        eval_examples=options.eval_examples,
        checkpoint_every=options.checkpoint_every,
        log_every=options.log_every,
        on_nan=options.on_nan,
    )
    if result is None:
        is_read = trainer.stopped_by != signal.SIGPIPE
        if engine.is_chief:
            print(
                f"{'' if is_read else 'standard output is closed: '}"
                f"stopped at step {trainer.step}; to continue: {continuation(options)}",
                file=sys.stdout if is_read else sys.stderr,
            )
        if not is_read:
            return 1
        # SIGTERM asks for an orderly end.
        return 0 if trainer.stopped_by == signal.SIGTERM else commands.INTERRUPTED
    if engine.is_chief:
        finish(trainer, result, options)
    engine.agree(False)  # the others wait until the first is done
    return 0


def continuation(options):
    """Returns the command that continues a run, with flags that it does not keep."""
    given = [options[name].serialize() for name in OF_A_CALL if options[name].present]
    command = ["python", "-m", "routing_tf.train", f"--model_dir={options.model_dir}"]
    return shlex.join(command + given)


def finish(trainer, result, options):
    """Reports and samples; the last line is the score."""
    from routing_tf.generation import display
    from routing_tf.training import evaluation
    from routing_tf.training.log import report_scores

    problem = trainer.problem
    lm = display.model_to_sample_from(trainer)
    for line in report_scores(lm, problem, result, options.eval_examples):
        print(line, flush=True)
    display.show_samples(lm, trainer, options.sample_bytes, options.sample_images)
    print(evaluation.final_line(problem, problem.eval_split, result))


def _stop_outside_of_training(*_):
    # Before the first step there is nothing to save, and after the last all is saved.
    os.write(2, b"stopped outside of training; repeat the whole command to go on\n")
    sys.exit(0)


def main():
    """Runs the command, whose flags are those of the process."""
    signal.signal(signal.SIGTERM, _stop_outside_of_training)
    commands.main(run, define_flags)
