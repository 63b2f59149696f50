"""The report of a run before and after training."""

import math

import keras

from routing_tf.models.token_scorer import TokenScorer
from routing_tf.training import evaluation


def describe(trainer):
    """Yields lines for people that describe a run."""
    config, problem = trainer.config, trainer.problem
    h = config.hyperparameters
    batch_size = evaluation.batch_size_of(h, problem)
    layers = f"{h.num_layers} layers"
    batch = f"{batch_size * problem.sequence_length:,} tokens"
    if problem.kind == "seq2seq":
        layers = f"{h.num_encoder_layers} + {layers}"
        unit = "rows" if problem.segment_ids else "pairs"
        batch = (
            f"{batch_size} {unit} of {problem.input_length:,} and "
            f"{problem.sequence_length:,} tokens"
        )
    epochs = h.train_steps * batch_size / problem.num_windows(problem.train_split)
    yield f"data: {problem.describe()}"
    baseline = problem.baseline(problem.eval_split)
    if baseline:
        yield baseline
    yield (
        f"model: {config.hparams_set}, {describe_size(trainer.lm)}, {layers}, "
        f"{keras.backend.backend()} backend, {trainer.engine.description}"
        f"{'' if config.precision == 'float32' else ', ' + config.precision}"
    )
    if trainer.step > h.train_steps:
        yield (
            f"the run in {trainer.model_dir} is already at step {trainer.step}, beyond "
            f"{h.train_steps}: nothing left to train"
        )
        return
    yield (
        f"training: {h.train_steps} steps of {batch} of {problem.train_split}, "
        f"{epochs:.3g} epochs, {h.optimizer}; run in {trainer.model_dir}"
    )
    if trainer.step == h.train_steps:
        yield f"the run is already at step {trainer.step}: nothing left to train"
    elif trainer.step:
        yield f"continuing at step {trainer.step}"
    elif config.init_checkpoint:
        yield f"starting from the weights in {config.init_checkpoint}"


def describe_size(model):
    """Describes the number of parameters; the state of clusters is not trainable."""
    trainable = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    return f"{model.count_params():,} parameters, {trainable:,} of them trainable"


def report_scores(lm, problem, result, eval_examples):
    """Yields lines with the score, and if it leaks, the score that sampling can reach.

    `eval_examples` is the number of windows of `result`; 0 for all.
    """
    h = lm.hyperparameters
    split = problem.eval_split
    yield from evaluation.report(problem, split, result, h)
    if h.sees_later_tokens("full") and not h.sees_later_tokens("prefix"):
        scorer = TokenScorer(lm, "prefix")
        result = evaluation.evaluate(scorer, problem, split, eval_examples or None)
        yield from evaluation.report(problem, split, result, h)
