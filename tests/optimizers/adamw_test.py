"""Tests of Adam with weight decay of all but biases and normalization."""

import keras
import numpy as np
import pytest

from routing_tf import optimizers
from routing_tf import zoo
from tests import golden_cases


def after_a_step(weights):
    """Returns what is left of weights without a gradient, from ones on."""
    optimizer = optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer = optimizers.AdamW.from_config(optimizer.get_config())
    for weight in weights:
        weight.assign(np.ones(weight.shape))
    optimizer.build(weights)
    optimizer.apply([np.zeros(w.shape, "float32") for w in weights], weights)
    return {w.path: golden_cases.to_numpy(w).reshape(-1)[0] for w in weights}


def test_decay_takes_a_share_of_matrices_alone():
    left_alone = "gamma", "beta", "bias", "key_scale", "sigma", "alpha_scores"
    names, value = ("kernel", *left_alone), np.ones((2, 2), "float32")
    left = after_a_step([keras.Variable(value, name=name) for name in names])
    expected = [0.95, *[1] * len(left_alone)]
    golden_cases.assert_close(np.array(list(left.values())), expected, 1e-6)


@pytest.mark.parametrize(
    "group",
    [zoo.InducedHeads(2, 3), zoo.LongShortHeads(2, 3, 2)],
    ids=["induced", "long_short"],
)
def test_decay_leaves_the_normalization_of_heads_alone(group):
    group.build(*[(None, 2, None, 4)] * 3)
    left = after_a_step(group.trainable_weights)
    norms = [value for path, value in left.items() if "norm/" in path]
    assert norms and set(norms) == {1.0}
    assert min(left.values()) < 0.96
