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
from routing_tf.models.compiled import compiled_once

HELD_OUT_SEED = 2**31  # no flag can be as large
VALIDATED, AT_ONCE, MADE_AT_ONCE = 256, 50, 1000  # sequences
STEPS_PER_EPOCH = 100  # at most, between validations
PIECE = 256  # tokens of a stream


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
    """The batches of an epoch, which its number and the seed of the run decide."""

    def __init__(self, settings, steps):
        super().__init__()
        self.epoch = 0
        self._settings, self._steps = settings, steps
        task, self._rows = settings.of_task, None
        if task.train_rows:
            starts = range(0, task.train_rows, MADE_AT_ONCE)
            numbers = [min(MADE_AT_ONCE, task.train_rows - at) for at in starts]
            parts = [task.examples(n, settings.seed, i) for i, n in enumerate(numbers)]
            self._rows = Examples(*map(np.concatenate, zip(*parts)))

    def __len__(self):
        return self._steps

    def __getitem__(self, index):
        s, step = self._settings, self.epoch * self._steps + index
        if self._rows is None:
            return inputs_and_targets(s.of_task.examples(s.batch_size, s.seed, step))
        number = len(self._rows.tokens)
        of_pass, place = divmod(step, max(1, number // s.batch_size))
        # Each pass has another order.
        order = np.random.default_rng([s.seed, of_pass]).permutation(number)
        start = place * s.batch_size
        return inputs_and_targets(self._rows.rows(order[start : start + s.batch_size]))


def inputs_and_targets(examples):
    """Returns what `keras.Model.fit` takes for a batch of `Examples`."""
    return (examples.tokens, examples.positions), examples.labels, examples.weights


class Network:
    """A model with random weights, and what is asked of it.

    The task's `readout` says how answers come from hidden states: by a layer at the
    places (`"dense"`), by products with the embeddings (`"tied"`), all from the last
    state (`"sequence"`), or one from the mean of the states of an encoder (`"mean"`).

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
        self.model = keras.Model([tokens, positions], encode(h, tokens, positions))
        declare_call_argument(self.model, "routing_scope")
        self.model.compile(
            training.make_optimizer(h),
            keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            ),
            weighted_metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
            # On a CPU it saves less than it takes.
            jit_compile=bool(keras.distribution.list_devices("gpu")),
        )

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
        self._logits = keras.layers.Dense(task.num_labels or task.vocabulary)
        if task.readout == "tied":
            self._logits = TiedLogits(self._backbone.token_embedding)
        if task.readout == "sequence":
            places = layers.TimingSignal()(ops.zeros_like(hidden))
            hidden = hidden[:, -1:] + places
            hidden = keras.layers.Dense(2 * h.hidden_dim, activation="gelu")(hidden)
        hidden = ops.take_along_axis(hidden, positions[..., None], axis=1)
        return self._logits(hidden)

    def _encoded(self, h, tokens, positions):
        """One answer for a sequence, in which 0 is padding."""
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
            minutes: how long it may take.

        Raises:
            TooSlow: if it takes longer; what it has learned is kept.
        """
        h, s, folder = (
            self.settings.hyperparameters,
            self.settings,
            pathlib.Path(folder),
        )
        folder.mkdir(parents=True, exist_ok=True)
        steps = math.gcd(h.train_steps, STEPS_PER_EPOCH)
        batches, epochs = Batches(s, steps), h.train_steps // steps
        watch = Watch(batches, epochs, s, minutes)
        backup = keras.callbacks.BackupAndRestore(
            str(folder / "backup"), double_checkpoint=True, delete_checkpoint=False
        )
        curve = keras.callbacks.CSVLogger(str(folder / "curve.csv"), append=True)
        self.model.fit(
            batches,
            epochs=epochs,
            validation_data=inputs_and_targets(self.held_out(VALIDATED)),
            validation_batch_size=AT_ONCE,
            verbose=0,
            callbacks=[backup, curve, watch],
        )
        if watch.is_too_slow:
            raise TooSlow(
                f"{self.steps_done:,} of {h.train_steps:,} steps are done, and the "
                "same command goes on from there"
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

    def score(self):
        """Scores held-out sequences, in the routing scope that decoding has."""
        task, found = self.settings.of_task, []
        examples = self.held_out(task.test_rows)
        predict = compiled(
            self.model, lambda *x: self.model(list(x), routing_scope="prefix")
        )
        for start in range(0, task.test_rows, AT_ONCE):
            part = examples.rows(slice(start, start + AT_ONCE))
            logits = predict(part.tokens, part.positions)
            found.append(ops.convert_to_numpy(logits).argmax(axis=-1))
        return SCORES[task.score](np.concatenate(found), examples)

    def cache_bytes(self, length):
        """Returns the memory of one sequence of a length."""
        cache = self._backbone.make_cache(1, length)
        return sum(ops.convert_to_numpy(x).nbytes for x in keras.tree.flatten(cache))

    def score_stream(self, number, length):
        """Scores longer sequences, side by side and token by token, with a cache."""
        examples = self.held_out(number, length)
        wanted, found = examples.positions[0], []  # the same in all sequences
        cache = self._backbone.make_cache(number, length)
        starts = range(0, length, PIECE)
        for start in tqdm.tqdm(starts, f"{length:,} tokens", disable=None, leave=False):
            tokens = examples.tokens[:, start : start + PIECE]
            step = compiled_once(self.model, self._answers, (tokens.shape, length))
            answers, cache = step(tokens, cache, ops.convert_to_tensor(start, "int32"))
            own = wanted[(wanted >= start) & (wanted < start + PIECE)] - start
            found.append(ops.convert_to_numpy(answers)[:, own])
        predicted = np.concatenate(found, axis=1)
        return SCORES[self.settings.of_task.score](predicted, examples)

    def _answers(self, tokens, cache, index):
        hidden, cache = self._backbone.decode_with_cache(tokens, cache, index)
        return ops.argmax(self._logits(hidden), axis=-1), cache


class Watch(keras.callbacks.Callback):
    """Tells batches the epoch, shows how far a run is, and ends it early."""

    def __init__(self, batches, epochs, settings, minutes):
        super().__init__()
        self.is_too_slow = False
        self._batches, self._epochs, self._minutes = batches, epochs, minutes
        self._settings, self._bar = settings, None

    def on_epoch_begin(self, epoch, logs=None):
        self._batches.epoch = epoch
        if self._bar is None:
            self._started, steps = time.perf_counter(), len(self._batches)
            self._bar = tqdm.tqdm(
                total=self._epochs * steps,
                initial=epoch * steps,
                desc=f"{self._settings.task} {self._settings.pattern}",
                unit="step",
                disable=None,
            )

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
