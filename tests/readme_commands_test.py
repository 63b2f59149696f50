"""Runs the documented commands on generating and serving, word for word."""

import importlib
import pathlib
import re
import shlex

import keras
import pytest

from tests import command_line

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/decoding_and_serving.md"
SECTION = r"^## {}\n(?P<text>.*?)(?=^## )"
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```", re.M | re.S)
# The runs that the commands take, quickly made, of models that are quick.
TRAINING = """
python -m routing_tf.train --model_dir=runs/python --hparams_set=byte_tiny \
    --hparams=max_sequence_length=512,num_layers=1,num_routed_heads=0 \
    --nojit_compile --sample_bytes=0 --train_steps=1 --eval_examples=1
python -m routing_tf.train --model_dir=runs/digits --problem=digits \
    --hparams_set=digits_small --sample_images=0 \
    --hparams=num_layers=1,num_local_heads=1,num_routed_heads=0 \
    --nojit_compile --train_steps=1 --eval_examples=2
"""


def blocks(section):
    """Returns the code of a section as pairs of language and lines."""
    match = re.search(SECTION.format(section), PAGE.read_text(), re.M | re.S)
    found = [
        (block["language"], block["code"])
        for block in BLOCK.finditer(match["text"])
        if "no-test: needs the extra" not in match["text"][: block.start()][-60:]
    ]
    assert found
    return found


def run(code):
    """Runs lines of a shell, all commands of this package, in this process."""
    for line in code.replace("\\\n", "").strip().splitlines():
        python, option, module, *arguments = shlex.split(line)
        assert (python, option) == ("python", "-m")
        assert not command_line.run(importlib.import_module(module), *arguments), line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(TRAINING)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("section", ["Generating", "Serving"])
def test_commands_of_a_section(section, folder, monkeypatch):
    if section == "Serving" and keras.backend.backend() != "tensorflow":
        pytest.skip("SavedModels are made on the TensorFlow backend")
    monkeypatch.chdir(folder)
    for language, code in blocks(section):
        exec(code, {}) if language == "python" else run(code)
    made = {path.name for path in folder.iterdir()}
    expected = {"Generating": {"texts.jsonl", "digits.png"}, "Serving": {"runs"}}
    assert made >= expected[section]
