"""Every variable of every preset, against the table beside this file.

`python tools/preset_table.py --variables --output=tests/models/preset_variables.json`
writes the table anew; its diff then shows what has changed.
"""

import json
import math
import pathlib

import pytest

from routing_tf import models
from routing_tf.settings.presets import RELEASE_SETS
from tests import golden_cases
from tests.models import small_models
from tools import preset_table

PATH = pathlib.Path(__file__).parent / "preset_variables.json"
OF_EACH_KIND = ("pg19_rt_base", "pairs_small", "mnist_local_cluster_strided")
TABLE = json.loads(PATH.read_text())
GOLDEN = json.loads((golden_cases.FOLDER / "pg19/full_size_variables.json").read_text())


def shapes(name, names, *kinds):
    """Returns shapes by name of a preset; `kinds` are `weights` and `state`."""
    found = {}
    for kind in kinds or ("weights", "state"):
        found |= preset_table.expand(TABLE[name][names][kind])
    return found


def sizes(shapes):
    return sorted(math.prod(shape) for shape in shapes.values())


def test_the_table_is_complete_and_as_the_command_writes_it():
    assert TABLE.keys() == set(models.preset_names())
    assert PATH.read_text() == preset_table.to_json(TABLE)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OF_EACH_KIND else small_models.FURTHER)
        for name in models.preset_names()
    ],
)
def test_variables_at_full_size(name):
    assert preset_table.variables(name) == TABLE[name]


@pytest.mark.parametrize("name", RELEASE_SETS)
def test_each_variable_has_a_name_of_the_release(name):
    for kind in ("weights", "state"):
        keras, release = shapes(name, "keras", kind), shapes(name, "release", kind)
        assert len(keras) == len(release)
        assert sizes(keras) == sizes(release)


@pytest.mark.parametrize(
    "name, key, number, total",
    [
        ("pg19_rt_base", "released_hparams_json", 345, 490718460),
        ("pg19_local_cluster8k", "preset_pg19_local_cluster8k", 318, 583327974),
    ],
)
def test_variables_are_those_of_the_release(name, key, number, total):
    golden = GOLDEN[key]["variables"]
    assert len(golden) == number
    assert shapes(name, "release") == {v["name"]: v["shape"] for v in golden}
    assert sum(sizes(shapes(name, "release"))) == total
    # The one known difference: the release lists `means` as trainable, although they
    # never have a gradient and moving averages alone move them. Here they are state.
    assert shapes(name, "release", "weights").keys() == {
        v["name"] for v in golden if v["trainable"] and not v["name"].endswith("/means")
    }


@pytest.mark.parametrize(
    "layered, flat",
    [
        ({"block_[0-2]/a": [1]}, ["block_0/a", "block_1/a", "block_2/a"]),
        ({"x/layer_[0,2-3]/a_1": [1]}, [f"x/layer_{i}/a_1" for i in (0, 2, 3)]),
        ({"block_[7]/block_1/a": [1]}, ["block_7/block_1/a"]),
        ({"norm_0/a": [1]}, ["norm_0/a"]),
    ],
)
def test_equal_layers_are_written_as_one(layered, flat):
    assert preset_table.expand(layered) == {name: [1] for name in flat}
    assert preset_table.collapse({name: [1] for name in flat}) == layered


def test_layers_of_other_shapes_are_written_apart():
    layers = {"block_0/a": [1], "block_1/a": [2, 3], "block_2/a": [1]}
    assert preset_table.collapse(layers) == {
        "block_[0,2]/a": [1],
        "block_[1]/a": [2, 3],
    }
