"""The models of the tasks: trained, resumed and scored.

Letters: B sequences, L tokens, P places where an answer is asked for.
"""

import math
import pathlib
import time

import keras
import numpy as np
import tqdm
from keras import ops

from benchmarks.tasks.settings import CONVOLUTION
from benchmarks.tasks.task import SCORES
from benchmarks.tasks.task import Examples
from routing_tf import layers
from routing_tf import models
from routing_tf import training
from routing_tf.layers.keras_internals import declare_call_argument
from routing_tf.models import stack
from routing_tf.models.compiled import compiled

READOUTS = ("dense", "tied", "sequence", "mean")
HELD_OUT_SEED = 2**31  # no flag can be as large
VALIDATED, AT_ONCE = 256, 50  # sequences
STEPS_PER_EPOCH = 100  # at most, between validations
PIECE = 256  # tokens of a stream
MOST_CACHE_BYTES = 2**32


class TooSlow(Exception):
    """A run would take longer than it may."""


class TiedLogits(keras.layers.Layer):
    """Products of hidden states with the vectors of a `TokenEmbedding`."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, hidden):
        return ops.matmul(hidden, ops.transpose(self.embedding.embeddings))

    def compute_output_shape(self, shape):
        return (*shape[:-1], self.embedding.vocabulary_size)


class GatedConvolution(keras.layers.Layer):
    """Zoology's `BaseConv` with its norm and residual: a first layer of recall models.

    Computes `x + u + conv(u) * dense(u)` of the normalized input `u`; the convolution
    reads a token and the two before it, each feature for itself.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.layers.LayerNormalization()
        self.convolution = keras.layers.DepthwiseConv1D(3)

    def build(self, shape):
        self.gate = keras.layers.Dense(shape[-1])
        for layer in (self.norm, self.convolution, self.gate):
            layer.build(shape)

    def call(self, x):
        u = self.norm(x)
        before = ops.pad(u, [[0, 0], [2, 0], [0, 0]])
        return x + u + self.convolution(before) * self.gate(u)

    def compute_output_shape(self, shape):
        return shape


