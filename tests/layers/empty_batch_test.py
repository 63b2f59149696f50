"""Batches without a row, in every group and form of call."""

import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.layers import padding_test
from tests.layers.support.lengths_test import CAUSAL
from tests.layers.support.lengths_test import WITHOUT_A_MASK
from tests.layers.support.lengths_test import some_thorough

LENGTH, DIM = 12, 8
OTHERS = {
    "random": lambda: layers.RandomHeads(2, 3, 5),
    "random blocks": lambda: layers.RandomBlockHeads(2, 4, 1),
    "linformer": lambda: layers.LinformerHeads(2, LENGTH, 3),
    "nystrom": lambda: layers.NystromHeads(2, 4, convolution_size=3),
    "expert choice, training": lambda: layers.RoutedHeads(
        2, 3, 5, routing="expert_choice", revive_after=2, balance_rate=0.1
    ),
}
NOT_CAUSAL = {**WITHOUT_A_MASK, **OTHERS}
FORMS = {
    **{f"causal: {name}": (make, "causal") for name, make in CAUSAL.items()},
    **{f"self: {name}": (make, "self") for name, make in NOT_CAUSAL.items()},
    **{f"cross: {name}": (make, "cross") for name, make in padding_test.GROUPS.items()},
}

# Each has failed in a way of its own.
FEW = (
    "causal: performer",
    "causal: best blocks",
    "causal: sinkhorn",
    "causal: hashed in rounds",
    "self: expert choice, training",
    "self: cluster-strided",
    "cross: routed",
)


def sequences(rows, form):
    x = helpers.normal(rows, LENGTH, DIM)
    mask = np.ones((rows, LENGTH), "bool")
    if form == "cross":
        return x, {"value": x + 1.0, "value_mask": mask, "self_attention": False}
    return x, {"query_mask": mask, "use_causal_mask": form == "causal"}


@pytest.mark.parametrize("name", some_thorough(FORMS, FEW))
def test_heads(name):
    make, form = FORMS[name]
    attention = layers.MixedAttention([make()], key_dim=4)
    shape = (None, LENGTH, DIM)
    attention.build(shape, shape if form == "cross" else None)
    before = state(attention)
    x, options = sequences(0, form)
    for training in (False, True):
        y, losses = golden_cases.run(attention, x, training=training, **options)
        assert y.shape == (0, LENGTH, DIM)
        assert np.isfinite(losses).all()
    # Of no tokens centroids learn nothing.
    after = state(attention)
    for path in before:
        assert np.isfinite(after[path]).all(), path
        if "centroids" in path:
            np.testing.assert_allclose(after[path], before[path], rtol=1e-6)


def state(layer):
    return {v.path: golden_cases.to_numpy(v) for v in layer.variables}


@pytest.mark.parametrize("name", some_thorough(CAUSAL, ("token choice",)))
def test_steps(name):
    attention = layers.MixedAttention([CAUSAL[name]()], key_dim=4)
    attention.build((None, None, DIM))
    x = np.zeros((0, LENGTH, DIM), "float32")
    cache = attention.make_cache(0, LENGTH)
    y, cache = attention(x[:, :3], cache=cache, cache_index=0)
    assert y.shape == (0, 3, DIM)
    y, cache = attention(x[:, 3:4], cache=cache, cache_index=np.int32(3))
    assert y.shape == (0, 1, DIM)
