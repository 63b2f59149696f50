"""Tests of the choice of an engine, and of what engines say of themselves."""

import json
import time

import keras
import pytest

from routing_tf.training import engines
from tests import command_line
from tests.engines import small_runs

BACKEND = keras.backend.backend()
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="for TensorFlow")
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="for JAX")


def test_one_device_is_the_default():
    engine = engines.make()
    sizes = engine.num_replicas, engine.num_devices, engine.num_workers, engine.worker
    assert sizes == (1, 1, 1, 0)
    assert engine.is_chief
    # A machine without a GPU is told of here, and nowhere else.
    assert engine.description in ("one device (cpu)", "one device (gpu)")
    assert [engine.agree(wish) for wish in (True, False)] == [True, False]
    engine.sync()


@pytest.mark.parametrize(
    "message, strategy, options",
    [
        ("`strategy`.*'multi_worker'.*strategy='two'", "two", {}),
        *(
            ("`tpu`.*tpu='local', strategy=", strategy, {"tpu": "local"})
            for strategy in ("one", "mirrored", "multi_worker")
        ),
        # Virtual devices need a strategy for them.
        ("=100, strategy='one'", "one", {"num_virtual_devices": 100}),
        ("=100, strategy='tpu'", "tpu", {"num_virtual_devices": 100}),
        pytest.param(
            *("`tpu`.*--strategy=tpu", "tpu", {"tpu": "local"}),
            marks=on_jax,
        ),
        pytest.param(r"jax\[tpu\].*cpu:0", "tpu", {}, marks=on_jax),
    ],
)
def test_refused(message, strategy, options):
    with pytest.raises(ValueError, match=message):
        engines.make(strategy, **options)


def test_refuses_other_backends(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ValueError, match="'torch'.*--backend"):
        engines.make()


def test_refuses_to_cut_a_processor_that_is_in_use():
    keras.ops.ones(3) + 1
    with pytest.raises(ValueError, match="`num_virtual_devices`.*=3"):
        engines.make("mirrored", num_virtual_devices=3)


def test_all_devices_of_a_machine_may_be_one():
    engine = engines.make("mirrored")
    assert engine.num_devices >= 1
    assert engine.is_chief
    assert engine.agree(True)
    assert not engine.agree(False)


@on_jax
def test_jax_says_how_processes_find_each_other(monkeypatch):
    for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID"):
        monkeypatch.delenv(f"KERAS_DISTRIBUTION_{name}", raising=False)
    with pytest.raises(ValueError, match="KERAS_DISTRIBUTION_JOB_ADDRESSES"):
        engines.make("multi_worker")


@on_tensorflow
@pytest.mark.parametrize("config", [None, "", "{}", '{"task": {}}', "localhost"])
def test_tensorflow_says_how_processes_find_each_other(config, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match="'multi_worker'.*Received: TF_CONFIG="):
        engines.make("multi_worker")


@pytest.mark.thorough
@on_tensorflow
def test_a_tpu_that_is_not_there_is_refused_at_once():
    """In a process of its own: connecting to a cluster changes it for good."""
    program = """
from routing_tf.training import engines
for tpu in None, "local", "no-such-tpu", "grpc://127.0.0.1:9":
    try:
        engines.make("tpu", tpu)
    except ValueError as error:
        print("refused", error)
"""
    names = ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS")
    started = time.monotonic()
    finished = command_line.python("-c", program, **dict.fromkeys(names))
    refused = finished.stdout.count("refused `tpu` must name a TPU")
    assert refused == 4, finished.stderr[-3000:]
    assert time.monotonic() - started < 90


@on_tensorflow
@pytest.mark.parametrize("tpu, name", [(None, ""), ("local", "local"), ("me", "me")])
def test_a_tpu_is_connected_to_and_started(monkeypatch, tpu, name):
    import tensorflow as tf

    calls = []

    def record(what, result=None):
        def call(*arguments, **options):
            calls.append((what, arguments, options))
            return result

        return call

    class Resolver:
        def master(self):
            return ""

    resolver = Resolver()
    strategy = tf.distribute.get_strategy()
    for place, what, result in (
        (tf.distribute.cluster_resolver, "TPUClusterResolver", resolver),
        (tf.config, "experimental_connect_to_cluster", None),
        (tf.tpu.experimental, "initialize_tpu_system", None),
        (tf.distribute, "TPUStrategy", strategy),
    ):
        monkeypatch.setattr(place, what, record(what, result))
    engine = engines.make("tpu", tpu)
    assert engine.strategy is strategy
    assert calls == [
        ("TPUClusterResolver", (), {"tpu": name}),
        ("experimental_connect_to_cluster", (resolver,), {}),
        ("initialize_tpu_system", (resolver,), {}),
        ("TPUStrategy", (resolver,), {}),
    ]


DESCRIBE = """
import json
from routing_tf.training import engines
engine = engines.make({strategy!r}, num_virtual_devices={number})
import numpy as np
wishes = [engine.agree(wish) for wish in ({own}, False)]
print(json.dumps([engine.description, engine.num_devices, engine.num_replicas,
    engine.num_workers, engine.worker, engine.is_chief, wishes]))
"""


def describe(strategy, number, own_wish, variables):
    program = DESCRIBE.format(strategy=strategy, number=number, own=own_wish)
    own = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", **variables}
    return command_line.start("-c", program, **own)


def read(process):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


@pytest.mark.slow
def test_workers_agree_on_what_one_of_them_wishes():
    ports = small_runs.free_ports(2)
    processes = [
        describe("multi_worker", 2, worker == 1, variables)
        for worker, variables in enumerate(
            small_runs.cluster_variables(ports, worker) for worker in range(2)
        )
    ]
    found = [read(process) for process in processes]
    # TensorFlow takes one CPU of each worker.
    name, devices, replicas = {
        "tensorflow": ("2 replicas on 2 workers, MultiWorkerMirroredStrategy", 2, 2),
        "jax": ("4 devices (cpu) of 2 workers, DataParallel", 4, 1),
    }[BACKEND]
    for worker, answer in enumerate(found):
        common = [name, devices, replicas, 2, worker, not worker, [True, False]]
        assert answer == common
