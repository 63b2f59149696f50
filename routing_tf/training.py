"""The training loop of language models, and what it is made of.

Data order and dropout depend on the seed and the step alone, so a run that was
stopped goes on exactly as if it had not been.
"""

import math
import os
import pathlib
import signal
import threading
import time

import keras
import keras_hub
import numpy as np

from routing_tf import evaluation
from routing_tf import layers
from routing_tf import models
from routing_tf import optimizers
from routing_tf import run_directory
from routing_tf.models.token_scorer import TokenScorer
from routing_tf.progress_log import ProgressLog
from routing_tf.progress_log import Window
from routing_tf.progress_log import metric_key

# More random draws than one layer makes in one step.
DRAWS_PER_STEP = 256


def make_schedule(hyperparameters, train_steps=None):
    """Makes the learning rate schedule that the hyperparameters describe.

    Args:
        hyperparameters: `Hyperparameters`.
        train_steps: length of the run, where a cosine decay ends; None for
            `hyperparameters.train_steps`. A run that ends within the warm-up never
            decays.

    Returns:
        `FactorSchedule` or `NoamSchedule`.
    """
    h = hyperparameters
    if h.learning_rate_schedule == "noam":
        factor = 0.002 if h.optimizer == "adam" else 1.0
        return optimizers.NoamSchedule(
            h.learning_rate, h.warmup_steps, h.hidden_dim, optimizer_factor=factor
        )
    decay_steps = max(train_steps or h.train_steps, h.warmup_steps + 1)
    return optimizers.FactorSchedule(
        h.learning_rate_schedule,
        constant=h.learning_rate,
        warmup_steps=h.warmup_steps,
        hidden_dim=h.hidden_dim,
        decay_steps=decay_steps,
    )


def make_optimizer(hyperparameters, train_steps=None):
    """Makes the optimizer that the hyperparameters describe.

    Weight decay is no part of it: see `add_weight_decay`.

    Args:
        hyperparameters: `Hyperparameters`.
        train_steps: length of the run; see `make_schedule`.

    Returns:
        A Keras optimizer.
    """
    h = hyperparameters
    schedule = make_schedule(h, train_steps)
    clip = h.gradient_clip_norm if h.gradient_clip_norm > 0 else None
    if h.optimizer == "adafactor":
        return optimizers.Adafactor(schedule, global_clipnorm=clip)
    return keras.optimizers.Adam(
        schedule,
        beta_1=h.adam_beta_1,
        beta_2=h.adam_beta_2,
        epsilon=h.adam_epsilon,
        global_clipnorm=clip,
    )


def add_weight_decay(lm, rate):
    """Adds `rate / 2` times the sum of squared weights to the training loss.

    As in tensor2tensor all trainable variables take part but biases, those of layer
    normalization included. The decay is a part of the loss, not of the optimizer.

    Args:
        lm: the language model.
        rate: float, the hyperparameter `weight_decay`; 0 takes the decay away.
    """
    for variable in lm.trainable_variables:
        # Keras calls the bias of layer normalization beta.
        is_bias = len(variable.shape) == 1 and variable.name.endswith(("bias", "beta"))
        decays = rate and not is_bias
        variable.regularizer = keras.regularizers.L2(rate / 2) if decays else None


def compile_for_training(lm, hyperparameters=None, jit_compile=True, seed=None):
    """Gives a language model the loss and the optimizer of the hyperparameters.

    Args:
        lm: the language model.
        hyperparameters: `Hyperparameters`; None for the model's own.
        jit_compile: whether XLA compiles the training step.
        seed: seed of the sampler of `lm.generate`.
    """
    if hyperparameters is None:
        hyperparameters = lm.hyperparameters
    add_weight_decay(lm, hyperparameters.weight_decay)
    # Images are sampled with a sampler of their own.
    sampler = {"sampler": keras_hub.samplers.TopPSampler(p=0.9, seed=seed)}
    lm.compile(
        optimizer=make_optimizer(hyperparameters),
        loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        weighted_metrics=[
            keras.metrics.SparseCategoricalCrossentropy(
                from_logits=True, name="cross_entropy"
            )
        ],
        jit_compile=jit_compile,
        **({} if hyperparameters.kind == "image" else sampler),
    )
    lm.optimizer.build(lm.trainable_variables)


