"""Tests of the patterns of places: how much of a window they use."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import zoo
from routing_tf.models.patterns import Sizes
from tests.layers import helpers

LENGTH, WINDOW = 64, 16


# A window; half of one and each eighth token before it; a block of eight and its last
# token of each of the seven others.
@pytest.mark.parametrize(
    "name, near, number", [("sliding", 16, 16), ("strided", 9, 15), ("fixed", 8, 15)]
)
def test_the_last_query_sees_a_window(name, near, number):
    groups = zoo.PATTERNS[name].groups(Sizes(WINDOW, LENGTH, num_clusters=4), 2)
    attention = layers.MixedAttention(groups, key_dim=4)
    x, options = helpers.normal(1, LENGTH, 8), {"return_attention_scores": True}
    _, scores = attention(x, use_causal_mask=True, **options)
    seen = np.flatnonzero(keras.ops.convert_to_numpy(scores)[0, 0, -1])
    assert len(seen) == number
    assert set(range(LENGTH - near, LENGTH)) <= set(seen)
