"""Tests of divergences between attention distributions."""

import numpy as np

from routing_tf.analysis import jensen_shannon_divergence
from routing_tf.analysis import kl_divergence
from tests import golden_cases


def test_equal_to_the_release():
    case = golden_cases.load("pieces/jensen_shannon_divergence.npz")
    a, b = case["in/a"], case["in/b"]
    golden_cases.assert_close(jensen_shannon_divergence(a, b), case["out/jsd"], 3e-6)
    golden_cases.assert_close(kl_divergence(a, b), case["out/kl_a_b"], 3e-6)


def test_bounds():
    apart = np.eye(4)[:2], np.eye(4)[2:]
    np.testing.assert_allclose(jensen_shannon_divergence(*apart), np.log(2), atol=1e-3)
    same = np.ones((3, 5)), np.full((3, 5), 7.0)
    np.testing.assert_allclose(jensen_shannon_divergence(*same), 0.0, atol=1e-4)


def test_symmetric():
    a, b = np.random.default_rng(0).random((2, 3, 6))
    first, second = jensen_shannon_divergence(a, b), jensen_shannon_divergence(b, a)
    np.testing.assert_allclose(first, second, rtol=1e-12)
    assert 0.01 < first < 0.69
