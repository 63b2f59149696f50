"""Runs that are killed, out of disk or damaged lose nothing."""

import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from routing_tf.training import checkpoints

STEPS = 160
CHECKPOINT_EVERY = 4
KILLS = 4


def command(model_dir, text, *flags):
    return [
        sys.executable,
        "-m",
        "routing_tf.train",
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
        *flags,
    ]


def start(*arguments, **options):
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def train(*arguments, **options):
    """Runs to the end; returns the exit code and what was said."""
    process = start(*arguments, **options)
    try:
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out


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
    assert ends[0].keys() == ends[1].keys()
    assert len(ends[0]) > 30
    for name, value in ends[0].items():
        np.testing.assert_array_equal(value, ends[1][name], err_msg=name)
    assert metrics(one) == metrics(two)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    code, out = train(folder, text)
    assert code == 0, out
    return folder


def wait_for_a_save(process, folder):
    """Waits until a checkpoint is half written; tells whether one was seen so."""
    folder = folder / "checkpoints"
    while process.poll() is None:
        if any("_temp" in name for name in os.listdir(folder)):
            return True
    return False


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again(whole, text, tmp_path):
    draw = random.Random(0)
    kills = saves = 0
    out = ""
    while kills < KILLS:
        process = start(tmp_path, text)
        try:
            for line in process.stdout:
                out += line
                if re.match(r"step \d+/", line):  # it trains now
                    break
            time.sleep(draw.uniform(0, 0.3))
            if kills % 2:
                saves += wait_for_a_save(process, tmp_path)
            assert process.poll() is None, out
            process.send_signal(signal.SIGKILL)
            kills += 1
        finally:
            process.kill()
            process.communicate()
    code, out = train(tmp_path, text)
    assert code == 0, out
    print(f"{kills} kills, {saves} of them while a checkpoint was written")
    assert saves
    assert_same_end(whole, tmp_path)


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop(whole, text, tmp_path):
    process = start(tmp_path, text)
    try:
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, out
    assert "stopping after this step" in out
    (path,) = checkpoints.paths(tmp_path)
    assert 1 <= checkpoints.step_of(path) < STEPS
    code, out = train(tmp_path, text)
    assert code == 0, out
    assert "continuing at step" in out
    assert_same_end(whole, tmp_path)


@pytest.mark.slow
def test_a_damaged_checkpoint(whole, text, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    newest = checkpoints.paths(folder)[-1]
    path = newest.with_name(newest.name + ".data-00000-of-00001")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    code, out = train(folder, text)
    assert code == 0, out
    before = checkpoints.paths(whole)[-2]
    assert f"WARNING: The checkpoint must be whole. Received: {newest}" in out
    assert f"continuing from the one before, {folder}/checkpoints/{before.name}" in out
    assert f"continuing at step {checkpoints.step_of(before)}" in out
    assert_same_end(whole, folder)


@pytest.mark.slow
def test_a_full_disk(whole, text, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = values(checkpoints.paths(folder)[-1])

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    flags = [f"--train_steps={STEPS + 40}", "--eval_every=0"]
    code, out = train(folder, text, *flags, preexec_fn=small_files)
    assert code == 1, out
    error = out.splitlines()[-1]
    assert error.startswith("error: The checkpoint could not be written; is the disk ")
    assert f"The last complete one is {folder}/checkpoints/step-{STEPS};" in error
    assert "Traceback" not in out
    after = values(folder / "checkpoints" / f"step-{STEPS}")
    assert after.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])
    assert os.listdir(folder / "checkpoints")
