"""Tests that `benchmarks.gpu` asks for what there is, and writes what it finds."""

import dataclasses
import importlib
import pathlib

import pytest

from benchmarks import contenders
from benchmarks import contest
from benchmarks import figures
from benchmarks import gpu
from benchmarks import machine
from benchmarks import record
from tests import command_line

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]


def jobs(device):
    return [job for each in gpu.parts(device, pathlib.Path()).values() for job in each]


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_groups_name_contenders_on_jax(device):
    for group in jobs(device):
        if not hasattr(group, "names"):
            continue
        _, cases_of = figures.CONTESTS[group.what]
        options = group.options()
        assert options.device == device and options.compare_dtype == group.dtype
        cases = cases_of(group.length, group.kind, group.dtype, options)
        for name in (*group.names, group.compare):
            (case,) = contenders.choose(cases, [name])
            assert case.library == "jax" and case.passes == group.kind


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_further_commands_parse(device):
    calls = [job.found_by["what"] for job in jobs(device) if hasattr(job, "found_by")]
    for call in filter(lambda x: x.startswith("benchmarks."), calls):
        # `token choice` has a space.
        module, *arguments = call.split(" --")
        command = importlib.import_module(module)
        command_line.parse(command, *(f"--{each}" for each in arguments))
    for path in (*gpu.TESTS, *gpu.GOLDEN):
        assert (ROOT / path).exists()


def test_parts_without_their_packages_are_left_out(monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert gpu.is_missing("SmolLM2") and not gpu.is_missing("layer")


def test_rows_come_into_the_file(tmp_path):
    results = record.Record(tmp_path / "figures.json")
    results.add({"what": "machine"}, machine.describe())
    group = gpu.parts("gpu", tmp_path)["layer"][0]
    row = contest.Row(group.names[0], 8192, "bfloat16", group.kind, seconds=0.001)
    results.add(group.settings(row), dataclasses.asdict(row))
    results.add({"what": "golden"}, {"passed": 3, "failed": 0})
    lines = gpu.table(results)
    assert any("token choice (JAX) | bfloat16 | 0.0010 s" in line for line in lines)
    assert "- golden: {'passed': 3, 'failed': 0}" in lines
