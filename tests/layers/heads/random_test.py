"""Tests of random heads; `oracle_test` has their rule."""

import numpy as np

from routing_tf.layers import RandomHeads
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, LENGTH, DIM, CLUSTERS = 2, 2, 12, 6, 3


def built_group(**options):
    options = {"attention_window": 5, "embeddings_initializer": "zeros", **options}
    group = RandomHeads(HEADS, CLUSTERS, **options)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    helpers.randomize(group)
    return group


def tokens(memory_length=LENGTH):
    lengths = (LENGTH, memory_length, memory_length)
    return [
        helpers.normal(BATCH, HEADS, size, DIM, seed=seed)
        for seed, size in enumerate(lengths)
    ]


def test_the_seed_decides_the_members():
    query, _, value = tokens()
    outputs = [
        golden_cases.run(built_group(seed=seed), query, None, value, training=True)[0]
        for seed in (3, 3, 4)
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert golden_cases.relative_error(outputs[2], outputs[0]) > 0.1


def test_scores_do_not_depend_on_the_length():
    group = built_group(seed=3)
    short, long = group.random_scores(7), group.random_scores(50)
    assert long.shape == (1, HEADS, 50, CLUSTERS) and long.dtype == "float32"
    np.testing.assert_array_equal(short, long[:, :, :7])
    # All drawn apart, and over the whole range.
    assert len(np.unique(long)) == long.size
    assert long.min() < 0.05 and long.max() > 0.95
