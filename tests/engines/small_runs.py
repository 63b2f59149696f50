"""Short training runs on any engine, in this process or in processes of their own.

python -m tests.engines.small_runs SETTINGS
"""

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import keras
import numpy as np

from routing_tf import layers
from routing_tf import models
from routing_tf import training
from routing_tf import zoo
from routing_tf.models import build
from routing_tf.models import feed_forwards
from routing_tf.models.score import TokenScorer
from routing_tf.training import engines
from routing_tf.training.engines.step import TrainingStep
from tests.models import small_models

ROWS, LENGTH, INPUT_LENGTH = 8, 24, 40
# Real tokens of each row, in one step after the other. The second half of the rows is
# the second replica's, pairs of rows are the parts of a step.
LENGTHS = (
    (24, 23, 20, 24, 2, 1, 2, 1),  # nearly all padding
    (24, 20, 9, 24, 0, 0, 0, 0),  # no real token
    (24, 24, 24, 24, 24, 24, 24, 24),
    (3, 0, 1, 2, 24, 17, 22, 11),
    (0, 0, 16, 5, 0, 0, 24, 1),  # parts without a token
)
SETTINGS = {
    **small_models.SETTINGS,
    "num_layers": 1,
    "max_sequence_length": LENGTH,
    "learning_rate": 3e-3,
    "warmup_steps": 5,
    "weight_decay": 0.01,
    "gradient_clip_norm": 0.5,
    # Adam divides by the square root of squares: rounding must not pass for a gradient.
    "adam_epsilon": 1e-4,
}
# How much more may be rounding: where the input of a ReLU rounds to one side of 0 or
# the other, its gradient jumps and the loss does not.
ROUNDING = {"gradient_norm": 10.0}
KINDS = {
    "decoder": {},
    "losses": {},
    "seq2seq": {
        "num_encoder_layers": 1,
        "max_input_length": INPUT_LENGTH,
        "routing": "token_choice",
    },
    "text": {},
    "image": {
        "image_height": 2,
        "image_width": 4,
        "num_channels": 3,
        "num_classes": 5,
        "local_relative_positions": False,
    },
}
DEFAULTS = {"kind": "decoder", "num_parts": 1, "steps_per_call": 1, "num_steps": 12}
DEFAULTS |= {"precision": "float32", "changes": {}, "jit_compile": True}
# The optimizer's loss scaling, if any; step -> rows whose gradient is not finite.
DEFAULTS |= {"loss_scaling": None, "traps": {}}
# Numbers of rows to score at the end; whether `Model.fit` trains.
DEFAULTS |= {"scored_rows": (), "fit": False}


@keras.saving.register_keras_serializable("routing_tf_tests")
class Trap(keras.layers.Layer):
    """Adds 0; where `trigger` is 0, the gradient of its weight is not finite."""

    def build(self, *shapes):
        self.bait = self.add_weight(name="bait", shape=(1,), initializer="ones")

    def call(self, x, trigger):
        root = keras.ops.sqrt(self.bait * keras.ops.cast(trigger, self.bait.dtype))
        nothing = keras.ops.cast(root - keras.ops.stop_gradient(root), x.dtype)
        return x + nothing[:, None]


def decoder(hyperparameters, precision="float32"):
    """A model whose blocks have local heads and routed ones of both kinds."""
    h = hyperparameters
    policy = keras.dtype_policies.get(precision)
    options = {"dropout": h.attention_dropout, "dtype": policy}
    routed = {
        **options,
        "max_relative_position": h.max_relative_position,
        "decay": h.centroid_decay,
        "commitment_weight": h.commitment_weight,
        "revive_after": h.revive_centroids_after,
        "centroid_initialization": h.centroid_initialization,
        "exploring_queries": h.exploring_queries,
    }
    inputs = {
        "token_ids": keras.Input((LENGTH,), dtype="int32", name="token_ids"),
        "padding_mask": keras.Input((LENGTH,), dtype="bool", name="padding_mask"),
        "trigger": keras.Input((1,), name="trigger"),
    }
    embedding = layers.TokenEmbedding(h.vocabulary_size, h.hidden_dim, dtype=policy)
    x = Trap(dtype=policy)(embedding(inputs["token_ids"]), inputs["trigger"])
    for index in range(h.num_layers):
        groups = [
            layers.RoutedHeads(1, 3, 6, routing="expert_choice", **routed),
            layers.RoutedHeads(1, 3, 6, routing="token_choice", **routed),
            layers.LocalHeads(1, (8,), 1, max_relative_position=10, **options),
        ]
        block = layers.TransformerBlock(
            layers.MixedAttention(groups, key_dim=6, dtype=policy),
            layers.FeedForward(h.intermediate_dim, dtype=policy),
            dropout=h.residual_dropout,
            remat=h.remat,
            name=f"block_{index}",
            dtype=policy,
        )
        x = block(x, padding_mask=inputs["padding_mask"])
    lm = keras.Model(inputs, keras.layers.Dense(h.vocabulary_size, dtype=policy)(x))
    lm.hyperparameters = h
    return lm


