"""Tests that figures of speed are measured once, and come into the pages."""

import dataclasses
import re
import shutil

import pytest

from benchmarks import contenders
from benchmarks import contest
from benchmarks import decode_cost
from benchmarks import figure_tables
from benchmarks import figures
from benchmarks import machine
from benchmarks import record
from benchmarks import report
from tests import command_line


def groups():
    return [x for jobs in figures.parts().values() for x in jobs if hasattr(x, "names")]


@pytest.fixture
def results(tmp_path):
    return record.Record(tmp_path / "figures.json")


def measured(results, ratios=lambda length: length / 4096):
    """Fills a record: all take a second where `ratios` is one."""
    results.add({"what": "machine"}, machine.describe())
    for group in groups():
        for name in (*group.names, group.compare):
            row = contest.Row(name, group.length, group.dtype, group.kind, 32)
            row.seconds = row.ratio = 1.0
            row.ratio_low = row.ratio_high = 1.0
            if name == contenders.TORCH_FULL:
                row.seconds = ratios(group.length)
                row.ratio = 1 / row.seconds
            if name == figure_tables.KERAS_FULL and group.length > 8192:
                row = dataclasses.replace(row, seconds=None, ratio=None)
                row.note = "not run: needs 32 GiB, 21 GiB are free"
            results.add(group.settings(row), dataclasses.asdict(row))
    contexts = [
        {"length": n, "bytes": 2**20, "seconds": 0.001, "reference_seconds": n * 1e-6}
        for n in figure_tables.CONTEXTS
    ]
    for kind in figure_tables.STEP_KINDS:
        results.add({"what": "step", "kind": kind}, {"contexts": contexts})


def test_groups_name_contenders_of_their_commands():
    for group in groups():
        _, cases_of = figures.CONTESTS[group.what]
        cases = cases_of(group.length, group.kind, group.dtype, group.options())
        for name in (*group.names, group.compare):
            (case,) = contenders.choose(cases, [name])
            assert case.passes == group.kind


def test_kinds_of_steps_are_those_of_the_command():
    kinds = decode_cost.kinds(command_line.parse(decode_cost))
    assert set(kinds) == set(figure_tables.STEP_KINDS)


def test_steps_take_turns_with_a_reference():
    arguments = ("--lengths=16,32", "--compare=full", "--steps=2")
    sizes = ("--num_heads=1", "--key_dim=4", "--attention_window=4")
    options = command_line.parse(decode_cost, *arguments, *sizes)
    found = decode_cost.measure_kind("local", decode_cost.kinds(options), options)
    assert [each["length"] for each in found] == [16, 32]
    assert all(min(each["seconds"], each["reference_seconds"]) > 0 for each in found)


@pytest.mark.parametrize(
    "ratios, least",
    [
        ({1: 0.5, 2: 1.5, 4: 0.9, 8: 1.1, 16: 3}, 8),
        ({1: 2.0, 2: 3.0}, 1),
        ({1: 2.0, 2: 1.0}, None),
    ],
)
def test_heads_pay_from_where_they_stay_faster(ratios, least):
    assert figure_tables.pays_from(ratios) == least


def test_curves_go_from_short_to_long():
    lengths = (8192, 256, 1024)
    rows = [contest.Row("a", n, "float32", "forward", 32) for n in lengths]
    for row in rows:
        row.seconds = float(row.length)
    found = report.curves(rows, lambda row: row.seconds)
    assert found["a", "float32"] == [(n, float(n)) for n in sorted(lengths)]


def test_blocks_come_into_the_pages(results, tmp_path):
    measured(results)
    for page in set(figure_tables.PAGES.values()):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(figure_tables.ROOT / page, tmp_path / page)
    figure_tables.write(results, tmp_path)
    benchmarks = (tmp_path / "docs/benchmarks.md").read_text()
    assert "- full attention (Keras TensorFlow graph), 16,384 tokens: not run" in (
        benchmarks
    )
    # Equal at 4,096 tokens, so faster from the next length on.
    assert "| token choice | 8,192 (16.0 times at 65,536) |" in benchmarks
    readme = (tmp_path / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    words = " ".join(readme.split())
    assert "faster than PyTorch's full attention from 8,192" in words
    assert "A decoded token takes 31.25 ms with 1,024 tokens" in words
    figure_tables.write(results, tmp_path)
    assert (tmp_path / "README.md").read_text() == readme


def test_every_block_has_its_place():
    for name, page in figure_tables.PAGES.items():
        text = (figure_tables.ROOT / page).read_text()
        assert "\nnew\n" in figure_tables.renewed(text, name, ["new"])
        assert len(re.findall(f"<!-- figures: {name} -->", text)) == 1


def test_a_second_call_goes_on(results, monkeypatch):
    calls, minutes = [], iter([False, True, False])

    def call(name):
        return figures.Call({"what": name}, lambda: calls.append(name) or {})

    monkeypatch.setattr(figures, "parts", lambda: {"a": [call("a"), call("b")]})
    for job in figures.parts()["a"]:
        job.run(results, lambda: next(minutes))
    assert calls == ["a"]
    for job in figures.parts()["a"]:
        job.run(record.Record(results.path), lambda: next(minutes))
    assert calls == ["a", "b"]


def test_rows_that_are_there_are_not_run_again(results, monkeypatch):
    group = groups()[0]
    asked = []

    class Contest:
        bar = contest.tqdm.tqdm(disable=True)

        def __init__(self, *args, **kwargs):
            pass

        def rows(self, cases, reference, is_over):
            for case in [*cases, reference]:
                asked.append(case.contender)
                row = contest.Row.of(case)
                row.seconds = 1.0
                yield row

    monkeypatch.setattr(contest, "Contest", Contest)
    first, *others = group.names
    row = contest.Row(first, group.length, group.dtype, group.kind, seconds=2.0)
    results.add(group.settings(row), dataclasses.asdict(row))
    group.run(results, lambda: False)
    assert asked == [*others, group.compare]
    group.run(results, lambda: False)
    assert len(asked) == len(group.names)
    assert len(figure_tables.rows_of(results, group.what)) == 1 + len(asked)


def test_a_record_is_of_one_machine(results):
    results.add({"what": "machine"}, machine.describe() | {"machine": "another one"})
    with pytest.raises(ValueError, match="one machine.*another one"):
        figures.remember_machine(results)
