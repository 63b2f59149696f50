"""Tests of heads that see the best blocks; `oracle_test` has their rule."""

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import zoo
from routing_tf.zoo.parts.chosen_blocks import best_blocks
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns
from tests.zoo.dense_blocks import softmax


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
    attention = helpers.attention(heads.from_config(heads.get_config()))
    x = helpers.normal(1, 12, 8) * np.float32(1e-20)
    helpers.assert_pieces_equal_the_whole(attention, x, 7)


def test_of_nearly_equal_blocks_the_earlier_ones_are_chosen():
    """As rounding differs between one pass and pieces; in training it may decide."""
    scores = np.float32([[3.0, 1.0, 1.000001, 1.0001, -np.inf]])
    assert scores[0, 2] > scores[0, 1]
    for training, expected in ((None, [0, 3, 1]), (True, [0, 3, 2])):
        chosen = best_blocks(ops.array(scores), ops.array(scores > 0), 3, training)
        np.testing.assert_array_equal(golden_cases.to_numpy(chosen), [expected])


def test_dropout_falls_on_single_keys():
    """As in one softmax over all that a query sees: none is dropped with its block."""
    heads = zoo.BlockTopKHeads(1, 4, 3, dropout=0.5, dropout_seed=1)
    value = np.eye(64, dtype="float32")[None, None]
    arrays = [helpers.normal(1, 1, 64, 4, seed=i) for i in range(2)]
    options = {"use_causal_mask": True}
    kept, _ = golden_cases.run(heads, *arrays, value, **options)
    dropped, _ = golden_cases.run(heads, *arrays, value, **options, training=True)
    seen, left = kept > 0, dropped > 0
    assert not np.any(left & ~seen)
    assert 0.4 < left.sum() / seen.sum() < 0.6
    np.testing.assert_allclose(dropped[left], 2 * kept[left], rtol=1e-4)


def mixed_by_scores(query, key, value, real, block_length, num_blocks, causal):
    """Attention inside each block; results weighed by the softmax of block scores."""
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    numbers = np.arange(query.shape[2]) // block_length
    for b, h in np.ndindex(query.shape[:2]):
        products = query[b, h] @ key[b, h].T
        sizes = block_length, num_blocks
        sees, _ = patterns.blocks_of_query(products, real[b], *sizes, causal, True)
        for t, seen in enumerate(sees & real[b]):
            places = [np.flatnonzero(seen & (numbers == n)) for n in np.unique(numbers)]
            places = [x for x in places if len(x)]
            scores = np.array([products[t, x].mean() for x in places])
            for x, share in zip(places, softmax(scores) if places else ()):
                output[b, h, t] += share * softmax(products[t, x]) @ value[b, h, x]
    return output


@pytest.mark.parametrize("causal", [True, False])
def test_a_gradient_reaches_blocks_that_are_mixed_by_scores(causal):
    """Outputs are those of NumPy, and so are differences for a small step."""
    shape, names = (2, 2, 11, 4), ("query", "key", "value")
    arrays = {n: helpers.normal(*shape, seed=i) for i, n in enumerate(names)}
    steps = {n: helpers.normal(*shape, seed=i + 5) for i, n in enumerate(names)}
    real = helpers.mask_with_a_hole(11, 11, 8)
    cotangent = helpers.normal(*shape, seed=9)
    cotangent[:, :, 8:] = 0
    heads = zoo.BlockTopKHeads(2, block_length=3, num_blocks=2, mix="scores")
    result = golden_cases.gradients(
        heads,
        lambda output, losses: keras.ops.sum(keras.ops.multiply(output, cotangent)),
        {**arrays, "value_mask": real, "use_causal_mask": causal},
        wrt=names,
    )

    def expected(size):
        moved = [arrays[n].astype("float64") + size * steps[n] for n in names]
        return mixed_by_scores(*moved, real, 3, 2, causal)

    golden_cases.assert_close(result.outputs[:, :, :8], expected(0)[:, :, :8], 1e-5)
    slope = np.sum((expected(1e-6) - expected(-1e-6)) * cotangent) / 2e-6
    found = sum(np.sum(result.inputs[n] * steps[n]) for n in names)
    golden_cases.assert_close(found, slope, 1e-4)
