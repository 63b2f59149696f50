"""The documented tables of presets are those that the command prints."""

import json
import math
import pathlib
import sys

import keras
import pytest

from routing_tf import models
from tools import preset_table

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[1]
VARIABLES = ROOT / "tests/models/preset_variables.json"


def count_in_the_table(name):
    """The number of weights, without building the model."""
    weights = json.loads(VARIABLES.read_text())[name]["keras"]["weights"]
    return sum(map(math.prod, preset_table.expand(weights).values()))


def test_the_documentation_holds_the_tables():
    tables = preset_table.tables(count_in_the_table)
    assert f"<!-- preset table -->\n{tables}<!-- end of preset table -->" in (
        (ROOT / "docs/presets.md").read_text()
    )


def test_models_are_counted_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(models, "preset_names", lambda kind=None: ["byte_tiny"])
    assert "| 38,658 |" in preset_table.tables()
    assert preset_table.count_weights("byte_tiny") == count_in_the_table("byte_tiny")


@pytest.mark.parametrize("to_file", [False, True])
def test_the_command_writes_variables(monkeypatch, capsys, tmp_path, to_file):
    monkeypatch.setattr(models, "preset_names", lambda kind=None: ["byte_tiny"])
    path = tmp_path / "table.json"
    flags = ["--variables"] + ([f"--output={path}"] if to_file else [])
    monkeypatch.setattr(sys, "argv", ["preset_table.py", *flags])
    preset_table.main()
    printed = capsys.readouterr().out
    assert bool(printed) != to_file
    written = json.loads(path.read_text() if to_file else printed)
    committed = json.loads(VARIABLES.read_text())
    assert written == {"byte_tiny": committed["byte_tiny"]}


def test_models_of_shapes_alone_never_get_values():
    """Or the next layer that is made in a scope fills the memory with all presets."""

    def refuse(shape, dtype=None):
        raise AssertionError("weights get values")

    with preset_table.shapes_alone():
        keras.layers.Dense(3, kernel_initializer=refuse).build((2, 2))
    with keras.StatelessScope():
        keras.layers.Dense(3).build((2, 2))
