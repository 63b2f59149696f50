"""Random layers against plain NumPy; `fuzzing` runs more of them as a command."""

import collections

import hypothesis
import keras
import pytest

from tests.layers import fuzz_cases
from tests.layers import fuzzing

# A call takes longest to compile, which JAX does for each.
FEW = 6 if keras.backend.backend() == "jax" else 12


@pytest.mark.parametrize("examples", [FEW, pytest.param(200, marks=pytest.mark.slow)])
def test_gives_the_right_answer(examples):
    """The command tries more, which is worth its time after a change of the layers."""
    counts = collections.Counter()

    @fuzzing.settings(examples, derandomize=True)
    @hypothesis.given(fuzz_cases.cases())
    def check(case):
        fuzzing.check(case, counts)

    check()
    print(counts)
    assert counts["cases"] >= examples
    assert counts["rows compared"] >= 0.6 * counts["rows"]
