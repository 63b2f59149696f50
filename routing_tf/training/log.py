"""The log of a run: the screen, metrics.jsonl, TensorBoard, reports, and clusters."""

import contextlib
import dataclasses
import json
import math
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf
import tqdm

from routing_tf import layers
from routing_tf.files import atomic
from routing_tf.files import progress
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.models.score import TokenScorer
from routing_tf.training import evaluation
from routing_tf.training.engines.step import Report

# A cluster counts as dead if its share of tokens is below this part of an even share.
DEAD = 0.01

SECONDS_BETWEEN_LINES = 10.0


def metric_key(metric_name):
    """Returns the name of a metric as metrics.jsonl and TensorBoard write it."""
    return metric_name.replace(" ", "_")


@dataclasses.dataclass
class Window:
    """Sums over the steps since the last logged one."""

    num_losses: int = 0
    total_loss: float = 0.0
    num_skipped: int = 0
    num_timed: int = 0
    num_tokens: float = 0.0
    seconds: float = 0.0
    last: Report | None = None

    def add(self, reports, seconds=None):
        """Adds the reports of one call; `seconds` is None if it does not count."""
        for report in reports:
            if report.is_finite:
                self.num_losses += 1
                self.total_loss += report.cross_entropy
                self.last = report
            else:
                self.num_skipped += 1
        if seconds is not None:
            self.num_timed += len(reports)
            self.num_tokens += sum(report.num_tokens for report in reports)
            self.seconds += seconds

    @property
    def num_steps(self):
        return self.num_losses + self.num_skipped

    @property
    def loss(self):
        """Mean of the steps that count."""
        return self.total_loss / max(1, self.num_losses)

    @property
    def tokens_per_second(self):
        return self.num_tokens / self.seconds


def _parse(line):
    """Reads a line of metrics.jsonl; a damaged line belongs to no step."""
    try:
        entry = json.loads(line)
        return entry if entry["step"] >= 0 else {"step": math.inf}
    except (ValueError, KeyError, TypeError):
        return {"step": math.inf}


class SilentLog(contextlib.nullcontext):
    """Logs nothing, for the workers of a run that are not its chief."""

    is_read = True

    def __enter__(self):
        return self

    def _tell_nothing(self, *_):
        pass

    say = metrics = evaluation = progress = _tell_nothing


class ProgressLog:
    """Logs a run on the screen, in metrics.jsonl and in TensorBoard.

    A terminal shows a progress bar, and other outputs get a line now and then. `step`
    is the one from which the run continues; with `evaluates_again`, the evaluation
    there is repeated, and its earlier entries are dropped.

    Attributes:
        is_read: whether somebody still reads standard output.
    """

    is_read = True

    def __init__(self, model_dir, step, total, problem, evaluates_again=True):
        self._problem = problem
        self._total = total
        self._path = pathlib.Path(model_dir, "metrics.jsonl")
        self._forget_after(step, evaluates_again)
        self._file = self._path.open("a")
        self._board = tf.summary.create_file_writer(
            str(self._path.parent / "tensorboard")
        )
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=total, initial=step, unit="step", dynamic_ncols=True
            )
        self._next_line = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._bar is not None:
            self._bar.close()
        try:
            self._file.close()
            self._board.close()
        except (OSError, tf.errors.OpError) as error:
            if not any(exception):  # otherwise the first error counts
                raise self._failure(error) from error

    def _failure(self, error):
        return OSError(
            f"The log cannot be written; is the disk full? Received: {self._path}: "
            f"{str(error).splitlines()[0]}. The same command continues from the last "
            "checkpoint"
        )

    def _forget_after(self, step, evaluates_again):
        """Drops log entries after the checkpoint from which a run continues."""
        if not self._path.exists():
            return
        lines = self._path.read_text().splitlines(keepends=True)
        # A killed run may have left half a line.
        entries = [(line, _parse(line)) for line in lines]
        kept = [
            line
            for line, entry in entries
            if entry["step"] < step + ("learning_rate" in entry or not evaluates_again)
        ]
        atomic.write_whole(self._path, "".join(kept))

    def say(self, text):
        write = print if self._bar is None else tqdm.tqdm.write
        try:
            write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            self.is_read = False

    def metrics(self, step, values):
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
            with self._board.as_default(step=step):
                for name, value in values.items():
                    tf.summary.scalar(name, value)
        except (OSError, tf.errors.OpError) as error:
            raise self._failure(error) from error

    def evaluation(self, step, result):
        name = self._problem.metric_name
        value = self._problem.metric(result.nats_per_token, self._problem.eval_split)
        self.metrics(step, {f"held_out_{metric_key(name)}": value})
        self.say(f"step {step}: held-out {name} {value:.4f}")

    def progress(self, step, window):
        if not window.num_losses:
            return
        value = self._problem.metric(window.loss, self._problem.train_split)
        text = f"loss {window.loss:.4f}, {value:.4f} {self._problem.metric_name}"
        if window.seconds:
            text += f", {window.tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            if window.num_timed:
                self._bar.update(step - self._bar.n)
            else:  # the first call, which compiles
                progress.begin_at(self._bar, step)
                self._bar.refresh()
        elif time.monotonic() >= self._next_line or step == self._total:
            if window.seconds and step < self._total:
                left = (self._total - step) * window.seconds / window.num_timed
                text += f", {tqdm.tqdm.format_interval(left)} left"
            self.say(f"step {step}/{self._total}: {text}")
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES


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


def centroid_occupancy(lm):
    """Returns how evenly the tokens are spread over the clusters of each routed layer.

    Returns a dict with four entries for each layer that counts its tokens: smallest and
    largest share of a head's tokens in one cluster (`occupancy/LAYER/min` and `max`),
    the entropy of the shares divided by its largest possible value
    (`occupancy/LAYER/entropy`), the mean over heads, and the share of clusters that get
    less than a hundredth of an even share (`dead`).
    """
    found = {}
    for layer in layers_inside(lm):
        shares = shares_of(layer)
        if shares is None:
            continue
        tag = "occupancy/" + layer.counts.path.removesuffix("/kmeans/counts")
        for name, value in zip(("min", "max", "entropy"), spread(shares)):
            found[f"{tag}/{name}"] = value
        found[f"{tag}/dead"] = float(np.mean(shares * shares.shape[-1] < DEAD))
    return found


def shares_of(kmeans):
    """Returns the shares of tokens in clusters, moving averages, `[heads, clusters]`.

    None for a layer that counts no tokens or has not seen any.
    """
    counts = getattr(kmeans, "counts", None)
    if not isinstance(kmeans, layers.OnlineKMeans) or counts is None:
        return None
    tokens = np.asarray(counts, "float64")
    totals = tokens.sum(axis=-1, keepdims=True)
    return tokens / totals if totals.all() else None


def spread(shares):
    """Returns the smallest and the largest of `shares`, and their entropy.

    The entropy is divided by its largest possible value, the mean over heads.
    """
    terms = -shares * np.log(np.maximum(shares, 1e-300))
    most = math.log(shares.shape[-1]) or 1.0
    entropy = terms.sum(axis=-1).mean() / most
    return float(shares.min()), float(shares.max()), float(entropy)
