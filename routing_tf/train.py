"""Trains a language model and says how well it predicts held-out text.

With nothing but a model directory it trains on the source code of the running
Python's standard library:

    python -m routing_tf.train --model_dir=my_run

On text of your own:

    python -m routing_tf.train --model_dir=my_run --files='books/*.txt'

A problem of images, such as digits, trains a model of images; one of pairs of texts a
model with an encoder:

    python -m routing_tf.train --model_dir=my_digits --problem=digits

The same model directory continues its run, with no need to repeat the settings. The
last line on standard output is the score of the held-out data.
"""

import sys

import keras
import keras_hub
import numpy as np
from absl import app
from absl import flags

from routing_tf import commands
from routing_tf import evaluation
from routing_tf import models
from routing_tf import problems
from routing_tf import run_directory
from routing_tf import training
from routing_tf.models.hyperparameters import parse_overrides
from routing_tf.models.token_scorer import TokenScorer
from routing_tf.problems import image
from routing_tf.text_samples import printable

PROMPT_TOKENS = 64
IMAGE_COLUMNS = 10


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command.

    Args:
        values: the `absl.flags.FlagValues` to define them in.
    """
    flags.DEFINE_string(
        "model_dir",
        None,
        "Folder of the run: settings, checkpoints, logs. Made if missing; a run that "
        "is there is continued.",
        required=True,
        flag_values=values,
    )
    commands.define_data_flags(values)
    commands.define_split_flags(values)
    # or `--help` would leave them out
    for name in (*commands.DATA_FLAGS, *commands.SPLIT_FLAGS):
        flags.declare_key_flag(name, flag_values=values)
    flags.DEFINE_string(
        "hparams_set",
        None,
        "Name of the hyperparameters; an unknown name lists all. Default: those of the "
        "problem, such as python_small.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "hparams",
        "",
        "Changes of hyperparameters, as name=value,name=value.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "init_checkpoint",
        None,
        "Where a new run takes its first weights from: a model directory, a .keras "
        "file, a preset directory, or a checkpoint of the original release (its path "
        "without .index; --hparams_set names its set).",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "jit_compile",
        True,
        "Whether XLA compiles the training step.",
        flag_values=values,
    )
    # name: default, smallest value, help
    integers = {
        "train_steps": (None, 1, "Steps in all. Default: the hyperparameters say."),
        "eval_every": (250, 0, "Steps between evaluations; 0: before and after only."),
        "eval_examples": (64, 0, "Held-out windows in an evaluation; 0: all."),
        "checkpoint_every": (100, 0, "Steps between checkpoints; 0: at the end only."),
        "log_every": (10, 1, "Steps between entries in metrics.jsonl."),
        "sample_bytes": (
            128,
            0,
            "Tokens (bytes) to sample at the end; with an encoder, to show of a "
            "held-out text, its target and a sampled one; 0: none.",
        ),
        "sample_images": (
            40,
            0,
            "Images to sample at the end, and half as many to complete; 0: none.",
        ),
        "seed": (None, 0, "Seed of weights, data order and dropout. Default: 0."),
    }
    for name, (default, smallest, text) in integers.items():
        flags.DEFINE_integer(
            name, default, text, lower_bound=smallest, flag_values=values
        )


def configure(options):
    """Makes the run's configuration, and its problem, from the flags.

    A flag that is not given has the value it has in the model directory's run.

    Args:
        options: the parsed flags.

    Returns:
        `RunConfig` and the prepared problem.

    Raises:
        ValueError: for settings that do not exist or data that is not there.
    """
    earlier = run_directory.RunConfig.load(options.model_dir)
    problem_fields = commands.problem_fields(options, earlier)
    problem_options = problem_fields["problem_options"]
    for split, default in commands.SPLIT_FLAGS.items():
        value = options[split].value
        if value is not None and value != problem_options.get(split, default):
            problem_options[split] = value
    name, seed, source = options.hparams_set, options.seed, options.init_checkpoint
    if earlier is not None:
        seed = earlier.seed if seed is None else seed
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
            f"vocabulary_size={changes['vocabulary_size']} in --hparams. Leave it out"
        )
    if options.train_steps is not None:
        changes["train_steps"] = options.train_steps
    return run_directory.configure(
        hyperparameters=hyperparameters.replace(**changes),
        hparams_set=name,
        init_checkpoint=source,
        seed=seed or 0,
        **problem_fields,
    )


def describe(trainer):
    """Says what a run trains on what.

    Args:
        trainer: the `Trainer`.

    Yields:
        Lines of text.
    """
    config, problem = trainer.config, trainer.problem
    h = config.hyperparameters
    batch_size = evaluation.batch_size_of(h, problem)
    layers = f"{h.num_layers} layers"
    batch = f"{batch_size * problem.sequence_length:,} tokens"
    if problem.kind == "seq2seq":
        layers = f"{h.num_encoder_layers} + {layers}"
        batch = (
            f"{batch_size} pairs of {problem.input_length:,} and "
            f"{problem.sequence_length:,} tokens"
        )
    epochs = h.train_steps * batch_size / problem.num_windows(problem.train_split)
    yield f"data: {problem.describe()}"
    baseline = problem.baseline(problem.eval_split)
    if baseline:
        yield baseline
    yield (
        f"model: {config.hparams_set}, {trainer.lm.count_params():,} parameters, "
        f"{layers}, {keras.backend.backend()} backend"
    )
    yield (
        f"training: {h.train_steps} steps of {batch} of {problem.train_split}, "
        f"{epochs:.3g} epochs, {h.optimizer}; run in {trainer.model_dir}"
    )
    if trainer.step >= h.train_steps:
        yield f"the run is at step {trainer.step} already: nothing left to train"
    elif trainer.step:
        yield f"continuing at step {trainer.step}"
    elif config.init_checkpoint:
        yield f"starting from the weights in {config.init_checkpoint}"


def sample(lm, problem, num_tokens):
    """Continues a held-out text.

    Args:
        lm: the compiled language model.
        problem: the problem, which has a tokenizer.
        num_tokens: number of tokens to sample at most.

    Returns:
        The prompt and its continuation.
    """
    ids = problem.ids(problem.eval_split)
    start = len(ids) // 2
    end = start + min(PROMPT_TOKENS, problem.sequence_length // 2)
    prompt = problem.tokenizer.detokenize(ids[start:end])
    # The model's sequences start behind one more id.
    length = 1 + len(problem.tokenizer.tokenize(prompt)) + num_tokens
    text = lm.generate(prompt, max_length=length)
    return prompt, text.removeprefix(prompt)


def sample_target(lm, problem, num_tokens):
    """Generates the text that belongs to a held-out one.

    Args:
        lm: the compiled language model with an encoder.
        problem: the problem of pairs of texts, which has a tokenizer.
        num_tokens: number of tokens to show of each text at most.

    Returns:
        The source, the true target and the generated one.
    """
    tokenizer = problem.tokenizer
    source, target = (ids[:-1] for ids in problem.pair(problem.eval_split, 0))
    # As long as in training: the lengths decide which tokens meet.
    sampled = tokenizer.tokenize(lm.generate(tokenizer.detokenize(source)))
    texts = (source, target, np.asarray(sampled))
    return tuple(tokenizer.detokenize(ids[:num_tokens]) for ids in texts)


def sample_images(model, problem, number, seed=0):
    """Samples images, and completes held-out ones whose upper half is given.

    Args:
        model: the image model.
        problem: the `ImageProblem`.
        number: number of images to sample; half as many are completed.
        seed: seed of the sampler. Defaults to 0.

    Returns:
        Two PNG files as bytes. In the second each row of completed images stands
        below the row of the true ones; rows that are not full are left out.
    """
    sampler = keras_hub.samplers.RandomSampler(seed=seed)

    def generate(labels, **options):
        if model.hyperparameters.num_classes is not None:
            options["labels"] = labels
        return model.generate(len(labels), sampler=sampler, **options)

    samples = generate(np.arange(number) % problem.num_classes)
    true = problem.images(problem.eval_split)[: -(-number // 2)]
    completed = generate(
        problem.labels(problem.eval_split)[: len(true)],
        images=true,
        num_given_rows=problem.image_shape[0] // 2,
    )
    columns = min(IMAGE_COLUMNS, len(true))
    pairs = [
        images[start : start + columns]
        for start in range(0, len(true) // columns * columns, columns)
        for images in (true, completed)
    ]
    levels = problem.vocabulary_size
    return (
        image.picture(samples, min(IMAGE_COLUMNS, number), levels),
        image.picture(np.concatenate(pairs), columns, levels),
    )


def show_samples(trainer, options):
    """Samples from the trained model: a text on standard output, images as files."""
    problem = trainer.problem
    if isinstance(problem, problems.ImageProblem):
        if options.sample_images:
            pictures = sample_images(
                trainer.lm, problem, options.sample_images, trainer.config.seed
            )
            for name, content in zip(("samples", "completions"), pictures, strict=True):
                path = trainer.model_dir / f"{name}.png"
                path.write_bytes(content)
                print(f"{name}: {path}")
    elif not options.sample_bytes or problem.tokenizer is None:
        return
    elif problem.kind == "seq2seq":
        texts = sample_target(trainer.lm, problem, options.sample_bytes)
        names = ("held-out source", "its target", "sampled target")
        for name, text in zip(names, texts, strict=True):
            print(f"--- {name}\n{printable(text)}")
        print("---")
    else:
        prompt, continuation = sample(trainer.lm, problem, options.sample_bytes)
        print(f"--- prompt from held-out text\n{printable(prompt)}")
        print(f"--- sampled continuation\n{printable(continuation)}\n---")


def report(trainer, result, eval_examples):
    """Says what the model scores; where that leaks, also what sampling can reach.

    Args:
        trainer: the `Trainer`.
        result: its last `Evaluation`.
        eval_examples: number of windows that it scored; 0 for all.

    Yields:
        Lines of text.
    """
    problem, h = trainer.problem, trainer.lm.hyperparameters
    split = problem.eval_split
    yield from evaluation.report(problem, split, result, h)
    if h.sees_later_tokens("full") and not h.sees_later_tokens("prefix"):
        scorer = TokenScorer(trainer.lm, "prefix")
        result = evaluation.evaluate(scorer, problem, split, eval_examples or None)
        yield from evaluation.report(problem, split, result, h)


def run(options):
    """Trains as the flags say.

    Args:
        options: the parsed flags.

    Returns:
        The exit code.
    """
    config, problem = configure(options)
    trainer = training.Trainer(config, problem, options.model_dir, options.jit_compile)
    for line in describe(trainer):
        print(line, flush=True)
    result = trainer.train(
        eval_every=options.eval_every,
        eval_examples=options.eval_examples,
        checkpoint_every=options.checkpoint_every,
        log_every=options.log_every,
    )
    if result is None:
        print(
            f"stopped at step {trainer.step}; to continue: "
            f"python -m routing_tf.train --model_dir={options.model_dir}"
        )
        return commands.INTERRUPTED
    for line in report(trainer, result, options.eval_examples):
        print(line, flush=True)
    show_samples(trainer, options)
    print(evaluation.final_line(problem, problem.eval_split, result))
    return 0


def main(argv):
    """Trains; returns the exit code, as `absl.app.run` expects."""
    return commands.command(run, flags.FLAGS, argv)


if __name__ == "__main__":
    define_flags()
    sys.stdout.reconfigure(errors="replace")
    app.run(main)
