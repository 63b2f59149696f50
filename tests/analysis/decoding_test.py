"""Tests of scores in one pass, token by token and as a SavedModel."""

import dataclasses
import types

import keras
import numpy as np
import pytest

from routing_tf import problems
from routing_tf.analysis import compare_decoding
from routing_tf.analysis import decoding
from routing_tf.analysis import looks
from tests.analysis.scopes_test import Countdown
from tests.models import small_models

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


def problem():
    return Countdown(sequence_length=8)


@pytest.mark.parametrize(
    "routing, with_export",
    [
        ("token_choice", False),
        pytest.param(
            "expert_choice",
            True,  # tests of SavedModels have one with token choice
            marks=[
                pytest.mark.thorough,
                pytest.mark.skipif(not ON_TENSORFLOW, reason="JAX exports nothing"),
            ],
        ),
    ],
)
def test_all_ways_score_the_same(routing, with_export):
    # Longer texts than a window, and than a local block.
    sizes = {"attention_window": 6, "local_block_length": 4}
    lm = small_models.language_model(num_local_only_layers=1, routing=routing, **sizes)
    result = compare_decoding(
        lm, problem(), "test", num_examples=3, with_export=with_export, verbose=False
    )
    assert result.num_windows == 3 and result.decisions > 30
    assert result.near_ties == 0
    assert result.largest_difference < 1e-4
    assert abs(result.one_pass - result.steps) < 1e-5
    assert (result.exported is not None) == with_export
    if with_export:
        assert abs(result.one_pass - result.exported) < 1e-5


@pytest.mark.thorough
def test_packed_documents():
    class Texts(problems.TextProblem):
        def load_split(self, split):
            return ["abc", "de", "fghijk", "lm"]

    lm = small_models.language_model(vocabulary_size=258, routing="token_choice")
    data = Texts(sequence_length=10, segment_ids=True)
    result = compare_decoding(lm, data, "test", verbose=False)
    assert result.largest_difference < 1e-4 and result.exported is None
    line = "SavedModel: takes one document in each row"
    assert line in looks.describe_decoding(result, data, "test")


def test_a_way_that_differs_is_seen(monkeypatch):
    lm = small_models.language_model(num_routed_heads=0, num_local_heads=4)
    steps = decoding.scorer_by_steps

    def others(lm):
        score = steps(lm)
        return lambda inputs, targets: score(inputs, targets) + 0.5

    monkeypatch.setattr(decoding, "scorer_by_steps", others)
    result = compare_decoding(
        lm, problem(), "test", num_examples=2, with_export=False, verbose=False
    )
    assert result.steps - result.one_pass == pytest.approx(0.5 / np.log(2), abs=1e-5)
    assert result.largest_difference == pytest.approx(0.5 / np.log(2), abs=1e-5)
    assert (result.near_ties, result.decisions) == (0, 0)


@pytest.mark.parametrize("routing", ["token_choice", "expert_choice"])
def test_equal_scores_are_near_ties(routing):
    lm = small_models.language_model(num_local_only_layers=1, routing=routing)
    inputs = small_models.inputs((small_models.LENGTH,))
    assert decoding.count_near_ties(lm, inputs)[0] == 0
    for kmeans in small_models.kmeans_layers(lm):
        kmeans.centroids.assign(np.zeros(kmeans.centroids.shape))
    near, decisions = decoding.count_near_ties(lm, inputs)
    assert near > 0
    if routing == "expert_choice":
        # All clusters of two heads from the seventh token on.
        assert near == decisions == 2 * 3 * (small_models.LENGTH - 6)


def test_near_ties_are_those_at_the_border():
    scores = np.array([0.0, 4.0, 2.0, 2.0 + 1e-6, 3.0, 9.0], "float32")
    gaps = decoding.gaps_of_members(scores[None, None, :, None], window=2)
    expected = [2.0, 1e-6, 1.0 - 1e-6, 1.0]
    np.testing.assert_allclose(gaps.ravel(), expected, atol=3e-7)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_encoder_layers": 1}, "kind='seq2seq'"),
        ({"routing": "hashed", "compatibility": "trained"}, "compatibility"),
    ],
)
def test_refused(changes, message):
    lm = types.SimpleNamespace(hyperparameters=small_models.hyperparameters(**changes))
    with pytest.raises(ValueError, match=message):
        compare_decoding(lm, problem(), "test")


def test_lines_for_a_reader():
    result = decoding.DecodingComparison(1.5, 1.5, None, 1e-6, 2, 3000, 7)
    data = problem()
    lines = list(looks.describe_decoding(result, data, "test"))
    assert lines[0] == "held-out bits per byte of 7 windows"
    assert "SavedModel: only on the TensorFlow backend" in lines
    assert "2 of 3,000 decisions" in lines[-1]
    result = dataclasses.replace(result, exported=1.25)
    assert "SavedModel: 1.25000" in looks.describe_decoding(result, data, "test")
    data.metric_name, data.metric = "perplexity", lambda nats, split: 2 * nats
    lines = list(looks.describe_decoding(result, data, "test"))
    assert lines[0] == "held-out perplexity of 7 windows"
    assert lines[1] == f"one parallel pass: {3 * np.log(2):.5f}"
