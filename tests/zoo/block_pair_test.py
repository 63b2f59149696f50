"""Tests of heads that pair blocks."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS = 2, 2


def built_group(*args, **options):
    return helpers.built(zoo.BlockPairHeads(HEADS, *args, **options))


tokens = helpers.streams


@pytest.mark.parametrize(
    "length, num_blocks, permutations",
    [
        (12, 3, [(1, 2, 0), (0, 2, 1)]),
        (11, 4, None),
        (13, 2, [[0, 1], [1, 0]]),
        (3, 5, None),
        (1, 1, None),
    ],
)
def test_sees_the_tokens_of_one_block(length, num_blocks, permutations):
    """The mask of the paper: blocks are the floors of place * n / N."""
    group = built_group(num_blocks, permutations, max_relative_position=3)
    query, key, value = tokens(length)
    real = helpers.mask_with_a_hole(length, length, max(length - 2, 1))
    bias = helpers.normal(BATCH, length, seed=3)

    output, _ = golden_cases.run(
        group, query, key, value, value_mask=real, token_bias=bias
    )

    places = np.arange(length)
    block = np.floor(places * num_blocks / length).astype(int)
    pairs = group.permutation_of_each_head()
    assert np.all(np.sort(pairs, axis=-1) == np.arange(num_blocks))
    assert permutations is None or pairs.tolist() == [list(x) for x in permutations]
    sees = pairs[:, block][..., None] == block
    expected, _ = helpers.dense_attention(
        query,
        key,
        value,
        sees & real[:, None, None],
        bias[:, None, None],
        helpers.relative_tables(group),
        places[None] - places[:, None],
    )
    golden_cases.assert_close(output, expected, 1e-5)


def test_draws_permutations_from_the_seed():
    draws = [
        zoo.BlockPairHeads(2, 16, seed=seed).permutation_of_each_head()
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert np.any(draws[0] != draws[2]) and np.any(draws[0][0] != draws[0][1])
