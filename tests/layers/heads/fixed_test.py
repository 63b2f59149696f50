"""Tests of fixed heads; `oracle_test` has their rule."""

import numpy as np

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
