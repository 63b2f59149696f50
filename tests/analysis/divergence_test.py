"""Tests of divergences between attention distributions."""

from routing_tf.analysis import jensen_shannon_divergence
from routing_tf.analysis import kl_divergence
from tests import golden_cases


def test_equal_to_the_release():
    case = golden_cases.load("pieces/jensen_shannon_divergence.npz")
    a, b = case["in/a"], case["in/b"]
    golden_cases.assert_close(jensen_shannon_divergence(a, b), case["out/jsd"], 3e-6)
    golden_cases.assert_close(kl_divergence(a, b), case["out/kl_a_b"], 3e-6)