def build_model(hyperparameters, problem, seed=0):
    """Builds a language model or an image model with random weights for a problem.

    Args:
        hyperparameters: `Hyperparameters`.
        problem: the problem, whose tokenizer the model generates text with.
        seed: seed of the weights; it becomes Keras's global seed.

    Returns:
        A `RoutingTransformerCausalLM`, `RoutingTransformerSeq2SeqLM` or
        `RoutingImageTransformer`.

    Raises:
        ValueError: if the encoder takes no ids, which is what problems have.
    """
    if hyperparameters.encoder_inputs != "tokens":
        raise ValueError(
            "`encoder_inputs` must be 'tokens' to train on a problem. Received: "
            f"encoder_inputs={hyperparameters.encoder_inputs!r}"
        )
    keras.utils.set_random_seed(seed)
    if hyperparameters.kind == "image":
        return models.RoutingImageTransformer(hyperparameters)
    preprocessor = None
    if hyperparameters.kind == "seq2seq":
        if problem.tokenizer is not None:
            preprocessor = models.RoutingTransformerSeq2SeqLMPreprocessor(
                problem.tokenizer,
                encoder_sequence_length=problem.input_length,
                decoder_sequence_length=problem.sequence_length,
            )
        backbone = models.RoutingTransformerEncoderDecoder(hyperparameters)
        return models.RoutingTransformerSeq2SeqLM(backbone, preprocessor=preprocessor)
    if problem.tokenizer is not None:
        preprocessor = models.RoutingTransformerCausalLMPreprocessor(
            problem.tokenizer, sequence_length=problem.sequence_length
        )
    backbone = models.RoutingTransformer(hyperparameters)
    return models.RoutingTransformerCausalLM(backbone, preprocessor=preprocessor)


def weight_decay_loss(lm):
    """Returns the part of the training loss that `add_weight_decay` adds."""
    variables = [v for v in lm.trainable_variables if v.regularizer is not None]
    return float(sum(variable.regularizer(variable) for variable in variables))


class Trainer:
    """A run in its model directory: new, or where its last checkpoint left it.

    Args:
        config: `RunConfig`.
        problem: its problem, see `configure`.
        model_dir: folder of the run, made if missing.
        jit_compile: whether XLA compiles the training step.

    Attributes:
        lm: the language model, with an encoder or without, or an image model.
        scorer: a `TokenScorer` of it.
        step: number of steps trained.

    Raises:
        ValueError: if another run lives in `model_dir`, or it cannot be written.

    Example:

    ```python
    from routing_tf import models
    from routing_tf import run_directory
    from routing_tf import training

    hyperparameters = models.preset_hyperparameters("byte_tiny")
    config, problem = run_directory.configure(
        "python_source", hyperparameters.replace(train_steps=2)
    )
    trainer = training.Trainer(config, problem, "my_run")
    print(trainer.train(eval_examples=2).bits)
    ```
    """

    def __init__(self, config, problem, model_dir, jit_compile=True):
        self.config = config
        self.problem = problem
        self.model_dir = pathlib.Path(model_dir)
        saved = self._open_model_dir()
        h = config.hyperparameters
        self.lm = build_model(h, problem, config.seed)
        compile_for_training(self.lm, h, jit_compile, config.seed)
        self.step = 0
        if saved:
            run_directory.restore_checkpoint(self.lm, saved[-1])
            self.step = run_directory.step_of(saved[-1])
        elif config.init_checkpoint:
            run_directory.initialize(self.lm, config.init_checkpoint)
        config.save(model_dir)
        self.scorer = TokenScorer(self.lm)
        self._schedule = make_schedule(h)
        self._seeds = [
            (variable, int(np.asarray(variable)[0]))
            for variable in self.lm.non_trainable_variables
            if variable.name == "seed_generator_state"
        ]

    def train(
        self, eval_every=100, eval_examples=64, checkpoint_every=100, log_every=10
    ):
        """Trains up to the step `train_steps` of the hyperparameters.

        Args:
            eval_every: steps between evaluations; 0 for one before and one after.
            eval_examples: windows of the problem's `eval_split` in an evaluation; 0
                for all.
            checkpoint_every: steps between checkpoints; 0 for one at the end.
            log_every: steps between lines in `metrics.jsonl`.

        Returns:
            The last `Evaluation`; None if a signal ended the training early, after a
            checkpoint.

        Raises:
            FloatingPointError: if the loss or a weight is not finite any more.
        """
        total = self.config.hyperparameters.train_steps
        split = self.problem.eval_split
        with ProgressLog(self.model_dir, self.step, total, self.problem) as log:

            def evaluate_now():
                result = evaluation.evaluate(
                    self.scorer, self.problem, split, eval_examples or None
                )
                log.evaluation(self.step, result)
                return result

            if self.step < total:
                evaluate_now()
            with _StopRequest() as stop:
                for _ in self._steps(total, log, log_every):
                    if stop.requested or _due(self.step, checkpoint_every, total):
                        self._save()
                    if stop.requested:
                        break
                    if self.step < total and _due(self.step, eval_every):
                        evaluate_now()
            return None if stop.requested else evaluate_now()

    def _open_model_dir(self):
        """Makes the model directory or checks the run in it; returns checkpoints."""
        saved = run_directory.checkpoints(self.model_dir)
        if saved:
            earlier = run_directory.RunConfig.load(self.model_dir)
            if earlier is None:
                raise ValueError(
                    "`model_dir` must not hold checkpoints without their run.json. "
                    f"Received: {str(self.model_dir)!r}. Use another model_dir"
                )
            self.config.check_continues(earlier, self.model_dir)
        try:
            (self.model_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                "`model_dir` must be a folder that can be written. Received: "
                f"{str(self.model_dir)!r}: {error.strerror}"
            ) from error
        return saved

    def _steps(self, total, log, log_every):
        """Trains; yields after each step."""
        if self.step >= total:
            return
        batches = self.problem.dataset(
            self.problem.train_split,
            evaluation.batch_size_of(self.config.hyperparameters, self.problem),
            seed=self.config.seed,
            start_step=self.step,
            training=True,
        ).as_numpy_iterator()
        window = Window(steps=-1)  # the first step, which compiles, is not timed
        while self.step < total:
            started = time.monotonic()
            is_logged = _due(self.step + 1, log_every, total)
            losses, num_tokens = self._train_step(next(batches), is_logged)
            window.add(losses, num_tokens, time.monotonic() - started)
            log.progress(self.step, window)
            if is_logged:
                log.metrics(self.step, self._describe(window))
                window = Window()
            yield

    def _train_step(self, batch, is_logged):
        """One step; returns its losses by name and its number of tokens."""
        for variable, seed in self._seeds:
            variable.assign(np.array([seed, self.step * DRAWS_PER_STEP]))
        # Reads all weights, so only where the parts of the loss are told apart.
        decay = weight_decay_loss(self.lm) if is_logged else 0.0
        inputs, targets, weights = batch
        inputs = {name: inputs[name] for name in self.lm.input}
        # keras_hub's own train_on_batch would run the tokenizer on the ids.
        losses = keras.Model.train_on_batch(
            self.lm, inputs, targets, weights, return_dict=True
        )
        losses["clustering_loss"] = losses["loss"] - losses["cross_entropy"] - decay
        if not math.isfinite(losses["loss"]):
            self._stop_without_saving(f"loss={losses['loss']} in step {self.step + 1}")
        self.step += 1
        return losses, float(weights.sum())

    def _describe(self, window):
        """What is logged of the steps of a window, by name."""
        metric = self.problem.metric(window.loss, self.problem.train_split)
        values = {
            "loss": window.loss,
            metric_key(self.problem.metric_name): metric,
            "clustering_loss": window.clustering_loss,
            "learning_rate": float(self._schedule(self.step - 1)),
        }
        if window.seconds:
            values["tokens_per_second"] = window.tokens_per_second
        return {**values, **centroid_occupancy(self.lm)}

    def _save(self):
        try:
            run_directory.save_checkpoint(self.lm, self.model_dir, self.step)
        except FloatingPointError as error:
            self._stop_without_saving(str(error))

    def _stop_without_saving(self, received):
        saved = run_directory.checkpoints(self.model_dir)
        last = f"is {str(saved[-1])!r}" if saved else "does not exist"
        raise FloatingPointError(
            f"The loss and all weights must stay finite. Received: {received}. The "
            f"last good checkpoint {last}. Use another model_dir with a lower "
            "learning_rate or with gradient_clip_norm=1; init_checkpoint can start "
            "from the last good checkpoint"
        )