def all_losses(hyperparameters, precision="float32"):
    """A model whose layers add all kinds of losses and keep all statistics."""
    h = hyperparameters
    groups = [
        zoo.IndexedHeads(1, 6, 2, 4, warm_up_steps=2, indexer_loss_weight=0.5),
        zoo.ThresholdHeads(1, 3, 6, commitment_weight=0.2),
        layers.RoutedHeads(1, 3, 6, share_query_key=False, ema=False),
    ]
    experts = zoo.MixtureOfExperts(
        4, h.intermediate_dim, 20, load_balancing_weight=0.3, z_loss_weight=0.1
    )
    compressive = zoo.CompressiveAttention(
        2, 6, segment_length=8, memory_length=8, compressed_length=4
    )
    ids = keras.Input((LENGTH,), dtype="int32", name="token_ids")
    mask = keras.Input((LENGTH,), dtype="bool", name="padding_mask")
    x = layers.TokenEmbedding(h.vocabulary_size, h.hidden_dim)(ids)
    attention = layers.MixedAttention(groups, key_dim=6)
    block = layers.TransformerBlock(attention, experts, remat=h.remat, name="block")
    # Unlike tokens, so that the indexer has something to learn.
    x = block(30.0 * x, padding_mask=mask)
    x = x + compressive(x, mask=mask)
    outputs = keras.layers.Dense(h.vocabulary_size)(x)
    lm = keras.Model({"token_ids": ids, "padding_mask": mask}, outputs)
    lm.hyperparameters = h
    return lm


@keras.saving.register_keras_serializable("routing_tf_tests")
class Watched(keras.layers.Layer):
    """A feed-forward layer that writes state of all kinds in its calls."""

    def __init__(self, dropout=0.0, kernel_initializer=None, **options):
        super().__init__(**options)
        self.supports_masking = True
        self.memory = zoo.ProductKeyMemory(2, 4, 2, 6, query_norm="batch")
        self.drawing = keras.layers.Dropout(0.5, seed=1)

    def build(self, shape):
        self.memory.build(shape)
        state = {"initializer": "zeros", "trainable": False}
        self.mean = self.add_weight(name="mean", shape=shape[-1:], **state)
        self.num_calls = self.add_weight(name="num_calls", dtype="int32", **state)

    def call(self, x, mask=None, training=None):
        if training:
            mean = keras.ops.mean(keras.ops.ones_like(x) + x, axis=(0, 1))
            self.mean.assign(0.5 * self.mean + 0.5 * mean)
            self.num_calls.assign_add(1)
            x = x + 0.0 * self.drawing(x, training=True)
        return self.memory(x, mask=mask, training=training)


feed_forwards.register("watched", lambda place, **options: Watched(**options))
WATCHED = {"feed_forward": "watched", "weight_decay": 0.0}
WITHOUT_PRESETS = {"decoder": decoder, "losses": all_losses}


def hyperparameters(kind="decoder", **changes):
    return models.Hyperparameters(**{**SETTINGS, **KINDS[kind], **changes})


def make_model(kind, h, precision="float32", loss_scaling=None):
    """Makes a model with an optimizer, which may scale the loss if no preset does."""
    if kind not in WITHOUT_PRESETS:
        lm = build.make_model(h, precision=precision)
        training.compile_for_training(lm, h)
        return lm
    lm = WITHOUT_PRESETS[kind](h, precision)
    training.add_weight_decay(lm, h.weight_decay)
    optimizer = training.make_optimizer(h)
    if loss_scaling is not None:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, **loss_scaling)
    lm.optimizer = optimizer
    optimizer.build(lm.trainable_variables)
    return lm


