"""Tests of cluster-strided heads, against dense attention in each cluster."""

import numpy as np
import pytest

from routing_tf.layers import ClusterStridedHeads
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns

BATCH, HEADS, LENGTH, DIM, CLUSTERS = 2, 2, 12, 6, 3


def built_group(**options):
    options = {"attention_window": 5, "decay": 0.9, **options}
    options = {"embeddings_initializer": "zeros", **options}
    group = ClusterStridedHeads(HEADS, CLUSTERS, **options)
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "window, limit, padded",
    [(3, None, False), (5, 2, True), (2, 1, True), (32, None, True)],
)
def test_members_of_the_whole_sequence_equal_dense_attention(
    window, limit, padded, shared, causal
):
    """What the release does with a causal mask, and all do without one."""
    group = built_group(
        attention_window=window,
        max_relative_position=limit,
        share_query_key=shared,
        compatibility={"members_of_whole_sequence": causal},
    )
    query, key, value = tokens()
    key = query if shared else key
    real = np.ones((BATCH, LENGTH), "bool")
    if padded:
        real = helpers.mask_with_a_hole(LENGTH, 11, 4)
    mask = real if padded else None
    bias = helpers.normal(BATCH, LENGTH, seed=3)

    output, _ = golden_cases.run(
        group,
        query,
        None if shared else key,
        value,
        query_mask=mask,
        value_mask=mask,
        token_bias=bias,
        use_causal_mask=causal,
    )

    expected = helpers.clustered_attention(
        group, query, key, value, routes(group, query, key, real, real), causal, bias
    )
    everywhere = np.broadcast_to(real[:, None], (BATCH, HEADS, LENGTH))
    golden_cases.assert_close(output[everywhere], expected[everywhere], 1e-5)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "length, window, limit, padded, block_size",
    [
        (LENGTH, 5, 2, True, 5),
        *(
            pytest.param(*sizes, marks=pytest.mark.thorough)
            for sizes in (
                (LENGTH, 1, None, True, 5),
                (LENGTH, 3, None, False, 1),
                (LENGTH, 32, 30, True, 256),
                (40, 9, 4, True, 17),
            )
        ),
    ],
)
def test_causal_heads_see_the_members_among_the_tokens_up_to_them(
    length, window, limit, padded, block_size, shared
):
    group = built_group(
        attention_window=window,
        max_relative_position=limit,
        share_query_key=shared,
        prefix_block_size=block_size,
    )
    query, key, value = (
        helpers.normal(BATCH, HEADS, length, DIM, seed=seed) for seed in range(3)
    )
    key = query if shared else key
    real = np.ones((BATCH, length), "bool")
    if padded:
        real = helpers.mask_with_a_hole(length, length, length - 5)
    mask = real if padded else None
    bias = helpers.normal(BATCH, length, seed=3)

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

    expected, count = helpers.prefix_attention(
        group,
        query,
        key,
        value,
        real,
        lambda tokens: patterns.evenly_spread(tokens, window),
        bias,
    )
    golden_cases.assert_close(output, expected, 1e-5)
    assert np.all(output[count == 0] == 0.0)


@pytest.mark.parametrize(
    "memory_length, window, limit", [(7, 3, 2), (7, 30, None), (20, 4, 30)]
)
def test_each_query_sees_the_members_of_its_best_cluster_in_another_sequence(
    memory_length, window, limit
):
    group = built_group(attention_window=window, max_relative_position=limit)
    query, key, value = tokens(memory_length)
    query_real = helpers.mask_with_a_hole(LENGTH, 12, 9)
    real = helpers.mask_with_a_hole(memory_length, memory_length, 6)
    bias = helpers.normal(BATCH, memory_length, seed=3)

    output, _ = golden_cases.run(
        group,
        query,
        key,
        value,
        query_mask=query_real,
        value_mask=real,
        token_bias=bias,
        is_cross_attention=True,
    )

    expected = helpers.best_cluster_attention(
        group,
        query,
        key,
        value,
        helpers.best_clusters(group, query),
        routes(group, query, key, query_real, real),
        query_real,
        real,
        bias,
    )
    golden_cases.assert_close(output, expected, 1e-5)
    assert np.all(output.swapaxes(1, 2)[~query_real] == 0.0)


@pytest.mark.parametrize("memory_length", [7, 20])
def test_queries_may_compete_for_a_memory_as_in_the_release(memory_length):
    group = built_group(attention_window=4, compatibility={"queries_compete": True})
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


@pytest.mark.parametrize(
    "name, received",
    [
        ("num_heads", -2),
        ("num_clusters", 0),
        ("attention_window", 0),
        ("attention_window", 2.5),
        ("prefix_block_size", 0),
        ("decay", 1.5),
        ("commitment_weight", -1.0),
        ("update_rule", "sgd"),
        ("dropout", -0.1),
    ],
)
def test_refuses_wrong_arguments(name, received):
    options = {"num_heads": 2, "num_clusters": 2, "attention_window": 4}
    with pytest.raises(ValueError) as error:
        ClusterStridedHeads(**{**options, name: received})
    assert f"`{name}`" in str(error.value)
    assert f"Received: {name}={received!r}" in str(error.value)


def test_refuses_causal_mask_over_two_lengths():
    with pytest.raises(ValueError, match="use_causal_mask.*lengths 12 and 7"):
        built_group()(*tokens(memory_length=7), use_causal_mask=True)
