"""Tests of heads that see the best blocks; `oracle_test` has their rule."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers


def test_equals_the_code_of_the_paper():
    """`moba_naive.py`, run by `tools/peers/block_top_k.py`, on packed sequences."""
    golden = golden_cases.load("peers/block_top_k.npz")
    heads = zoo.BlockTopKHeads(
        golden["query"].shape[1], int(golden["block_length"]), int(golden["num_blocks"])
    )
    scale = golden["query"].shape[-1] ** -0.5
    start = 0
    for length in golden["lengths"]:
        arrays = [
            golden[name][start : start + length].swapaxes(0, 1)[None]
            for name in ("query", "key", "value", "output")
        ]
        query, key, value, expected = arrays
        output, _ = golden_cases.run(
            heads, query * scale, key, value, use_causal_mask=True
        )
        golden_cases.assert_close(output, expected, 1e-5)
        start += length


@pytest.mark.parametrize(
    "causal", [True, pytest.param(False, marks=pytest.mark.thorough)]
)
def test_gradients_equal_those_of_dense_attention_to_the_same_keys(causal):
    """The map tells which keys a query sees; there a bias hides the others."""
    length, shape = 19, (2, 2, 19, 6)
    names = ("query", "key", "value")
    arrays = {n: helpers.normal(*shape, seed=i) for i, n in enumerate(names)}
    heads = zoo.BlockTopKHeads(2, block_length=4, num_blocks=3)
    eye = np.broadcast_to(np.eye(length, dtype="float32"), (2, 2, length, length))
    weights, _ = golden_cases.run(
        heads, arrays["query"], arrays["key"], eye, use_causal_mask=causal
    )

    def squares(output, losses):
        return keras.ops.sum(output**2)

    actual, expected = (
        golden_cases.gradients(layer, squares, {**arrays, **options}, wrt=names)
        for layer, options in (
            (heads, {"use_causal_mask": causal}),
            (layers.ScaledDotProduct(), {"attention_mask": weights > 0}),
        )
    )
    for name in names:
        golden_cases.assert_close(actual.inputs[name], expected.inputs[name], 1e-4)


def test_the_choice_does_not_depend_on_the_length_of_vectors():
    """Though in float32 products of short ones are 0."""
    heads = zoo.BlockTopKHeads(1, block_length=3, num_blocks=2)
    query, key = (helpers.normal(1, 1, 12, 4, seed=seed) for seed in range(2))
    place = np.eye(12, dtype="float32")[None, None]
    seen = [
        golden_cases.run(heads, query * c, key * c, place, use_causal_mask=True)[0] > 0
        for c in (1.0, 1e-20)
    ]
    np.testing.assert_array_equal(*seen)
    attention = layers.MixedAttention([heads.from_config(heads.get_config())], 4)
    x = helpers.normal(1, 12, 8) * 1e-20
    expected = golden_cases.to_numpy(attention(x, use_causal_mask=True))
    cache = attention.make_cache(1, 12)
    _, cache = attention(x[:, :7], cache=cache, cache_index=0)
    last, _ = attention(x[:, 7:], cache=cache, cache_index=7)
    golden_cases.assert_close(
        golden_cases.to_numpy(last) * 1e20, expected[:, 7:] * 1e20, 1e-5
    )


def test_dropout_falls_on_single_keys():
    """As in one softmax over all that a query sees: none is dropped with its block."""
    heads = zoo.BlockTopKHeads(1, 4, 3, dropout=0.5, dropout_seed=1)
    value = np.eye(64, dtype="float32")[None, None]
    arrays = [helpers.normal(1, 1, 64, 4, seed=i) for i in range(2)]
    kept, _ = golden_cases.run(heads, *arrays, value, use_causal_mask=True)
    dropped, _ = golden_cases.run(
        heads, *arrays, value, use_causal_mask=True, training=True
    )
    seen, left = kept > 0, dropped > 0
    assert not np.any(left & ~seen)
    assert 0.4 < left.sum() / seen.sum() < 0.6
    np.testing.assert_allclose(dropped[left], 2 * kept[left], rtol=1e-4)
