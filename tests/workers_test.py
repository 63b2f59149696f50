"""Tests of runs on several workers, as processes of one machine."""

import json
import os
import re
import signal
import subprocess
import sys

import absl.flags
import pytest

from routing_tf.cli import train
from routing_tf.training import checkpoints
from tests.engines import small_runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("eager")]


def arguments(model_dir, text):
    return [
        f"--model_dir={model_dir}",
        f"--files={text}",
        "--hparams_set=byte_tiny",
        "--hparams=max_sequence_length=32,attention_window=8,batch_tokens=128",
        "--eval_every=4",
        "--eval_examples=5",
        "--checkpoint_every=3",
        "--sample_bytes=8",
    ]


def start(model_dirs, text, *flags):
    """Starts a worker for each model directory."""
    ports = small_runs.free_ports(len(model_dirs))
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "routing_tf.train",
                *arguments(model_dir, text),
                *flags,
            ],
            env={
                **os.environ,
                **small_runs.cluster_variables(ports, worker),
                "PYTHONUNBUFFERED": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
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


def train_together(model_dirs, text, *flags):
    return finish(start(model_dirs, text, *flags))


def train_alone(model_dir, text, *flags):
    """Trains in this process, on one device."""
    options = absl.flags.FlagValues()
    train.define_flags(options)
    options(["train", *arguments(model_dir, text), *flags])
    assert train.run(options) == 0


def bits(model_dir):
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    key = "held_out_bits_per_byte"
    return {entry["step"]: entry[key] for entry in entries if key in entry}


def test_two_workers_are_one(text, tmp_path):
    both = [tmp_path / "two"] * 2
    codes, said = train_together(
        both, text, "--strategy=multi_worker", "--train_steps=6"
    )
    assert codes == [0, 0], said
    assert "continuing" not in said[0]
    codes, said = train_together(
        both, text, "--strategy=multi_worker", "--train_steps=9"
    )
    assert codes == [0, 0], said
    assert "continuing at step 6" in said[0]
    assert "2 workers" in said[0]
    assert "held-out" not in said[1]
    one = tmp_path / "one"
    for steps in (6, 9):  # the schedule depends on the length of the run
        train_alone(one, text, f"--train_steps={steps}")
    expected = bits(one)
    assert list(expected) == [0, 4, 6, 8, 9]
    assert bits(tmp_path / "two") == pytest.approx(expected, abs=1e-4)


def test_all_workers_stop_when_one_is_asked_to(text, tmp_path):
    flags = ["--strategy=multi_worker", "--train_steps=1000000", "--eval_every=0"]
    processes = start([tmp_path] * 2, text, *flags)
    for line in processes[0].stdout:
        if re.match(r"step \d+/", line):
            break
    processes[1].send_signal(signal.SIGTERM)
    codes, said = finish(processes)
    assert codes == [0, 0], said
    assert "stopped at step" in said[0]
    assert checkpoints.paths(tmp_path)


def test_workers_that_share_no_folder_are_refused(text, tmp_path):
    train_alone(tmp_path / "a", text, "--train_steps=3")
    flags = ["--strategy=multi_worker", "--train_steps=6"]
    codes, said = train_together([tmp_path / "a", tmp_path / "b"], text, *flags)
    assert codes == [1, 1], said
    for text in said:
        assert "found checkpoints of the steps [3, 0]" in text
