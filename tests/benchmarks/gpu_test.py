"""Tests that the commands of `benchmarks.gpu` are commands of the benchmarks."""

import importlib
import pathlib

import pytest

from benchmarks import attention
from benchmarks import contenders
from benchmarks import gpu
from benchmarks import train_step
from tests import command_line

pytestmark = pytest.mark.slow
# Modules of contests -> what returns the cases of a length and of what is timed.
CASES = {
    "benchmarks.attention": (contenders.attention, attention.PASSES[0]),
    "benchmarks.scaling": (contenders.scaling, attention.PASSES[0]),
    "benchmarks.train_step": (train_step.cases_of, "train step"),
}


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("part", gpu.PARTS)
def test_commands_parse_and_name_contenders(device, part):
    for module, *arguments in gpu.commands(device, pathlib.Path("figures"))[part]:
        if module == "pytest":
            paths = [x for x in arguments if not x.startswith("-")]
            assert paths and all(pathlib.Path(path).exists() for path in paths)
            continue
        options = command_line.parse(importlib.import_module(module), *arguments)
        if module not in CASES:
            continue
        cases_of, timed = CASES[module]
        for length in options.lengths:
            cases = cases_of(int(length), timed, options.dtypes[0], options)
            assert contenders.choose(cases, options.contenders)
            if options.compare != contenders.PACKAGE:
                assert contenders.choose(cases, [options.compare])
