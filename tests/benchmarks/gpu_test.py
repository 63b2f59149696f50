"""Tests that the commands of `benchmarks.gpu` are commands of the benchmarks."""

import importlib
import pathlib

import pytest
from absl import flags

from benchmarks import attention
from benchmarks import contenders
from benchmarks import gpu
from benchmarks import train_step

# Modules of contests -> what returns the cases of a length.
CASES = {
    "benchmarks.attention": lambda length, dtype, options: contenders.attention(
        length, attention.PASSES[0], dtype, options
    ),
    "benchmarks.scaling": lambda length, dtype, options: contenders.scaling(
        length, attention.PASSES[0], dtype, options
    ),
    "benchmarks.train_step": lambda length, dtype, options: train_step.cases_of(
        length, "train step", dtype, options
    ),
}


def parsed(module, arguments):
    values = flags.FlagValues()
    importlib.import_module(module).define_flags(values)
    assert values([module, *arguments]) == [module]
    return values


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("part", gpu.PARTS)
def test_commands_parse_and_name_contenders(device, part):
    for module, *arguments in gpu.commands(device, pathlib.Path("figures"))[part]:
        if module == "pytest":
            paths = [x for x in arguments if not x.startswith("-")]
            assert paths and all(pathlib.Path(path).exists() for path in paths)
            continue
        options = parsed(module, arguments)
        if module not in CASES:
            continue
        for length in options.lengths:
            cases = CASES[module](int(length), options.dtypes[0], options)
            assert contenders.choose(cases, options.contenders)
            if options.compare != contenders.PACKAGE:
                assert contenders.choose(cases, [options.compare])
