"""Tests of the windows to look at."""

import numpy as np
import pytest

from routing_tf import problems
from routing_tf.analysis.windows import complete_windows
from routing_tf.analysis.windows import text_window
from routing_tf.models import RoutingTransformerCausalLMPreprocessor
from routing_tf.tokenizers import ByteTokenizer
from tests.analysis import small_cases
from tests.models import small_models


class Numbers(problems.Problem):
    name = "numbers"
    vocabulary_size = 1000

    def load(self):
        ids = np.arange(1, 96)
        return {"train": ids, "validation": ids, "test": ids}


class Lines(Numbers):
    """Windows that hold one id each, but for the last one."""

    def evaluation_windows(self, split):
        return np.arange(4), np.array([1, 1, 1, self.complete])


def test_evenly_spaced():
    found = complete_windows(Numbers(sequence_length=10), "test", 4, length=3)
    expected = [[0, 1, 2], [0, 21, 22], [0, 41, 42], [0, 61, 62]]
    np.testing.assert_array_equal(found["token_ids"], expected)
    assert found["padding_mask"].shape == (4, 3) and found["padding_mask"].all()


def test_the_short_one_is_left_out():
    # 9 windows of 10 ids and one of 5.
    found = complete_windows(Numbers(sequence_length=10), "test", 100)
    assert found["token_ids"].shape == (9, 10)
    assert found["padding_mask"].all()


@pytest.mark.parametrize("complete, expected", [(1, None), (10, [0, *range(4, 13)])])
def test_short_windows(complete, expected):
    problem = Lines(sequence_length=10)
    problem.complete = complete
    if expected is None:
        with pytest.raises(ValueError, match="'test' .*'numbers' .* 10 "):
            complete_windows(problem, "test", 2)
    else:
        found = complete_windows(problem, "test", 2)
        np.testing.assert_array_equal(found["token_ids"], [expected])


@pytest.mark.parametrize("options", [{"num_windows": 0}, {"length": 0}])
def test_wrong_numbers(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"`{name}`"):
        problem = Numbers(sequence_length=10)
        complete_windows(problem, "test", **{"num_windows": 2, **options})


def test_a_text():
    lm = small_models.language_model(
        vocabulary_size=258,
        preprocessor=RoutingTransformerCausalLMPreprocessor(ByteTokenizer()),
    )
    window = text_window(lm, "aß")
    np.testing.assert_array_equal(window["token_ids"], [[0, 99, 197, 161]])
    assert window["padding_mask"].tolist() == [[True] * 4]
    assert text_window(lm, "abc", length=2)["token_ids"].tolist() == [[0, 99]]
    with pytest.raises(ValueError, match="`text`.*text=''"):
        text_window(lm, "")


def test_models_that_take_no_text():
    with pytest.raises(ValueError, match="`text`.*Received: .*ids$"):
        text_window(small_cases.language_model(), "abc")
    with pytest.raises(ValueError, match="`text`.*Received: .*images$"):
        text_window(small_cases.image_model(), "abc")
