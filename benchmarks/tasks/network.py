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
from tqdm.keras import TqdmCallback

from benchmarks.recall_model import GatedConvolution
from benchmarks.recall_model import TiedLogits
from benchmarks.tasks.settings import CONVOLUTION
from benchmarks.tasks.task import SCORES
from benchmarks.tasks.task import Examples
from routing_tf import layers
from routing_tf import models
from routing_tf import training
from routing_tf.layers.support.keras_internals import declare_call_argument
from routing_tf.models import stack
from routing_tf.models.compiled import compiled_once

HELD_OUT_SEED = 2**31  # no flag can be as large
VALIDATED, AT_ONCE, MADE_AT_ONCE = 256, 50, 1000  # sequences
STEPS_PER_EPOCH = 100  # at most; validations come between epochs
DRAWS_PER_EPOCH = 1 << 16  # more than one layer makes
PIECE = 256  # tokens of a stream


class TooSlow(Exception):
    """A run takes longer than it may."""


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

    `model` is a Keras model from tokens `<int32>[B, L]` and positions `<int32>[B, P]`
    to logits. The task's `readout` says how these come from hidden states: by a layer
    at the positions (`"dense"`), by products with the embeddings (`"tied"`), from the
    last state (`"sequence"`), or from the mean of those of an encoder (`"mean"`).
    """

    def __init__(self, settings):
        keras.utils.clear_session()
        keras.utils.set_random_seed(settings.seed)
        self.settings = settings
        h = settings.hyperparameters
        tokens = keras.Input((settings.of_task.length,), dtype="int32")
        positions = keras.Input((None,), dtype="int32")
        is_of_encoders = settings.of_task.is_of_encoders
        encode = self._encoded if is_of_encoders else self._decoded
        self.model = keras.Model([tokens, positions], encode(h, tokens, positions))
        declare_call_argument(self.model, "routing_scope")
        self.model.compile(
            training.make_optimizer(h),
            keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            ),
            weighted_metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
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
        mean = keras.layers.GlobalAveragePooling1D(keepdims=True)(hidden, mask=mask)
        return keras.layers.Dense(task.num_labels)(mean)

    def train(self, folder, minutes=math.inf, steps=None):
        """Trains up to the number of steps, from where an earlier call left it.

        The folder of the run has Keras' own backup. Raises `TooSlow` where it takes
        more minutes; what is learned is kept. A run that has ended had so many `steps`.
        """
        s, total = self.settings, self.settings.hyperparameters.train_steps
        batches = Batches(s, math.gcd(total, STEPS_PER_EPOCH))
        watch = Watch(batches, s.stop_at, minutes)
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        callbacks = [
            keras.callbacks.BackupAndRestore(
                str(folder / "backup"), double_checkpoint=True, delete_checkpoint=False
            ),
            keras.callbacks.CSVLogger(str(folder / "curve.csv"), append=True),
            TqdmCallback(verbose=0, desc=f"{s.task} {s.pattern}", disable=None),
            watch,
        ]
        self.model.fit(
            batches,
            epochs=(steps or total) // len(batches),
            validation_data=inputs_and_targets(self._held_out(VALIDATED)),
            validation_batch_size=AT_ONCE,
            verbose=0,
            callbacks=callbacks,
        )
        if watch.is_too_slow:
            raise TooSlow(f"{self.steps_done:,} of {total:,} steps are done")

    @property
    def steps_done(self):
        """Number of training steps that the weights have seen."""
        return int(ops.convert_to_numpy(self.model.optimizer.iterations))

    def _held_out(self, number, length=None):
        return self.settings.of_task.examples(number, HELD_OUT_SEED, 0, False, length)

    def score(self):
        """Scores held-out sequences, in the routing scope that decoding has."""
        task, found = self.settings.of_task, []
        examples = self._held_out(task.test_rows)
        for start in range(0, task.test_rows, AT_ONCE):
            part = examples.rows(slice(start, start + AT_ONCE))
            answer = compiled_once(self.model, self._answers, part.tokens.shape)
            found.append(ops.convert_to_numpy(answer(part.tokens, part.positions)))
        return SCORES[task.score](np.concatenate(found), examples)

    def _answers(self, tokens, positions):
        logits = self.model([tokens, positions], routing_scope="prefix")
        return ops.argmax(logits, axis=-1)

    def cache_bytes(self, length):
        """Returns the memory of one sequence of a length."""
        cache = self._backbone.make_cache(1, length)
        return sum(ops.convert_to_numpy(x).nbytes for x in keras.tree.flatten(cache))

    def score_stream(self, number, length):
        """Scores longer sequences, side by side and token by token, with a cache."""
        examples = self._held_out(number, length)
        wanted, found = examples.positions[0], []  # the same in all sequences
        cache = self._backbone.make_cache(number, length)
        starts = range(0, length, PIECE)
        for start in tqdm.tqdm(starts, f"{length:,} tokens", disable=None, leave=False):
            tokens = examples.tokens[:, start : start + PIECE]
            step = compiled_once(self.model, self._next_answers, (tokens.shape, length))
            answers, cache = step(tokens, cache, ops.convert_to_tensor(start, "int32"))
            own = wanted[(wanted >= start) & (wanted < start + PIECE)] - start
            found.append(ops.convert_to_numpy(answers)[:, own])
        predicted = np.concatenate(found, axis=1)
        return SCORES[self.settings.of_task.score](predicted, examples)

    def _next_answers(self, tokens, cache, index):
        hidden, cache = self._backbone.decode_with_cache(tokens, cache, index)
        return ops.argmax(self._logits(hidden), axis=-1), cache


class Watch(keras.callbacks.Callback):
    """Sets the epoch of data and random numbers, and ends a run early."""

    def __init__(self, batches, stop_at, minutes):
        super().__init__()
        self.is_too_slow = False
        self._batches, self._stop_at = batches, stop_at
        self._end = time.perf_counter() + 60 * minutes

    def on_epoch_begin(self, epoch, logs=None):
        self._batches.epoch = epoch
        # Keras does not save where its random numbers are.
        for variable in self.model.non_trainable_variables:
            if variable.name == "seed_generator_state":
                seed = ops.convert_to_numpy(variable)[0]
                variable.assign([seed, (epoch + 1) * DRAWS_PER_EPOCH])

    def on_epoch_end(self, epoch, logs=None):
        is_done = logs["val_accuracy"] >= self._stop_at
        is_last = epoch + 1 == self.params["epochs"]
        self.is_too_slow = time.perf_counter() > self._end and not is_done | is_last
        self.model.stop_training = is_done or self.is_too_slow
