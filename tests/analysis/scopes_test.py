"""Tests of scores in the two routing scopes."""

import functools
import math

import numpy as np
import pytest

from routing_tf import problems
from routing_tf.analysis import compare_scopes
from routing_tf.analysis import decoding
from routing_tf.models.score import TokenScorer
from routing_tf.training import evaluation
from tests.models import small_models

LENGTH = 12


class Countdown(problems.Problem):
    """75 ids in each split: windows of 12 and a last one of 3."""

    name = "countdown"
    vocabulary_size = small_models.VOCABULARY_SIZE

    def load(self):
        ids = np.random.default_rng(0).integers(1, self.vocabulary_size, 75)
        return {"train": ids, "validation": ids, "test": ids}


@pytest.fixture(autouse=True)
def shared_scorers(monkeypatch):
    """Scorers are compiled once."""
    monkeypatch.setattr(decoding, "TokenScorer", scorer)


@functools.cache
def scorer(lm, routing_scope):
    return TokenScorer(lm, routing_scope)


@pytest.fixture
def problem():
    return Countdown(sequence_length=LENGTH)


def language_model(**changes):
    settings = {"batch_tokens": 5 * LENGTH, "num_layers": 1, **changes}
    return small_models.language_model(**settings)


def test_against_a_direct_computation(problem):
    lm = language_model()
    result = compare_scopes(lm, problem, "test", verbose=False)
    scorers = [scorer(lm, scope) for scope in ("full", "prefix")]
    bits = [evaluation.evaluate(s, problem, "test", batch_size=5).bits for s in scorers]
    np.testing.assert_allclose([result.full, result.prefix], bits, rtol=1e-6)
    assert result.difference == result.prefix - result.full != 0
    assert result.num_windows == 7
    # Five windows, all of the same length.
    result = compare_scopes(lm, problem, "test", num_examples=5, verbose=False)
    batches = problem.dataset("test", 5, num_examples=5)
    ((inputs, targets, weights),) = batches.as_numpy_iterator()
    assert weights.all()
    full, prefix = (
        each.score(inputs, targets).mean(axis=-1) / math.log(2) for each in scorers
    )
    differences = prefix.astype("float64") - full
    np.testing.assert_allclose(result.difference, differences.mean(), rtol=1e-4)
    expected = differences.std(ddof=1) / math.sqrt(5)
    np.testing.assert_allclose(result.standard_error, expected, rtol=1e-4)
    assert result.num_windows == 5


def test_token_choice_is_the_same_in_both(problem):
    lm = language_model(routing="token_choice")
    result = compare_scopes(lm, problem, "test", num_examples=1, verbose=False)
    assert result.full == result.prefix
    assert result.difference == 0
    # A single window says nothing about the error.
    assert result.num_windows == 1
    assert result.standard_error is None
