"""The table of all patterns: every row has heads, and its figures their places."""

import functools
import itertools
import pathlib

import pytest
from matplotlib.text import Text

from benchmarks import compare_patterns
from benchmarks import pattern_heads
from benchmarks import patterns
from benchmarks import processes
from tests import command_line

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("row", pattern_heads.ROWS)
def test_rows_have_heads(row):
    budget = pattern_heads.Budget(num_heads=2, length=64, window=16, num_clusters=4)
    shift = pattern_heads.key_shift_of(row)
    groups = pattern_heads.head_groups(row, budget, key_shift=shift)
    assert sum(group.num_heads for group in groups) == 2
    assert {group.key_shift for group in groups} == {shift}


parsed = functools.partial(command_line.parse, patterns)


def test_bits_per_byte_of_compare_patterns_are_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_patterns, "train", None)  # not called
    path = tmp_path / "patterns.json"
    run = {"kind": "bits", "pattern": "hashed", "steps": 900, "windows": 128}
    run["hparams"] = patterns.HPARAMS
    figures = compare_patterns.Figures(path)
    figures.add(**run, key_shift=1, seed=0, bits_per_byte={"full": 1.5})
    for other in ({"key_shift": 0}, {"seed": 1}, {"files": "a.txt"}, {"hparams": None}):
        entry = {**run, "key_shift": 1, "seed": 0, **other}
        figures.add(**entry, bits_per_byte={"full": 3.0})
    assert patterns.language("hashed", parsed(f"--compared={path}")) == {"full": 1.5}


def test_runs_with_other_hyperparameters_have_folders_of_their_own():
    run = ("runs", "token choice", 1, 900, 0)
    hparams = (None, "key_dim=16", "key_dim=16,ema=0")
    assert len({compare_patterns.model_dir(*run, each) for each in hparams}) == 3


def test_a_run_that_was_stopped_is_not_scored(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_patterns.subprocess, "run", lambda *_, **__: None)
    with pytest.raises(ChildProcessError, match="before step 900"):
        compare_patterns.train(tmp_path / "run", "local", 1, seed=0, steps=900)


@pytest.mark.parametrize(
    "error, cell",
    [
        ("ended by signal 9 (out of memory?)", patterns.TOO_LARGE),
        ("failed: ResourceExhaustedError: Graph execution error", patterns.TOO_LARGE),
        ("no answer within 600 s", patterns.TOO_LONG),
        ("ended by signal 11", "failed: ended by signal 11"),
    ],
)
def test_a_layer_that_cannot_be_timed(error, cell, monkeypatch):
    def started(*arguments):
        raise processes.WorkerError(error)

    monkeypatch.setattr(processes, "started", started)
    assert patterns.cost("hashed", parsed(), 64) == cell


def test_cells(tmp_path):
    options = parsed("--lengths=2048,32768")
    figures = compare_patterns.Figures(tmp_path / "figures.json")
    for row, kind, value in (
        ("token choice", "leak", 0.0),
        ("token choice", "recall", {"full": 0.5}),
        ("token choice", "language", {"full": 1.25, "prefix": 1.5}),
        ("token choice", "cost at 2048", {"seconds": 0.125, "bytes": 2**21}),
        ("token choice", "cost at 32768", patterns.TOO_LARGE),
        ("token choice", "state", 2**20),
        ("nystrom", "leak", None),
    ):
        figures.add(kind=kind, row=row, value=value)
    lines = patterns.table(figures, options)
    assert lines[2:] == [
        "| token choice | 1 | 0 | 0.500 | 1.250 / 1.500 | 0.12 s, 2 MiB | too large "
        "| 1.00 MiB |",
        "| nystrom | 0 | not causal |  |  |  |  |  |",
    ]


def test_names_in_the_plot_lie_apart():
    folder = pathlib.Path(patterns.__file__).parent
    record = compare_patterns.Figures(folder / "all_patterns.json")
    (axes,) = patterns.draw(record, 8192).axes
    names = [Text.get_window_extent(text) for text in axes.texts]
    frame = axes.get_window_extent()
    assert len(names) > 15
    pairs = itertools.combinations(names, 2)
    assert not any(one.overlaps(other) for one, other in pairs)
    corners = [corner for box in names for corner in (box.min, box.max)]
    assert all(frame.contains(*corner) for corner in corners)
