"""Tests of fixed heads; `oracle_test` has their rule."""

import numpy as np
import pytest

from routing_tf.layers import FixedHeads
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, DIM = 2, 4, 6


def built_group(block_shape=4, num_summary_columns=2, length=12, **options):
    group = FixedHeads(HEADS, block_shape, num_summary_columns, **options)
    group.build(*[(BATCH, HEADS, length, DIM)] * 3)
    helpers.randomize(group)
    return group


def tokens(length):
    return [helpers.normal(BATCH, HEADS, length, DIM, seed=i) for i in range(3)]


def test_without_an_earlier_summary_the_output_is_zero():
    group = built_group(arrangement="separate")
    output, _ = golden_cases.run(group, *tokens(12), use_causal_mask=True)
    # The summary of the first block starts at its third token.
    assert np.all(output[:, 2:, :2] == 0.0)
    assert np.all(output[:, :2, :2] != 0.0) and np.all(output[:, :, 2:] != 0.0)


def test_refuses_half_of_an_odd_number_of_heads():
    with pytest.raises(ValueError, match="`num_heads`.*even.*Received: num_heads=3"):
        FixedHeads(3, arrangement="separate")


@pytest.mark.parametrize("causal", [False, True])
def test_refuses_memory_of_another_length(causal):
    query, key, value = tokens(12)
    with pytest.raises(ValueError, match="(?s)same length.*lengths 12 and 9"):
        built_group()(query, key[:, :, :9], value[:, :, :9], use_causal_mask=causal)
