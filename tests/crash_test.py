"""Runs that are killed, out of disk or damaged lose nothing."""

import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import time

import pytest
import tensorflow as tf

from routing_tf.cli import train
from routing_tf.training import checkpoints
from tests import command_line
from tests.models import small_models

pytestmark = pytest.mark.slow
STEPS = 160
CHECKPOINT_EVERY = 4


def arguments(model_dir, text, *others):
    return [
        f"--model_dir={model_dir}",
        f"--files={text}",
        "--hparams_set=byte_tiny",
        "--hparams=num_layers=1,max_sequence_length=32,attention_window=8,"
        "batch_tokens=64,residual_dropout=0.1",
        "--nojit_compile",
        "--eval_every=40",
        "--eval_examples=2",
        "--sample_bytes=0",
        f"--checkpoint_every={CHECKPOINT_EVERY}",
        f"--train_steps={STEPS}",
        *others,
    ]


def start(*settings):
    """Starts a run in a process of its own."""
    command = ("-m", "routing_tf.train", *arguments(*settings))
    return command_line.start(*command, stderr=subprocess.STDOUT)


def run(*settings):
    """Runs to the end in this process; returns the exit code."""
    return command_line.run(train, *arguments(*settings))


def values(path):
    """All that a checkpoint holds, by name."""
    reader = tf.train.load_checkpoint(str(path))
    return {
        name: reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
        if name.startswith("variables/")
    }


def metrics(model_dir):
    lines = pathlib.Path(model_dir, "metrics.jsonl").read_text().splitlines()
    # Times are no part of a result.
    return [line for line in lines if '"held_out' in line]


def assert_same_end(one, two):
    ends = [values(checkpoints.paths(model_dir)[-1]) for model_dir in (one, two)]
    assert len(ends[0]) > 30
    small_models.assert_equal(*ends)
    assert metrics(one) == metrics(two)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder, text) == 0
    return folder


def wait_for_a_save(process, folder):
    """Waits until a checkpoint is half written; tells whether one was seen so."""
    folder = folder / "checkpoints"
    while process.poll() is None:
        if any("_temp" in name for name in os.listdir(folder)):
            return True
    return False


def interrupt(folder, text, end):
    """Starts a run, ends it once it trains, and returns the exit code and its text."""
    process, out = start(folder, text), ""
    try:
        for line in process.stdout:
            out += line
            if re.match(r"step \d+/", line):
                break
        end(process)
        out += process.communicate(timeout=60)[0]
    finally:
        process.kill()
    return process.returncode, out


def test_a_run_that_is_stopped_and_killed(whole, text, tmp_path, capsys):
    def stop(process):
        process.send_signal(signal.SIGTERM)

    def kill_in_training(process):
        time.sleep(random.Random(0).uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)

    def kill_in_a_save(process):
        assert wait_for_a_save(process, tmp_path)
        process.send_signal(signal.SIGKILL)

    code, out = interrupt(tmp_path, text, stop)
    assert code == 0, out
    assert "stopping after this step" in out
    (path,) = checkpoints.paths(tmp_path)
    assert 1 <= checkpoints.step_of(path) < STEPS
    for end in (kill_in_training, kill_in_a_save):
        code, out = interrupt(tmp_path, text, end)
        assert code == -signal.SIGKILL, out
        assert "continuing at step" in out
    assert run(tmp_path, text) == 0
    assert "continuing at step" in capsys.readouterr().out
    assert_same_end(whole, tmp_path)


def test_a_full_disk(whole, text, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = values(checkpoints.paths(folder)[-1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        code = run(folder, text, f"--train_steps={STEPS + 40}", "--eval_every=0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err.splitlines()[-1]
    assert code == 1, error
    assert error.startswith("error: The checkpoint could not be written; is the disk ")
    assert f"The last complete one is {folder}/checkpoints/step-{STEPS};" in error
    after = values(folder / "checkpoints" / f"step-{STEPS}")
    small_models.assert_equal(after, before)
    assert os.listdir(folder / "checkpoints")