def _due(step, every, total=None):
    return step == total or (every > 0 and step % every == 0)


def centroid_occupancy(lm):
    """Tells how evenly the tokens are spread over the clusters of each routed layer.

    Args:
        lm: the language model.

    Returns:
        Dict with three entries for each layer that counts its tokens: smallest and
        largest share of a head's tokens in one cluster (`occupancy/LAYER/min` and
        `max`), and the entropy of the shares divided by its largest possible value
        (`occupancy/LAYER/entropy`), the mean over heads.
    """
    found = {}
    for layer in lm._flatten_layers():
        counts = getattr(layer, "counts", None)
        if not isinstance(layer, layers.OnlineKMeans) or counts is None:
            continue
        tokens = np.asarray(counts, "float64")
        totals = tokens.sum(axis=-1, keepdims=True)
        if not totals.all():  # as the release starts
            continue
        tag = "occupancy/" + counts.path.removesuffix("/kmeans/counts")
        for name, value in zip(("min", "max", "entropy"), spread(tokens / totals)):
            found[f"{tag}/{name}"] = value
    return found


def spread(shares):
    """Tells how evenly tokens are spread.

    Args:
        shares: NumPy array `<float64>[heads, clusters]`, each row of the sum 1.

    Returns:
        The smallest share, the largest, and the entropy of the shares divided by its
        largest possible value, the mean over heads.
    """
    terms = -shares * np.log(np.maximum(shares, 1e-300))
    most = math.log(shares.shape[-1]) or 1.0
    entropy = terms.sum(axis=-1).mean() / most
    return float(shares.min()), float(shares.max()), float(entropy)


class _StopRequest:
    """Turns the first SIGINT or SIGTERM into a wish to stop after the step."""

    def __init__(self):
        self.requested = False
        self._earlier = {}

    def __enter__(self):
        # Python delivers signals to the main thread alone.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._earlier[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception):
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _receive(self, number, frame):
        self.requested = True
        self.__exit__()
        # The signal may have come in the middle of a print, so print cannot be used.
        text = "\nstopping after this step; once more to stop at once, unsaved\n"
        os.write(2, text.encode())