def make_batch(kind, step, trapped=(), lengths=None):
    """The batch of a step: inputs, targets and weights.

    Args:
        kind: kind of the model.
        step: number of the step.
        trapped: rows of a decoder's batch whose gradient is not finite.
        lengths: number of real tokens of each row; None for those of the step.
    """
    lengths = np.array(LENGTHS[step % len(LENGTHS)] if lengths is None else lengths)
    random = np.random.default_rng(step)
    x = small_models.inputs(lengths, LENGTH, seed=step)
    ids, mask = x["token_ids"], x["padding_mask"]
    weights = mask.astype("float32")
    if kind == "image":
        shape = (len(lengths), 2, 4, 3)
        x = {"images": ids.reshape(shape), "padding_mask": mask.reshape(shape)}
        x["labels"] = random.integers(0, 5, len(lengths)).astype("int32")
        return x, x["images"], weights.reshape(shape)
    targets = np.roll(ids, -1, axis=1)
    if kind == "losses":
        # Losses of layers count other tokens than that of the outputs.
        return x, targets, weights * (random.uniform(size=weights.shape) < 0.6)
    if kind == "text":
        return x, targets, weights
    if kind == "decoder":
        trigger = np.ones((len(lengths), 1), "float32")
        trigger[list(trapped)] = 0.0
        return {**x, "trigger": trigger}, targets, weights
    source = random.integers(1, 31, (len(lengths), INPUT_LENGTH)).astype("int32")
    source_mask = np.arange(INPUT_LENGTH) < (lengths * 5 // 3)[:, None]
    x = {
        "encoder_token_ids": source,
        "encoder_padding_mask": source_mask,
        "decoder_token_ids": ids,
        "decoder_padding_mask": mask,
    }
    return x, targets, weights


def own_rows(engine, batch):
    """The rows of a batch that this worker reads."""
    size = ROWS // engine.num_workers
    rows = slice(engine.worker * size, (engine.worker + 1) * size)
    return keras.tree.map_structure(lambda array: array[rows], batch)


class Run:
    """A model and its step on an engine.

    Args:
        engine: the engine.
        **options: see `DEFAULTS`.
    """

    def __init__(self, engine, **options):
        self.options = {**DEFAULTS, **options}
        self.engine, self.kind = engine, self.options["kind"]
        self.h = hyperparameters(self.kind, **self.options["changes"])
        keras.utils.clear_session()  # or names would tell models apart
        keras.utils.set_random_seed(0)
        own = self.options
        with engine.scope():
            self.lm = make_model(
                self.kind, self.h, own["precision"], own["loss_scaling"]
            )
        optimizer, clip_norm = self.lm.optimizer, self.h.gradient_clip_norm
        self.training_step = TrainingStep(
            self.lm, optimizer, clip_norm, own["num_parts"], engine.num_replicas
        )
        self.num_done, self.reports, self._call = 0, [], None

    def train(self, num_steps=None, lengths=None):
        """Trains some steps; returns their reports."""
        if self.options["fit"]:
            return self._fit(num_steps or self.options["num_steps"])
        per_call = self.options["steps_per_call"]
        self._call = self._call or self.engine.compile(
            self.training_step, per_call, self.options["jit_compile"]
        )
        start = len(self.reports)
        for _ in range((num_steps or self.options["num_steps"]) // per_call):
            batches = [
                own_rows(self.engine, self.batch(self.num_done + i, lengths))
                for i in range(per_call)
            ]
            self.reports += self._call(batches, self.num_done)
            self.num_done += per_call
        self.engine.sync()
        return self.reports[start:]

    def _fit(self, num_steps):
        """Trains with Keras alone, which has another loss where there is padding."""
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        alone = self.engine.num_devices == 1
        with self.engine.scope():
            self.lm.compile(self.lm.optimizer, loss, jit_compile=alone)
            for step in range(num_steps):
                x, targets, _ = self.batch(step, (LENGTH,) * ROWS)
                # Keras adds up a first batch over replicas: booleans will not do.
                x = {name: array + 0 for name, array in x.items()}
                self.lm.fit(x, targets, batch_size=ROWS, verbose=0)

    def score(self, num_rows):
        """Scores the first rows of a batch, on the devices of the engine."""
        scorer = TokenScorer(self.lm, engine=self.engine)
        x, targets, _ = self.batch(3)
        x = {name: array[:num_rows] for name, array in x.items()}
        return scorer.score(x, targets[:num_rows])

    def batch(self, step, lengths=None):
        """The global batch of a step."""
        trapped = self.options["traps"].get(str(step), ())
        return make_batch(self.kind, step, trapped, lengths)

    def state(self, replica=0):
        """Arrays of a replica: variables, and what the steps reported."""
        reports = {
            name: np.array([getattr(report, name) for report in self.reports])
            for name in ("loss", "cross_entropy", "clustering_loss", "num_tokens")
        }
        for name in self.training_step.loss_names:
            reports[name] = np.array([own.named_losses[name] for own in self.reports])
        norms = np.array([report.gradient_norm for report in self.reports])
        variables = {}
        for index, variable in enumerate(self.training_step.variables):
            value = variable.value
            if hasattr(value, "values"):  # what each replica holds
                value = value.values[replica]
            if variable.name != "seed_generator_state":
                variables[f"{index} {variable.name}"] = to_array(value)
        return {**variables, **reports, "gradient_norm": norms, **self.scores}

    @functools.cached_property
    def scores(self):
        """Scores of first rows of a batch, by their number; those of all replicas."""
        numbers = self.options["scored_rows"]
        return {f"scores of {number}": self.score(number) for number in numbers}


@functools.cache
def _on_one_device(options):
    run = Run(engines.make(), **json.loads(options))
    run.train()
    return run.state()


def on_one_device(**options):
    """The state after training on whole batches, step by step, without remat."""
    changes = {**options.get("changes", {}), "remat": False}
    whole = {"num_parts": 1, "steps_per_call": 1, "changes": changes}
    return _on_one_device(json.dumps({**DEFAULTS, **options, **whole}))


def to_array(value):
    """The value of a variable, also of one that other workers share."""
    if keras.backend.backend() == "jax":
        return np.asarray(value.addressable_data(0))
    return np.asarray(value)


def largest_difference(one, other):
    """Compares two states; raises if they are not of the same things."""
    assert one.keys() == other.keys()
    differences = {}
    for name, expected in one.items():
        assert expected.shape == other[name].shape, name
        is_finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(other[name]), is_finite, name)
        expected, actual = expected[is_finite].astype("float64"), other[name][is_finite]
        difference = np.abs(expected - actual).max(initial=0)
        # Tokens and norms are no numbers near 1.
        scale = max(1.0, np.abs(expected).max(initial=0))
        scale *= ROUNDING.get(name, 1.0)
        differences[name] = float(difference / scale)
    name = max(differences, key=differences.get)
    return differences[name], name


def train_elsewhere(strategy, runs, num_devices=None, num_workers=1, **variables):
    """Trains in processes of their own.

    Args:
        strategy: name of the strategy.
        runs: dict of names and options of `Run`.
        num_devices: number of devices to cut the CPU into.
        num_workers: number of processes.
        **variables: environment variables.

    Returns:
        Dict of names and lists of states, one for each replica.
    """
    environment = {
        **os.environ,
        "KERAS_BACKEND": keras.backend.backend(),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        **variables,
    }
    ports = free_ports(num_workers)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for worker in range(num_workers):
            own = {}
            if strategy == "multi_worker":
                own = cluster_variables(ports, worker)
            settings = [strategy, num_devices, folder, runs]
            with open(f"{folder}/{worker}.txt", "w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, json.dumps(settings)],
                    env={**environment, **own},
                    stdout=log,
                    stderr=log,
                )
            processes.append(process)
        try:
            codes = [process.wait(timeout=600) for process in processes]
        finally:
            for process in processes:
                process.kill()
        logs = [path.read_text() for path in sorted(pathlib.Path(folder).glob("*.txt"))]
        assert not any(codes), "\n".join(log[-3000:] for log in logs)
        states = {}
        for name in runs:
            paths = sorted(pathlib.Path(folder).glob(f"{name}-*.npz"))
            states[name] = [dict(np.load(path)) for path in paths]
        return states


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("localhost", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def cluster_variables(ports, worker):
    """What tells a process of its cluster on this machine."""
    addresses = [f"localhost:{port}" for port in ports]
    if keras.backend.backend() == "tensorflow":
        task = {"type": "worker", "index": worker}
        cluster = {"cluster": {"worker": addresses}, "task": task}
        return {"TF_CONFIG": json.dumps(cluster)}
    prefix = "KERAS_DISTRIBUTION_"
    return {
        f"{prefix}JOB_ADDRESSES": ",".join(addresses),
        f"{prefix}NUM_PROCESSES": str(len(ports)),
        f"{prefix}PROCESS_ID": str(worker),
    }


def main(strategy, num_devices, folder, runs):
    engine = engines.make(strategy, num_virtual_devices=num_devices)
    local = engine.num_devices // engine.num_workers
    print(engine.description)
    for name, options in runs.items():
        run = Run(engine, **options)
        run.train()
        states = [run.state(replica) for replica in range(local)]
        for replica, state in enumerate(states):
            path = f"{folder}/{name}-{engine.worker * local + replica}.npz"
            np.savez(path, **state)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
