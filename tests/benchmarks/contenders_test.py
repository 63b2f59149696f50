"""Tests that the contenders of the benchmarks run, at tiny sizes."""

import dataclasses
import functools
import sys
import types

import keras
import pytest

from benchmarks import attention
from benchmarks import contenders
from benchmarks import encoder
from benchmarks import worker
from tests import command_line

pytestmark = pytest.mark.slow
LIBRARY = keras.backend.backend()
options = functools.partial(command_line.parse, attention)


def own_cases(device="cpu", dtype="float32", build="ours"):
    sizes = options("--num_heads=2", "--key_dim=8", "--attention_window=8")
    sizes.device = device
    cases = contenders.attention(32, "forward+backward", dtype, sizes)
    return [
        case
        for case in cases
        if case.library == LIBRARY and case.build.endswith(f":{build}")
    ]


@pytest.mark.parametrize(
    "build, pattern",
    [
        *(
            ("ours", x)
            for x in ("token choice", "hashed", "multipole", "local", "full")
        ),
        ("products", "token choice"),
    ],
)
def test_patterns_run_forward_and_backward(build, pattern):
    cases = own_cases(build=build)
    case = next(case for case in cases if case.arguments["pattern"] == pattern)
    assert worker.timed(worker.build(dataclasses.asdict(case))) > 0


def test_cudnn_takes_part_on_a_gpu_without_relative_positions():
    ways = [
        {case.arguments["implementation"]: case for case in own_cases(*where)}
        for where in (("cpu", "bfloat16"), ("gpu", "float32"), ("gpu", "bfloat16"))
    ]
    assert [set(way) for way in ways[:2]] == [{"plain"}] * 2
    if LIBRARY == "jax":
        assert not ways[2]["cudnn"].arguments["relative"]
    else:
        assert set(ways[2]) == {"plain"}


def test_contenders_do_not_find_libraries_of_others(monkeypatch):
    """Each is as large as where it alone is installed."""
    for name in worker.OPTIONAL:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    worker.hide_optional_libraries("jax")
    import jax

    assert jax is sys.modules["jax"]
    with pytest.raises(ImportError):
        import matplotlib  # noqa: F401


def test_classifiers_take_turns():
    options = command_line.parse(encoder, "--steps=1", "--batch_size=1")
    found = encoder.measure(8, options)
    assert list(found) == list(encoder.HEADS) and min(found.values()) > 0
