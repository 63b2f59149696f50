"""Tests of full heads; `oracle_test` has their rule."""

import pytest

from routing_tf.layers import FullHeads
from tests.layers import helpers

BATCH, HEADS, LENGTH, MEMORY, DIM = 2, 2, 10, 7, 6


def built_group(**options):
    group = FullHeads(HEADS, embeddings_initializer="zeros", **options)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    helpers.randomize(group)
    return group


def tokens(length=LENGTH):
    return [helpers.normal(BATCH, HEADS, length, DIM, seed=i) for i in range(3)]


def test_refuses_causal_mask_over_two_lengths():
    query = tokens()[0]
    key, value = tokens(MEMORY)[1:]
    with pytest.raises(ValueError, match="use_causal_mask.*lengths 10 and 7"):
        built_group()(query, key, value, use_causal_mask=True)
