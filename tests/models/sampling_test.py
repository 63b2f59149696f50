"""Filtered probabilities against the samplers of keras_hub."""

import keras
import keras_hub
import numpy as np
import pytest

from routing_tf.models import saved_functions
from tests.models.small_models import array

VOCABULARY_SIZE = 23


def logits(rows=4, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, VOCABULARY_SIZE)) * 3


def distribution(sampler, logits, monkeypatch):
    """Returns the probabilities that a sampler of keras_hub draws from."""
    seen = {}
    take = keras.ops.take_along_axis

    def categorical(log_probabilities, *args, **kwargs):
        seen["logits"] = log_probabilities
        return keras.ops.zeros((len(logits), 1), "int32")

    def take_along_axis(indices, *args, **kwargs):
        seen["indices"] = indices
        return take(indices, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(keras.random, "categorical", categorical)
        patch.setattr(keras.ops, "take_along_axis", take_along_axis)
        sampler.get_next_token(sampler.compute_probabilities(logits))
    weights = np.exp(array(seen["logits"]))
    result = np.zeros(logits.shape)
    np.put_along_axis(result, array(seen["indices"]), weights, axis=-1)
    return result / result.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [1, 5, VOCABULARY_SIZE])
def test_top_k_is_that_of_keras_hub(temperature, top_k, monkeypatch):
    sampler = keras_hub.samplers.TopKSampler(k=top_k, temperature=temperature)
    expected = distribution(sampler, logits(), monkeypatch)
    actual = saved_functions.filtered_probabilities(logits(), temperature, top_k)
    np.testing.assert_allclose(array(actual), expected, atol=1e-6)
    assert ((array(actual) > 0).sum(-1) == top_k).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.8, 0.99])
@pytest.mark.parametrize("top_k", [None, 4])
def test_top_p_is_that_of_keras_hub(temperature, top_p, top_k, monkeypatch):
    sampler = keras_hub.samplers.TopPSampler(top_p, k=top_k, temperature=temperature)
    expected = distribution(sampler, logits(), monkeypatch)
    actual = saved_functions.filtered_probabilities(
        logits(), temperature, top_k or 0, top_p
    )
    np.testing.assert_allclose(array(actual), expected, atol=1e-6)


def test_without_filters_it_is_the_softmax():
    expected = array(keras.ops.softmax(logits().astype("float32")))
    actual = saved_functions.filtered_probabilities(logits())
    np.testing.assert_allclose(array(actual), expected, atol=1e-6)
    actual = saved_functions.filtered_probabilities(logits(), top_k=VOCABULARY_SIZE + 9)
    np.testing.assert_allclose(array(actual), expected, atol=1e-6)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1e-30}])
def test_at_no_temperature_only_the_most_probable_token_stays(settings):
    expected = np.eye(VOCABULARY_SIZE)[logits().argmax(-1)]
    actual = array(
        saved_functions.filtered_probabilities(logits(), **settings, top_p=0.5)
    )
    np.testing.assert_array_equal(actual > 0, expected > 0)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_ties_keep_the_number_of_tokens():
    actual = array(saved_functions.filtered_probabilities(np.zeros((2, 6)), top_k=3))
    np.testing.assert_allclose(actual, [[1 / 3] * 3 + [0] * 3] * 2, atol=1e-6)


def test_draws_have_the_probabilities():
    number = 20000
    probabilities = array(saved_functions.filtered_probabilities(logits(1), top_k=4))
    uniform = np.random.default_rng(0).uniform(size=(number, VOCABULARY_SIZE))
    rows = np.repeat(probabilities, number, axis=0)
    drawn = array(saved_functions.draw(rows, uniform.astype("float32")))
    counts = np.bincount(drawn, minlength=VOCABULARY_SIZE)
    assert drawn.dtype == "int32"
    assert (counts[probabilities[0] == 0] == 0).all()
    np.testing.assert_allclose(counts / number, probabilities[0], atol=0.015)
