"""Batches without a row, in every group and form of call."""

import functools

import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

LENGTH, DIM = 12, 8
ONCE = [kind for kind in kinds.CAUSAL if not kind.endswith(("_shifted", "_apart"))]
learning = functools.partial(kinds.experts, revive_after=2, balance_rate=0.1)
FORMS = {
    **{f"causal: {kind}": (kinds.CAUSAL[kind], "causal") for kind in ONCE},
    **{
        f"self: {kind}": (kinds.WHOLE[kind], "self")
        for kind in kinds.WHOLE
        if kind not in ONCE or kind.startswith("cluster_strided")
    },
    "self: learning": (learning, "self"),
    **{f"cross: {kind}": (make, "cross") for kind, make in kinds.MEMORIES.items()},
}
# Each has failed in a way of its own.
FEW = ("causal: performer", "causal: best_blocks", "causal: sinkhorn")
FEW += ("causal: rounds", "self: learning", "self: cluster_strided", "cross: experts")


def sequences(rows, form):
    x = helpers.normal(rows, LENGTH, DIM)
    mask = np.ones((rows, LENGTH), "bool")
    if form == "cross":
        return x, {"value": x + 1.0, "value_mask": mask, "self_attention": False}
    return x, {"query_mask": mask, "use_causal_mask": form == "causal"}


@pytest.mark.parametrize("name", kinds.some(FORMS, FEW))
def test_heads(name):
    make, form = FORMS[name]
    attention, shape = layers.MixedAttention([make()], key_dim=4), (None, LENGTH, DIM)
    attention.build(shape, shape if form == "cross" else None)
    before = state(attention)
    x, options = sequences(0, form)
    y, losses = golden_cases.run(attention, x, training=True, **options)
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


@pytest.mark.parametrize("kind", kinds.some(ONCE, ("token_choice",)))
def test_steps(kind):
    attention = helpers.attention(kinds.CAUSAL[kind]())

    def steps(x):
        cache = attention.make_cache(0, LENGTH)
        first, cache = attention(x[:, :3], cache=cache, cache_index=0)
        return first, attention(x[:, 3:4], cache=cache, cache_index=np.int32(3))[0]

    call = helpers.compiled(steps, jit_compile=None)
    outputs = call(np.zeros((0, LENGTH, DIM), "float32"))
    assert [y.shape for y in outputs] == [(0, 3, DIM), (0, 1, DIM)]
