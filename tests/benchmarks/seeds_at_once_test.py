"""All seeds of a model trained at once, and the tables of what was trained so."""

import json

import numpy as np
import pytest

from tests import command_line
from tests.command_line import ROOT
from tests.documented_figures_test import rows_below
from tests.documented_figures_test import shown

pytestmark = pytest.mark.slow
PAGE = "docs/cluster_settings.md"
X = "num_clusters=32,clusters_per_query=2,anchor_weight=0.5,centroid_decay=0.99"
LOCAL = "num_local_only_layers=4,local_block_length=32,local_key_shift=1"
HASHED = "routing=hashed"
FOUR = X.replace("32", "64").replace("query=2", "query=4")
ROWS = {
    "full": ["routing=full"],
    "local": [LOCAL],
    "hashed, 16 buckets": [HASHED],
    "hashed, 32 buckets": [f"{HASHED},num_clusters=32"],
    "hashed, 64 buckets": [f"{HASHED},num_clusters=64"],
    "hashed, 32 buckets, 64 exploring": [
        f"{HASHED},exploring_queries=64,num_clusters=32"
    ],
    "token choice, as in the main job": [""],
    "token choice, 64 exploring": ["exploring_queries=64"],
    "token choice, 32 clusters": ["num_clusters=32"],
    "token choice, 32 clusters, 2 clusters per query": [
        "num_clusters=32,clusters_per_query=2"
    ],
    "token choice, 32 clusters, three settings": [f"exploring_queries=0,{X}", X],
    "token choice, 32 clusters, three settings, 64 exploring": [
        f"exploring_queries=64,{X}"
    ],
    "token choice, 64 clusters, three settings, 4 clusters per query": [FOUR],
}
COLUMNS = [("python_source", 900), ("python_source", 9000), ("sotu.txt", 900)]
THREE = {"decay": 0.99, "anchor_weight": 0.5, "clusters_per_query": 2}
RECALL_ROWS = {
    "token choice, exploring, three settings": ("token choice", 32, THREE, 2),
    "token choice, exploring, three settings, `anchor_weight` 0.25": (
        *("token choice", 32, THREE | {"anchor_weight": 0.25}, 2),
    ),
    "token choice, three settings": ("token choice", 0, THREE, 2),
    "token choice, exploring, 32 clusters": ("token choice", 32, {}, 2),
    "token choice, exploring, 32 clusters, `decay` 0.99, `balance_rate` 0.03": (
        *("token choice", 32, {"decay": 0.99, "balance_rate": 0.03}, 2),
    ),
    "token choice": ("token choice", 0, {}, 1),
    "hashed, exploring": ("hashed", 32, {}, 1),
    "hashed, exploring, twice as many buckets": ("hashed", 32, {}, 2),
}
RECALL_COLUMNS = [(128, 32), (256, 32), (512, 64)]  # length and window
SEVERAL = "clusters_per_query=2,anchor_weight=0.5,centroid_decay=0.99,exploring_queries"
IMAGE_ROWS = {
    "token choice, as in the presets": ("", ""),
    "token choice, more clusters, exploring": (
        f"num_clusters=8,{SEVERAL}=16",
        f"num_clusters=16,{SEVERAL}=64",
    ),
    "hashed": (HASHED, HASHED),
    "random clusters": ("routing=random", "routing=random"),
    "local": ("num_local_only_layers=3", "num_local_only_layers=4"),
    "strided": ("num_routed_heads=0,num_strided_heads=2",) * 2,
    "row and column": ("routing=axial", "routing=axial"),
    "full": ("routing=full", "routing=full"),
}
IMAGES = ("digits", "image_folder folder=pictures")


def runs_of(name):
    return json.loads((ROOT / "benchmarks" / name).read_text())["runs"]


def test_the_table_of_language_has_the_figures_of_its_record():
    runs = runs_of("seeds_at_once.json")
    rows = rows_below("| heads | Python, 900 steps", PAGE)
    assert [name for name, *_ in rows] == list(ROWS)
    for name, *cells in rows:
        for (data, steps), cell in zip(COLUMNS, cells, strict=True):
            found = [
                run["bits"]
                for run in runs
                if run["settings"]["hparams"] in ROWS[name]
                and (run["settings"]["data"], run["settings"]["steps"]) == (data, steps)
            ]
            assert cell == shown(found[0] if found else [], "-"), (name, data, steps)


def test_the_table_of_images_has_the_figures_of_its_record():
    bits = {
        (run["settings"]["hparams"], run["settings"]["data"]): run["bits"]
        for run in runs_of("seeds_at_once.json")
    }
    rows = {name: cells for name, *cells in rows_below("| heads | digits")}
    assert rows == {
        name: [shown(bits[each, data]) for each, data in zip(changes, IMAGES)]
        for name, changes in IMAGE_ROWS.items()
    }


def test_the_table_of_recall_has_the_figures_of_its_record():
    runs = runs_of("recall_at_once.json")
    rows = rows_below("| heads | 128 tokens, 8 pairs, 4 synonyms", PAGE)
    assert [name for name, *_ in rows] == list(RECALL_ROWS)
    for name, *cells in rows:
        pattern, exploring, options, more = RECALL_ROWS[name]
        balanced = {"balance_rate": 0.01} if pattern != "hashed" else {}
        for (length, window), cell in zip(RECALL_COLUMNS, cells, strict=True):
            wanted = {
                "pattern": pattern,
                "length": length,
                "num_clusters": more * 2 * length // window,
                "exploring_queries": exploring,
                "options": {**balanced, **options},
            }
            found = [
                run["accuracy"]["full"]
                for run in runs
                if {name: run["settings"].get(name, 0) for name in wanted} == wanted
            ]
            assert cell == shown(found, "-"), (name, length)


@pytest.mark.slow
def test_seeds_trained_at_once_end_as_each_by_itself(tmp_path):
    arguments = [
        *("-m", "benchmarks.recall", "--patterns=token choice"),
        *("--key_shifts=1", "--sizes=16x2", "--windows=8", "--vocabulary=160"),
        *("--width=8", "--key_dim=8", "--batch_size=8", "--steps=100"),
        *("--eval_every=50", "--seeds=0,1"),
    ]
    curves = []
    for name, more in (("each", []), ("at_once", ["--seeds_at_once"])):
        path = tmp_path / f"{name}.json"
        results = f"--results={path}"
        done = command_line.python(*arguments, *more, results, KERAS_BACKEND="jax")
        assert done.returncode == 0, done.stderr
        runs = json.loads(path.read_text())["runs"]
        curves.append([run["curve"] for run in runs])
    each, at_once = np.array(curves)
    tolerance = 0.003
    assert np.abs(each[0] - each[1]).max() > tolerance
    np.testing.assert_allclose(each, at_once, atol=tolerance)
