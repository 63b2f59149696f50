"""Tests of runs on several workers, as processes of one machine."""

import re
import signal
import subprocess

import pytest

from routing_tf.cli import train
from routing_tf.training import checkpoints
from tests import command_line
from tests import runs
from tests.engines import small_runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("eager")]


def arguments(model_dir, text):
    return [
        f"--model_dir={model_dir}",
        f"--files={text}",
        "--hparams_set=byte_tiny",
        "--hparams=num_layers=1,max_sequence_length=32,attention_window=8,"
        "batch_tokens=128",
        "--eval_every=4",
        "--eval_examples=5",
        "--checkpoint_every=3",
        "--sample_bytes=8",
    ]


def start(model_dirs, text, *flags):
    """Starts a worker for each model directory."""
    ports = small_runs.free_ports(len(model_dirs))
    return [
        command_line.start(
            *("-m", "routing_tf.train", *arguments(model_dir, text), *flags),
            stderr=subprocess.STDOUT,
            PYTHONUNBUFFERED="1",
            **small_runs.cluster_variables(ports, worker),
        )
        for worker, model_dir in enumerate(model_dirs)
    ]


def finish(processes):
    """Exit codes and what the workers said."""
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], said


def train_alone(model_dir, text, *flags):
    """Trains in this process, on one device."""
    assert not command_line.run(train, *arguments(model_dir, text), *flags)


def bits(model_dir):
    key = "held_out_bits_per_byte"
    return {entry["step"]: entry[key] for entry in runs.metrics(model_dir, key)}


def test_two_workers_are_one(text, tmp_path):
    """Both stop when one of them is asked to, and go on together."""
    both = [tmp_path / "two"] * 2
    flags = ["--train_steps=40", "--eval_every=20"]
    processes = start(both, text, *flags, "--strategy=multi_worker")
    for line in processes[0].stdout:
        if re.match(r"step \d+/", line):
            break
    processes[1].send_signal(signal.SIGTERM)
    codes, said = finish(processes)
    assert codes == [0, 0], said
    assert "stopped at step" in said[0]
    step = checkpoints.step_of(checkpoints.paths(both[0])[-1])
    assert 0 < step < 40
    codes, said = finish(start(both, text, *flags, "--strategy=multi_worker"))
    assert codes == [0, 0], said
    assert f"continuing at step {step}" in said[0]
    assert "2 workers" in said[0]
    assert "held-out" not in said[1]
    train_alone(tmp_path / "one", text, *flags)
    expected = bits(tmp_path / "one")
    assert list(expected) == [0, 20, 40]
    assert bits(both[0]) == pytest.approx(expected, abs=1e-4)
