"""Tests of random blocks; `oracle_test` has who sees whom, given the blocks."""

import numpy as np
import pytest

from routing_tf import zoo


def drawn_by(table):
    """Yields head, block and the blocks that it draws."""
    for head, block in np.ndindex(table.shape[:2]):
        blocks = table[head, block]
        yield head, block, blocks[blocks >= 0].tolist()


@pytest.mark.parametrize("causal", [False, True])
def test_draws_far_blocks_after_the_rule_of_bigbird(causal):
    heads = zoo.RandomBlockHeads(3, num_random_blocks=4, seed=5)
    table = heads.random_blocks(9, causal)
    counts = np.zeros(9)
    for _, block, drawn in drawn_by(table):
        last = block if causal else 8
        allowed = [b for b in range(1, last) if abs(b - block) > 1]
        assert set(drawn) <= set(allowed)
        assert len(drawn) == len(set(drawn)) == min(4, len(allowed))
        counts[drawn] += 1
    assert np.all(counts[1 : 7 if causal else 8] > 0)
    assert np.any(table[0] != table[1])
    other = zoo.RandomBlockHeads(3, num_random_blocks=4, seed=6)
    assert np.any(other.random_blocks(9, causal) != table)


def test_longer_texts_draw_the_same_blocks_before():
    heads = zoo.RandomBlockHeads(2, num_random_blocks=3)
    tables = [heads.random_blocks(number, True) for number in (8, 30)]
    np.testing.assert_array_equal(tables[0], tables[1][:, :8])