class Batches(keras.utils.PyDataset):
    """The batches of an epoch, which its number and the seed decide.

    Args:
        settings: `Settings`.
        steps: number of batches of an epoch.
    """

    def __init__(self, settings, steps):
        super().__init__()
        self.epoch = 0
        self._settings, self._steps = settings, steps
        self._rows = _training_rows(settings.of_task, settings.seed)

    def __len__(self):
        return self._steps

    def __getitem__(self, index):
        s, step = self._settings, self.epoch * self._steps + index
        if self._rows is None:
            examples = s.of_task.examples(s.batch_size, s.seed, step)
        else:
            number = len(self._rows.tokens)
            of_pass, place = divmod(step, max(1, number // s.batch_size))
            # The next pass has another order.
            order = np.random.default_rng([s.seed, of_pass]).permutation(number)
            start = place * s.batch_size
            examples = self._rows.rows(order[start : start + s.batch_size])
        return _inputs_and_targets(examples)


def _training_rows(task, seed, at_once=1000):
    """The training sequences of a task that come again; None if all are new ones."""
    if task.train_rows is None:
        return None
    starts = range(0, task.train_rows, at_once)
    numbers = [min(at_once, task.train_rows - start) for start in starts]
    return Examples.joined(
        [task.examples(number, seed, step) for step, number in enumerate(numbers)]
    )


def _inputs_and_targets(examples):
    return (examples.tokens, examples.positions), examples.labels, examples.weights


class Network:
    """A model with random weights, and what is asked of it.

    Args:
        settings: `Settings`.

    Attributes:
        model: Keras model from tokens `<int32>[B, L]` and positions `<int32>[B, P]` to
            the logits of the answers.
    """

    def __init__(self, settings):
        keras.utils.clear_session()
        keras.utils.set_random_seed(settings.seed)
        self.settings = settings
        h = settings.hyperparameters
        tokens = keras.Input((settings.of_task.length,), dtype="int32")
        positions = keras.Input((None,), dtype="int32")
        encode = self._encoded if settings.is_encoder else self._decoded
        logits = encode(h, tokens, positions)
        self.model = keras.Model([tokens, positions], logits)
        declare_call_argument(self.model, "routing_scope")
        self.model.compile(
            training.make_optimizer(h),
            keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            ),
            weighted_metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
            jit_compile="auto" if _has_accelerator() else False,
        )
        self._predict = None

    def _decoded(self, h, tokens, positions):
        task = self.settings.of_task
        self._backbone = models.RoutingTransformer(h)
        blocks = list(self._backbone.blocks)
        if self.settings.first_layer == CONVOLUTION:
            blocks[0] = GatedConvolution()
        hidden = tokens
        for layer in [*self._backbone.embedding_layers, *blocks]:
            hidden = layer(hidden)
        hidden = self._backbone.final_norm(hidden)
        if task.readout == "sequence":
            return _told_from_the_end(hidden, task)
        hidden = ops.take_along_axis(hidden, positions[..., None], axis=1)
        self._logits = keras.layers.Dense(task.num_labels or task.vocabulary)
        if task.readout == "tied":
            self._logits = TiedLogits(self._backbone.token_embedding)
        return self._logits(hidden)

    def _encoded(self, h, tokens, positions):
        """One answer for a sequence, from the mean of its states; 0 is padding."""
        task, policy = self.settings.of_task, keras.config.dtype_policy()
        mask = ops.not_equal(tokens, 0)
        hidden = layers.TokenEmbedding(task.vocabulary, h.hidden_dim)(tokens)
        hidden = layers.TimingSignal()(hidden)
        for index in range(h.num_encoder_layers):
            block = stack.encoder_block(h, index, policy)
            hidden = block(hidden, padding_mask=mask)
        hidden = keras.layers.LayerNormalization()(hidden)
        share = ops.cast(mask, "float32")[..., None]
        mean = ops.sum(hidden * share, axis=1, keepdims=True)
        mean = mean / ops.maximum(ops.sum(share, axis=1, keepdims=True), 1.0)
        return keras.layers.Dense(task.num_labels)(mean)

    def train(self, folder, minutes=math.inf):
        """Trains up to the number of steps, from where an earlier call left it.

        Args:
            folder: of the run; Keras' own backup is in it.
            minutes: how long it may take. Defaults to no limit.

        Raises:
            TooSlow: if it takes longer; what it has learned is kept.
        """
        h, s = self.settings.hyperparameters, self.settings
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        steps = math.gcd(h.train_steps, STEPS_PER_EPOCH)
        batches, epochs = Batches(s, steps), h.train_steps // steps
        held_out = self.held_out(min(VALIDATED, s.of_task.test_rows))
        watch = Watch(batches, epochs, s, minutes)
        self.model.fit(
            batches,
            epochs=epochs,
            validation_data=_inputs_and_targets(held_out),
            validation_batch_size=AT_ONCE,
            verbose=0,
            callbacks=[
                keras.callbacks.BackupAndRestore(
                    str(folder / "backup"),
                    double_checkpoint=True,
                    delete_checkpoint=False,
                ),
                keras.callbacks.CSVLogger(str(folder / "curve.csv"), append=True),
                watch,
            ],
        )
        if watch.is_too_slow:
            raise TooSlow(
                f"{self.steps_done:,} of {h.train_steps:,} steps are done; the same "
                "command goes on from there"
            )

    @property
    def steps_done(self):
        """Number of training steps that the weights have seen."""
        return int(ops.convert_to_numpy(self.model.optimizer.iterations))

    def held_out(self, number, length=None):
        """Returns held-out `Examples`."""
        task = self.settings.of_task
        return task.examples(
            number, HELD_OUT_SEED, is_training=False, length=length or task.length
        )

    def score(self, number=None):
        """Scores held-out sequences, in the routing scope that decoding has."""
        task = self.settings.of_task
        if self._predict is None:
            self._predict = compiled(
                self.model,
                lambda *inputs: self.model(list(inputs), routing_scope="prefix"),
            )
        examples, found = self.held_out(number or task.test_rows), []
        for start in range(0, len(examples.tokens), AT_ONCE):
            part = examples.rows(slice(start, start + AT_ONCE))
            logits = self._predict(part.tokens, part.positions)
            found.append(ops.convert_to_numpy(logits).argmax(axis=-1))
        return SCORES[task.score](np.concatenate(found), examples)

    def cache_bytes(self, length):
        """Returns the memory of one sequence of a length; None if there is no cache."""
        if self.settings.is_encoder or self.settings.first_layer == CONVOLUTION:
            return None
        cache = self._backbone.make_cache(1, length)
        return sum(ops.convert_to_numpy(x).nbytes for x in keras.tree.flatten(cache))

    def score_stream(self, length, number):
        """Scores longer sequences token by token, in the memory of a cache.

        Args:
            length: tokens of a sequence.
            number: number of sequences, which go side by side.

        Returns:
            The score.
        """
        examples = self.held_out(number, length)
        wanted, found = examples.positions[0], []  # the same in all sequences
        cache = self._backbone.make_cache(number, length)
        step = compiled(self.model, self._next_answers)
        starts = range(0, length, PIECE)
        for start in tqdm.tqdm(starts, f"{length:,} tokens", disable=None, leave=False):
            tokens = examples.tokens[:, start : start + PIECE]
            answers, cache = step(tokens, cache, ops.convert_to_tensor(start, "int32"))
            own = wanted[(wanted >= start) & (wanted < start + PIECE)] - start
            if own.size:
                found.append(ops.convert_to_numpy(answers)[:, own])
        predicted = np.concatenate(found, axis=1)
        return SCORES[self.settings.of_task.score](predicted, examples)

    def _next_answers(self, tokens, cache, index):
        hidden, cache = self._backbone.decode_with_cache(tokens, cache, index)
        return ops.argmax(self._logits(hidden), axis=-1), cache


def _told_from_the_end(hidden, task):
    """Logits of all tokens, each from the last state and the place of the token."""
    places = layers.TimingSignal()(ops.zeros_like(hidden))
    hidden = hidden[:, -1:] + places
    hidden = keras.layers.Dense(2 * hidden.shape[-1], activation="gelu")(hidden)
    return keras.layers.Dense(task.vocabulary)(hidden)


def _has_accelerator():
    return bool(keras.distribution.list_devices("gpu"))


class Watch(keras.callbacks.Callback):
    """Tells batches the epoch, shows how far a run is, and ends it early.

    Args:
        batches: `Batches`.
        epochs: number of epochs.
        settings: `Settings`.
        minutes: how long it may take.
    """

    def __init__(self, batches, epochs, settings, minutes):
        super().__init__()
        self.is_too_slow = False
        self._batches, self._epochs, self._minutes = batches, epochs, minutes
        self._settings, self._bar = settings, None

    def on_epoch_begin(self, epoch, logs=None):
        if self._bar is None:
            self._started = time.perf_counter()
            name = f"{self._settings.task} {self._settings.pattern}"
            steps = len(self._batches)
            self._bar = tqdm.tqdm(
                total=self._epochs * steps,
                initial=epoch * steps,
                desc=name,
                unit="step",
                disable=None,
            )
        self._batches.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._bar.update()

    def on_epoch_end(self, epoch, logs=None):
        shown = {name: f"{value:.3f}" for name, value in logs.items()}
        self._bar.set_postfix(shown, refresh=False)
        minutes = (time.perf_counter() - self._started) / 60
        if logs["val_accuracy"] >= self._settings.stop_at:
            self.model.stop_training = True
        elif minutes >= self._minutes and epoch + 1 < self._epochs:
            self.model.stop_training = self.is_too_slow = True

    def on_train_end(self, logs=None):
        if self._bar is not None:
            self._bar.close()
