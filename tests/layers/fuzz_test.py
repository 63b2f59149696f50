"""Random layers against plain NumPy; `fuzzing` runs more of them as a command."""

import hypothesis
import keras
import pytest

from tests.layers import fuzz_cases
from tests.layers import fuzzing

# A call takes longest to compile, which JAX does for each.
FEW = 20 if keras.backend.backend() == "jax" else 40


@pytest.mark.parametrize("examples", [FEW, pytest.param(2000, marks=pytest.mark.slow)])
def test_gives_the_right_answer_or_names_the_argument(examples):
    counts = fuzzing.Counts()

    @fuzzing.settings(examples, derandomize=True)
    @hypothesis.given(fuzz_cases.cases())
    def check(case):
        fuzzing.check(case, counts)

    check()
    print(counts)
    assert counts["cases"] >= examples
    if examples > FEW:
        assert counts.valid_share >= 0.6
