"""The table of all patterns: every row has heads, and its figures their places."""

import pytest
from absl import flags

from benchmarks import compare_patterns
from benchmarks import pattern_heads
from benchmarks import patterns


@pytest.mark.parametrize("row", pattern_heads.ROWS)
def test_rows_have_heads(row):
    budget = pattern_heads.Budget(num_heads=2, length=64, window=16, num_clusters=4)
    shift = pattern_heads.key_shift_of(row)
    group = pattern_heads.head_group(row, budget, key_shift=shift)
    assert (group.num_heads, group.key_shift) == (2, shift)


def test_cells(tmp_path):
    options = flags.FlagValues()
    patterns.define_flags(options)
    options(["patterns", "--lengths=2048,32768"])
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
