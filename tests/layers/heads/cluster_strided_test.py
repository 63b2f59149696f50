"""Tests of cluster-strided heads; `oracle_test` has their rule."""

import numpy as np
import pytest

from routing_tf.layers import ClusterStridedHeads
from routing_tf.models.release import heads as release_heads
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns

BATCH, HEADS, LENGTH, DIM, CLUSTERS = 2, 2, 12, 6, 3


def built_group(kind=ClusterStridedHeads, **options):
    options = {"attention_window": 5, "decay": 0.9, **options}
    options = {"embeddings_initializer": "zeros", **options}
    group = kind(HEADS, CLUSTERS, **options)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    helpers.randomize(group)
    return group


def tokens(memory_length=LENGTH):
    lengths = (LENGTH, memory_length, memory_length)
    return [
        helpers.normal(BATCH, HEADS, size, DIM, seed=seed)
        for seed, size in enumerate(lengths)
    ]


def routes(group, query, key, query_real, real):
    centroids = golden_cases.to_numpy(group.kmeans.centroids)
    streams = (helpers.normalize(query), helpers.normalize(key))
    masks = (query_real, real)

    def of_row(b, h):
        return [
            [
                patterns.every_nth(
                    stream[b, h] @ centroid, mask[b], group.attention_window
                )
                for stream, mask in zip(streams, masks, strict=True)
            ]
            for centroid in centroids[h]
        ]

    return of_row


def test_members_may_be_those_of_the_whole_sequence_as_in_the_release():
    group = built_group(
        release_heads.TrainedClusterStridedHeads,
        max_relative_position=2,
    )
    query, _, value = tokens()
    mask = real = helpers.mask_with_a_hole(LENGTH, 11, 4)
    bias = helpers.normal(BATCH, LENGTH, seed=3)

    output, _ = golden_cases.run(
        group,
        query,
        None,
        value,
        query_mask=mask,
        value_mask=mask,
        token_bias=bias,
        use_causal_mask=True,
    )

    expected = helpers.clustered_attention(
        group, query, query, value, routes(group, query, query, real, real), True, bias
    )
    everywhere = np.broadcast_to(real[:, None], (BATCH, HEADS, LENGTH))
    golden_cases.assert_close(output[everywhere], expected[everywhere], 1e-5)


@pytest.mark.parametrize("memory_length", [7, 20])
def test_queries_may_compete_for_a_memory_as_in_the_release(memory_length):
    group = built_group(release_heads.TrainedClusterStridedHeads, attention_window=4)
    query, key, value = tokens(memory_length)
    query_real = helpers.tail_mask(LENGTH, 12, 9)
    real = helpers.tail_mask(memory_length, memory_length, 6)

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
        group, query, key, value, routes(group, query, key, query_real, real)
    )
    everywhere = np.broadcast_to(query_real[:, None], (BATCH, HEADS, LENGTH))
    golden_cases.assert_close(output[everywhere], expected[everywhere], 1e-5)


def test_centroids_move_in_training_only():
    group = built_group(commitment_weight=0.5)
    query, _, value = tokens()
    before = group.get_weights()
    plain, losses = golden_cases.run(group, query, None, value, training=False)
    for weight, old in zip(group.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, old)
    trained, losses = golden_cases.run(group, query, None, value, training=True)
    # Routing uses the centroids from before the step.
    golden_cases.assert_close(trained, plain, 1e-6)
    assert len(losses) == 1 and losses[0] > 0
    moved = [np.any(a != b) for a, b in zip(group.get_weights(), before, strict=True)]
    assert moved == [True, True, True]
    assert group.trainable_weights == []


def test_refuses_causal_mask_over_two_lengths():
    with pytest.raises(ValueError, match="use_causal_mask.*lengths 12 and 7"):
        built_group()(*tokens(memory_length=7), use_causal_mask=True)
