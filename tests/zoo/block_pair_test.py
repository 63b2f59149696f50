"""Tests of heads that pair blocks; `oracle_test` has who sees whom in the pairs."""

import numpy as np

from routing_tf import zoo


def test_draws_permutations_from_the_seed():
    draws = [
        zoo.BlockPairHeads(2, 16, seed=seed).permutation_of_each_head()
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(draws[0], draws[1])
    np.testing.assert_array_equal(np.sort(draws[0], axis=-1), [np.arange(16)] * 2)
    assert np.any(draws[0] != draws[2]) and np.any(draws[0][0] != draws[0][1])
    given = [(1, 2, 0), (0, 2, 1)]
    pairs = zoo.BlockPairHeads(2, 3, given).permutation_of_each_head()
    np.testing.assert_array_equal(pairs, given)
