"""Tests of axial heads; `oracle_test` has their rule."""

import numpy as np
import pytest

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers


def test_equals_axial_attention():
    case = golden_cases.load("peers/axial.npz")
    total = 0
    for axis in (0, 1):
        group = zoo.AxialHeads(2, axis)
        layer = helpers.attention(group, key_dim=6, dim=12, axes=2, use_bias=True)
        weights = case.group(str(axis))
        expected = weights.pop("output")
        biases = [f"{name}_bias" for name in ("query", "key", "value")]
        helpers.assign(layer, **dict.fromkeys(biases, np.zeros(12)), **weights)
        output, _ = golden_cases.run(layer, case["x"])
        golden_cases.assert_close(output, expected, 1e-5)
        total = total + output
    golden_cases.assert_close(total, case["output"], 1e-5)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_needs_the_width(axis):
    layer = layers.MixedAttention([zoo.AxialHeads(1, axis)], 6)
    with pytest.raises(ValueError, match="`width`.*width=None"):
        layer(helpers.normal(1, 12, 8))
    with pytest.raises(ValueError, match="`width`.*width=None"):
        layer.make_cache(1, 12)
    layer = layers.MixedAttention([zoo.AxialHeads(1, axis, width=4)], 6)
    with pytest.raises(ValueError, match=r"`width`.*width=4 .*\(4, 3\)"):
        layer(helpers.normal(1, 4, 3, 8))
