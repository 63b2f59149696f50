"""Tests of random heads; `oracle_test` has their rule."""

import numpy as np
import pytest

from routing_tf.layers import RandomHeads
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns

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


def routes(group, query_real, real):
    """The clusters of a batch row and a head: the largest scores, whatever the text."""

    def of_row(b, h):
        clusters = []
        for cluster in range(CLUSTERS):
            pair = [
                patterns.best(
                    group.random_scores(mask.shape[1])[0, h, :, cluster],
                    mask[b],
                    group.attention_window,
                )
                for mask in (query_real, real)
            ]
            clusters.append(pair)
        return clusters

    return of_row


@pytest.mark.parametrize("shared", [False, True])
def test_members_may_be_those_of_the_whole_sequence_as_in_the_release(shared):
    group = built_group(
        max_relative_position=2,
        share_query_key=shared,
        compatibility={"members_of_whole_sequence": True},
    )
    query, key, value = tokens()
    mask = real = helpers.mask_with_a_hole(LENGTH, 11, 4)
    bias = helpers.normal(BATCH, LENGTH, seed=3)

    output, _ = golden_cases.run(
        group,
        query,
        None if shared else key,
        value,
        query_mask=mask,
        value_mask=mask,
        token_bias=bias,
        use_causal_mask=True,
    )

    expected = helpers.clustered_attention(
        group,
        query,
        query if shared else key,
        value,
        routes(group, real, real),
        True,
        bias,
    )
    everywhere = np.broadcast_to(real[:, None], (BATCH, HEADS, LENGTH))
    golden_cases.assert_close(output[everywhere], expected[everywhere], 1e-5)


def test_queries_may_compete_for_a_memory_as_in_the_release():
    group = built_group(attention_window=6, compatibility={"queries_compete": True})
    query, key, value = tokens(memory_length=8)
    query_real, real = helpers.tail_mask(LENGTH, 12, 9), helpers.tail_mask(8, 8, 5)

    output, _ = golden_cases.run(
        group,
        query,
        key,
        value,
        query_mask=query_real,
        value_mask=real,
        is_cross_attention=True,
    )

    expected = helpers.clustered_attention(
        group, query, key, value, routes(group, query_real, real)
    )
    everywhere = np.broadcast_to(query_real[:, None], (BATCH, HEADS, LENGTH))
    golden_cases.assert_close(output[everywhere], expected[everywhere], 1e-5)


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


def test_has_no_state_and_no_loss():
    group = built_group()
    query, _, value = tokens()
    _, losses = golden_cases.run(group, query, None, value, training=True)
    assert group.weights == [] and losses == []
