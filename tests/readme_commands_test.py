"""Runs the documented commands on generating and serving, word for word."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/decoding_and_serving.md"
SECTION = r"^## {}\n(?P<text>.*?)(?=^## )"
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```", re.M | re.S)
# The runs that the commands take, quickly made.
TRAINING = """
python -m routing_tf.train --model_dir=runs/python --hparams_set=byte_tiny \
    --hparams=max_sequence_length=512 --nojit_compile --sample_bytes=0 \
    --train_steps=1 --eval_examples=1
python -m routing_tf.train --model_dir=runs/digits --problem=digits \
    --hparams_set=digits_small --hparams=num_layers=1 --nojit_compile \
    --train_steps=1 --eval_examples=2
"""


def blocks(section):
    """Returns the code of a section as pairs of language and lines."""
    match = re.search(SECTION.format(section), PAGE.read_text(), re.M | re.S)
    found = [
        (block["language"], block["code"]) for block in BLOCK.finditer(match["text"])
    ]
    assert found
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    run(folder, ["bash", "-euc", TRAINING])
    return folder


def run(folder, command):
    environment = {**os.environ, "KERAS_BACKEND": keras.backend.backend()}
    folders = [os.path.dirname(sys.executable), os.environ["PATH"]]
    environment["PATH"] = os.pathsep.join(folders)
    environment["PYTHONPATH"] = str(ROOT)
    finished = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.slow
@pytest.mark.parametrize("section", ["Generating", "Serving"])
def test_commands_of_a_section(section, folder):
    if section == "Serving" and keras.backend.backend() != "tensorflow":
        pytest.skip("SavedModels are made on the TensorFlow backend")
    for language, code in blocks(section):
        command = [sys.executable, "-c", code]
        if language != "python":
            command = ["bash", "-euc", code]
        run(folder, command)
    made = {path.name for path in folder.iterdir()}
    expected = {"Generating": {"texts.jsonl", "digits.png"}, "Serving": {"runs"}}
    assert made >= expected[section]
