"""The training loop of language models.

Data order and dropout depend only on the seed and the step, so a stopped run continues
exactly as if it had not been stopped.
"""

import dataclasses
import json
import math
import pathlib
import signal
import sys
import time
import zlib

import numpy as np

from routing_tf.files.named_files import make_folder
from routing_tf.files.progress import StopRequest
from routing_tf.layers.support.validation import check_choice
from routing_tf.models.build import build_model
from routing_tf.models.score import TokenScorer
from routing_tf.training import checkpoints
from routing_tf.training import engines
from routing_tf.training import evaluation
from routing_tf.training import loading
from routing_tf.training import run_folder
from routing_tf.training.checkpoints import RunCheckpoints
from routing_tf.training.engines.step import TrainingStep
from routing_tf.training.log import ProgressLog
from routing_tf.training.log import SilentLog
from routing_tf.training.log import Window
from routing_tf.training.log import centroid_occupancy
from routing_tf.training.log import metric_key
from routing_tf.training.optimizer import compile_for_training
from routing_tf.training.optimizer import make_schedule

ON_NAN = ("stop", "skip")
MOST_SKIPPED_IN_A_ROW = 20
STOPPING = "\nstopping after this step; once more to stop at once, unsaved\n"


class Trainer:
    """A run in its model directory, new or continued from its last checkpoint.

    Args:
        config: `RunConfig`.
        problem: its problem, see `configure`.
        model_dir: folder of the run, made if missing; several workers share it.
        jit_compile: whether XLA compiles the training step on TensorFlow; `"auto"` (the
            default): only with a GPU, as in `keras.Model.compile`.
        engine: where the run computes, see `engines.make`; None (the default) for one
            device.
        steps_per_call: number of steps in one call of the device. Defaults to 1.

    Attributes:
        lm: the language model, with an encoder or without, or an image model.
        scorer: a `TokenScorer` of it.
        step: number of steps trained.
        stopped_by: number of the signal that ended `train` early, SIGPIPE if the reader
            of its output was gone, or None.

    Raises:
        ValueError: if `model_dir` contains another run or cannot be written, none of
            its checkpoints can be read, or the devices cannot share the batch.

    Example:

    ```python
    from routing_tf import models
    from routing_tf import training
    from routing_tf.training import run_folder

    hyperparameters = models.preset_hyperparameters("byte_tiny")
    config, problem = run_folder.configure(
        "python_source", hyperparameters.replace(train_steps=2)
    )
    trainer = training.Trainer(config, problem, "my_run")
    print(trainer.train(eval_examples=2).bits)
    ```
    """

    def __init__(
        self,
        config,
        problem,
        model_dir,
        jit_compile="auto",
        engine=None,
        steps_per_call=1,
    ):
        self.config = config
        self.problem = problem
        self.model_dir = pathlib.Path(model_dir)
        self.engine = engine or engines.make()
        self.stopped_by = None
        h = config.hyperparameters
        self._batch_size = self._own_batch_size(steps_per_call)
        is_new = self._open_model_dir()
        with self.engine.scope():
            self.lm = build_model(h, problem, config.seed, config.precision)
            compile_for_training(self.lm, h, jit_compile, config.seed)
        self._checkpoints = RunCheckpoints(self.model_dir, self.lm)
        self.step = self._checkpoints.restore(self._warn, self._agree_on_the_run)
        if not self.step and config.init_checkpoint:
            loading.initialize(self.lm, config.init_checkpoint)
        if self.engine.is_chief:
            if self.step <= h.train_steps:  # otherwise its length does not change
                config.save(model_dir)
            if is_new or not (self.model_dir / run_folder.PREPROCESSOR).is_dir():
                run_folder.save_preprocessor(self.lm, model_dir)
        self.scorer = TokenScorer(self.lm, engine=self.engine)
        self._schedule = make_schedule(h)
        self._steps_per_call = steps_per_call
        self._calls = self._compile()
        self._skipped_in_a_row = 0

    def train(
        self,
        eval_every=100,
        eval_examples=64,
        checkpoint_every=100,
        log_every=10,
        on_nan="stop",
    ):
        """Trains up to the step `train_steps` of the hyperparameters.

        Args:
            eval_every: steps between evaluations; 0 for one before and one after.
            eval_examples: windows of the problem's `eval_split` in an evaluation; 0
                for all.
            checkpoint_every: steps between checkpoints; 0 for one at the end.
            log_every: steps between lines in `metrics.jsonl`.
            on_nan: what to do after a step whose loss or gradients are not finite,
                which changes no weight: `"stop"` (the default) ends the run, `"skip"`
                continues with the next batch, unless 20 in a row are bad. (float16
                always skips steps until the scale of the loss fits.)

        Returns:
            The last `Evaluation`; None if a signal, or the end of its output's reader,
            stopped training early, after a checkpoint.

        Raises:
            ValueError: if `on_nan` is unknown.
            FloatingPointError: if the loss, a gradient or a weight is not finite.
            OSError: if a checkpoint cannot be written.
        """
        check_choice("on_nan", on_nan, ON_NAN)
        total = self.config.hyperparameters.train_steps
        self._on_nan, self._goes_on = on_nan, self.step < total
        # A run that was killed before its evaluation has it now.
        evaluates_first = self._goes_on and (
            self.step == 0
            or _due(self.step - self._steps_per_call, self.step, eval_every)
        )
        log = SilentLog()
        if self.engine.is_chief:
            again = evaluates_first or self.step >= total
            log = ProgressLog(self.model_dir, self.step, total, self.problem, again)
        try:
            with log, StopRequest(STOPPING) as stop:
                self._stop, self._log, self._window = stop, log, Window()
                result = None
                if evaluates_first and self._evaluate(eval_examples, log) is None:
                    return self._end_early()
                for before in self._steps(total, log, log_every):
                    stops = self._stops()
                    ends = stops or self.step == total
                    if ends or _due(before, self.step, checkpoint_every):
                        self._save()
                    if stops:
                        return self._end_early()
                    if ends or _due(before, self.step, eval_every):
                        result = self._evaluate(eval_examples, log)
                        if result is None:
                            self._save()
                            return self._end_early()
                if result is None:
                    result = self._evaluate(eval_examples, log)
                self._checkpoints.wait()
                return self._end_early() if result is None else result
        finally:
            self.engine.sync()

    def _stops(self):
        """Whether any worker has been asked to stop, or nobody reads its output."""
        return self.engine.agree(self._stop.signal is not None or not self._log.is_read)

    def _end_early(self):
        self._checkpoints.wait()
        if self._window.num_steps:
            # The next entry has only the steps after this one.
            self._log.metrics(self.step, self._describe(self._window))
        # A request to another worker arrives here as one for an orderly end.
        other = signal.SIGTERM if self._log.is_read else signal.SIGPIPE
        self.stopped_by = self._stop.signal or other

    def _evaluate(self, eval_examples, log):
        """Scores held-out data and keeps the best model so far; None if stopped."""
        self.engine.sync()
        result = evaluation.evaluate(
            self.scorer,
            self.problem,
            self.problem.eval_split,
            eval_examples or None,
            stops=self._stops,
        )
        if result is None:
            return None
        log.evaluation(self.step, result)
        if self.step > 0:
            self._keep_if_best(result, log)
        return result

    def _keep_if_best(self, result, log):
        found = checkpoints.Best(result.nats_per_token, result.num_tokens)
        best = self._checkpoints.best
        is_best = found.loss < best.loss
        if not best.is_comparable_with(found):
            # A run that was finished before keeps its best one.
            is_best = self._goes_on and math.isfinite(found.loss)
            if is_best:
                log.say(
                    f"the best checkpoint is chosen anew: {found.num_tokens:,.0f} "
                    f"held-out tokens are scored now, {best.num_tokens:,.0f} before"
                )
        # The chief decides, because sums of other workers may be rounded differently.
        if self.engine.agree(is_best and self.engine.is_chief):
            self._save(found)

    def _open_model_dir(self):
        """Makes or checks the model directory; returns whether the run is new."""
        is_new = not checkpoints.resumable(self.model_dir)
        if not is_new:
            earlier = run_folder.RunConfig.load(self.model_dir)
            if earlier is None:
                raise ValueError(
                    "`model_dir` must not contain checkpoints without their run.json. "
                    f"Received: {str(self.model_dir)!r}. Use another model_dir"
                )
            self.config.check_continues(earlier, self.model_dir)
            kind = self.config.hyperparameters.kind
            run_folder.check_tokenizer(self.problem, self.model_dir, kind)
        make_folder("model_dir", checkpoints.folder_of(self.model_dir))
        return is_new

    def _agree_on_the_run(self, step):
        """Raises an error on all workers if they would train different runs."""
        settings = dataclasses.asdict(self.config)
        for name in ("data_dir", "problem_options"):  # paths of one machine
            del settings[name]
        settings = json.dumps(settings, sort_keys=True)
        steps = self.engine.gather(float(step))
        runs = self.engine.gather(float(zlib.crc32(settings.encode())))
        if len(set(steps)) > 1 or len(set(runs)) > 1:
            raise ValueError(
                "All workers must have the same settings, and the same `model_dir`, in "
                f"a folder that they share. Received: {str(self.model_dir)!r}, where "
                f"the workers found checkpoints of the steps {[int(x) for x in steps]} "
                f"and {len(set(runs))} different settings"
            )

    def _own_batch_size(self, steps_per_call):
        """The number of windows that this worker reads in a step."""
        parts, engine = self.config.accumulation_steps, self.engine
        if steps_per_call > 1 and parts > 1:
            raise ValueError(
                "`steps_per_call` must be 1 with gradient accumulation. Received: "
                f"steps_per_call={steps_per_call}, accumulation_steps={parts}"
            )
        h = self.config.hyperparameters
        batch_size = evaluation.batch_size_of(h, self.problem)
        if batch_size % (engine.num_devices * parts):
            needed = engine.num_devices * parts
            tokens = needed * evaluation.window_length(self.problem)
            raise ValueError(
                "The number of windows in a batch must be a multiple of the number of "
                f"devices times `accumulation_steps`. Received: {batch_size} windows "
                f"(batch_tokens={h.batch_tokens}), {engine.num_devices} devices, "
                f"accumulation_steps={parts}. Use --hparams=batch_tokens={tokens} or "
                "a multiple of it"
            )
        return batch_size // engine.num_workers

    def _compile(self):
        """The compiled step by the number of steps that it takes at once."""
        step = TrainingStep(
            self.lm,
            self.lm.optimizer,
            self.config.hyperparameters.gradient_clip_norm,
            self.config.accumulation_steps,
            self.engine.num_replicas,
        )
        return {
            number: self.engine.compile(step, number, self.lm.jit_compile)
            for number in {1, self._steps_per_call}
        }

    def _steps(self, total, log, log_every):
        """Trains; yields after each call the step before it."""
        if self.step >= total:
            return
        batches = self.problem.dataset(
            self.problem.train_split,
            self._batch_size,
            seed=self.config.seed,
            start_step=self.step,
            training=True,
            num_workers=self.engine.num_workers,
            worker=self.engine.worker,
        ).as_numpy_iterator()
        compiled = set()
        while self.step < total:
            number = self._steps_per_call
            if self.step + number > total:
                number = 1
            started = time.monotonic()
            reports = self._calls[number](
                [next(batches) for _ in range(number)], self.step
            )
            seconds = time.monotonic() - started
            before = self.step
            self.step += number
            # The first call compiles, and is not timed.
            self._window.add(reports, seconds if number in compiled else None)
            compiled.add(number)
            self._check_finite(reports, before, log)
            log.progress(self.step, self._window)
            if self.step == total or _due(before, self.step, log_every):
                log.metrics(self.step, self._describe(self._window))
                self._window = Window()
            yield before

    def _check_finite(self, reports, before, log):
        """Handles steps that changed no weight."""
        for index, report in enumerate(reports):
            if report.is_finite:
                self._skipped_in_a_row = 0
                continue
            # float16: gradients overflow until the scale of the loss fits.
            if math.isfinite(report.loss) and report.loss_scale > 1:
                continue
            self._skipped_in_a_row += 1
            text = self._describe_failure(report, before + index)
            if self._on_nan == "stop":
                self._stop_without_saving(
                    text,
                    "--on_nan=skip continues from it without these batches, or use ",
                )
            if self._skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
                self._stop_without_saving(
                    f"{text}, as {MOST_SKIPPED_IN_A_ROW} in a row were not"
                )
            log.say(f"WARNING: skipped a step. {text}")

    def _describe_failure(self, report, step):
        """Describes where a step is not finite, and the first bad variable."""
        self.engine.sync()
        name = checkpoints.first_not_finite(self.lm)
        if name is None:
            bad = ~np.isfinite(report.gradient_squares)
            names = [variable.path for variable in self.lm.trainable_variables]
            name = f"the gradient of {names[bad.argmax()]}" if bad.any() else "the loss"
        batch = self.problem.describe_batch(
            self._batch_size * self.engine.num_workers, self.config.seed, step
        )
        return (
            f"loss={report.loss:g} in step {step + 1}, on {batch}; the first variable "
            f"that is not finite is {name}"
        )

    def _describe(self, window):
        """The logged values of the steps of a window, by name."""
        self.engine.sync()
        values = {"learning_rate": float(self._schedule(self.step - 1))}
        if window.num_losses:
            metric = self.problem.metric(window.loss, self.problem.train_split)
            values = {
                "loss": window.loss,
                metric_key(self.problem.metric_name): metric,
                "clustering_loss": window.last.clustering_loss,
                **window.last.named_losses,
                "gradient_norm": window.last.gradient_norm,
                **values,
            }
            if self.config.precision == "float16":
                values["loss_scale"] = window.last.loss_scale
        if window.num_skipped:
            values["skipped_steps"] = window.num_skipped
        if window.seconds:
            values["tokens_per_second"] = window.tokens_per_second
        return {**values, **centroid_occupancy(self.lm)}

    def _save(self, best=None):
        """Writes a checkpoint; an error of the chief is raised on all workers."""
        self.engine.sync()
        name = checkpoints.first_not_finite(self.lm)
        if name is not None:
            self._stop_without_saving(f"{name} at step {self.step}")
        error = None
        if self.engine.is_chief:
            try:
                self._checkpoints.save(self.step, best)
            except OSError as caught:
                error = caught
        if self.engine.agree(error is not None):
            raise error or OSError("The first worker could not write a checkpoint")

    def _stop_without_saving(self, received, advice="Use "):
        self._checkpoints.wait()
        last = self._checkpoints.last_whole
        last = f"is {last!r}" if last else "does not exist"
        raise FloatingPointError(
            f"The loss, its gradients and all weights must stay finite. Received: "
            f"{received}. The last good checkpoint {last}. {advice}another model_dir "
            "with a lower learning_rate or with gradient_clip_norm=1; init_checkpoint "
            "can start from the last good checkpoint"
        )

    def _warn(self, text):
        print(text, file=sys.stderr, flush=True)


def _due(before, step, every):
    """Whether a multiple of `every` is after `before`, up to `step`."""
    return every > 0 and step // every > before // every
