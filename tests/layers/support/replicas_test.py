"""Tests of training on two devices. Each runs in a process of its own."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests import golden_cases

# Trains on one device and then on two, on batches of four, and prints the losses and
# what became of the weights. With a learning rate of 0 the state alone moves.
PROGRAM = """
import contextlib, json, sys
import keras, numpy as np
from routing_tf import layers, zoo

backend = keras.backend.backend()
if backend == "tensorflow":
    import tensorflow as tf
    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, devices)
    # Another strategy of this process would number its sums as this one does.
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2

random = np.random.default_rng(0)
x = random.normal(size=(4, 12, 10)).astype("float32")
# Keras adds up a first batch over the replicas, which TensorFlow refuses for bools.
mask = (np.arange(12) < np.array([12, 9, 5, 7])[:, None]).astype("int32")
x = np.concatenate([x, random.normal(size=x.shape)])
mask = np.concatenate([mask, mask])


def build(options, run_eagerly):
    shared = {"decay": 0.5, "commitment_weight": 1.0, **options["groups"]}
    inputs = keras.Input((12, 10)), keras.Input((12,), dtype="int32")
    groups = [
        layers.RoutedHeads(2, 3, 5, **shared),
        layers.RoutedHeads(1, 3, 5, share_query_key=False, **shared),
        layers.RoutedHeads(1, 3, 5, update_rule="paper", **shared),
        layers.MultipoleHeads(1, 3, 4, 2, 3, 1, **shared),
    ]
    if options["groups"]:
        groups.append(zoo.ThresholdHeads(1, 3, 5, **shared))
    else:
        groups.append(layers.RoutedHeads(1, 3, 5, ema=False, **shared))
    block = layers.TransformerBlock(
        layers.MixedAttention(groups, key_dim=6),
        None,
        use_causal_mask=bool(options["groups"]),
        remat=options["remat"],
    )
    padding = {"padding_mask": inputs[1]} if options["masked"] else {}
    x = block(inputs[0], **padding)
    # Replicas wait for each other in routed heads, between the losses of two layers.
    for number in range(2 * options["experts"]):
        experts = zoo.MixtureOfExperts(
            3, 4, 3, load_balancing_weight=0.0, z_loss_weight=1.0, name=f"moe{number}"
        )
        groups = [layers.RoutedHeads(2, 3, 5), zoo.IndexedHeads(2, 4)]
        attention = layers.MixedAttention(groups, key_dim=6)
        x = layers.TransformerBlock(attention, experts, name=f"block{number}")(x)
    model = keras.Model(inputs, x)
    # Without a loss of their own, tokens differ in number from replica to replica.
    zero = lambda y, output: 0.0 * keras.ops.mean(output, axis=(1, 2))
    optimizer = keras.optimizers.SGD(options["rate"])
    model.compile(optimizer, loss=zero, run_eagerly=run_eagerly)
    random = np.random.default_rng(1)
    values = [random.normal(size=weight.shape) for weight in model.weights]
    model.set_weights([(np.abs(value) + 1) / 4 for value in values])
    return model


def train(num_devices, **options):
    keras.utils.clear_session()
    options = {"rate": 0.5, "masked": True, "remat": False, "groups": {}, **options}
    options = {"experts": False, **options}
    rows = options.pop("rows", 4)
    scope = contextlib.nullcontext()
    if num_devices == 2 and backend == "tensorflow":
        scope = strategy.scope()
    elif num_devices == 2:
        assert len(keras.distribution.list_devices()) == 2
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    elif backend == "jax":
        keras.distribution.set_distribution(None)
    # One device is what two are compared with, and needs no compilation.
    run_eagerly = num_devices == 1 and backend == "tensorflow"
    with scope:
        model = build(options, run_eagerly)
    settings = {"batch_size": 4, "shuffle": False, "verbose": 0}
    data = [x[:rows], mask[:rows]], x[:rows]
    histories = [model.fit(*data, **settings) for _ in range(2)]
    replicas = []
    for replica in range(num_devices):
        state = {}
        for weight in model.weights:
            value = weight.value
            if hasattr(value, "values"):  # what a replica of a MirroredStrategy holds
                value = value.values[replica]
            state[weight.path] = np.asarray(value).tolist()
        replicas.append(state)
    return [history.history["loss"] for history in histories], replicas

for options in json.loads(sys.argv[1]):
    print("found", json.dumps([train(1, **options), train(2, **options)]))
"""
REVIVED = {"revive_after": 1, "centroid_initialization": "tokens", "balance_rate": 0.01}
RUNS = [
    {},  # one replica has 21 real tokens, the other 12
    {"rate": 0.0, "groups": REVIVED, "remat": True},
    # Keras adds up the rows of a first batch, so it is the second that has three. JAX
    # divides each batch evenly.
    *(
        [{"rows": 7, "experts": True, "masked": False, "rate": 0.001}]
        if keras.backend.backend() == "tensorflow"
        else []
    ),
]


def lines_of(program, argument, num_devices):
    """Runs a program on some devices of a CPU; returns the lines that it prints."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": keras.backend.backend(),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    finished = subprocess.run(
        [sys.executable, "-c", program, argument],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


def assert_same(options, alone, shared):
    (losses, (one,)), (two_losses, two) = alone, shared
    # What Keras reports of two batches it weighs with rows, the weights not.
    if options.get("rows", 4) == 4:
        golden_cases.assert_close(two_losses, np.array(losses), 1e-5)
    for replica in two:
        assert replica.keys() == one.keys()
        for name, expected in one.items():
            golden_cases.assert_close(replica[name], np.array(expected), 2e-5, 0, name)


@pytest.mark.slow
@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="Training on one device was tried alone"
)
def test_two_devices_train_as_one():
    """They have its state and gradients, revived centroids and thresholds, too."""
    lines = lines_of(PROGRAM, json.dumps(RUNS), 2)
    lines = [line for line in lines if line.startswith("found ")]
    found = [json.loads(line.removeprefix("found ")) for line in lines]
    for options, (alone, shared) in zip(RUNS, found, strict=True):
        assert_same(options, alone, shared)
    states = [alone[1][0] for alone, _ in found]
    assert sum("kmeans" in path for path in states[0]) == 3 + 3 + 1 + 3 + 1
    for name, number in (("empty_steps", 5), ("biases", 5), ("/thresholds/", 2)):
        assert sum(name in path for path in states[1]) == number, name
