"""Tests of random heads, against dense attention among the drawn members."""

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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "window, limit, padded", [(3, None, False), (5, 2, True), (32, None, True)]
)
def test_members_of_the_whole_sequence_equal_dense_attention(
    window, limit, padded, shared, causal
):
    """What the release would do with a causal mask, and all do without one."""
    group = built_group(
        attention_window=window,
        max_relative_position=limit,
        share_query_key=shared,
        compatibility={"members_of_whole_sequence": causal},
    )
    query, key, value = tokens()
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
        group,
        query,
        query if shared else key,
        value,
        routes(group, real, real),
        causal,
        bias,
    )
    everywhere = np.broadcast_to(real[:, None], (BATCH, HEADS, LENGTH))
    golden_cases.assert_close(output[everywhere], expected[everywhere], 1e-5)


def best_clusters(group, length):
    """The random cluster of each position, the same one in all texts."""
    clusters = group.random_scores(length).argmax(axis=-1)
    return np.broadcast_to(clusters, (BATCH, HEADS, length))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "length, window, limit, padded",
    [
        (LENGTH, 3, 2, False),
        (LENGTH, 5, 30, True),
        (LENGTH, 32, None, True),
        (100, 25, 5, True),  # 2 chunks of 16 before the one of the query
    ],
)
def test_causal_heads_see_the_last_tokens_of_their_random_cluster(
    length, window, limit, padded, shared
):
    group = built_group(
        attention_window=window, max_relative_position=limit, share_query_key=shared
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

    sees, distances = helpers.last_members(best_clusters(group, length), real, window)
    expected = helpers.rule_attention(group, query, key, value, sees, distances, bias)
    golden_cases.assert_close(output, expected, 1e-5)
    assert np.all(output.swapaxes(1, 2)[~real] == 0.0)


@pytest.mark.parametrize(
    "memory_length, window, limit", [(8, 3, 2), (8, 30, None), (20, 6, 30)]
)
def test_each_query_sees_the_members_of_its_random_cluster_in_another_sequence(
    memory_length, window, limit
):
    group = built_group(attention_window=window, max_relative_position=limit)
    query, key, value = tokens(memory_length)
    query_real = helpers.mask_with_a_hole(LENGTH, 12, 9)
    real = helpers.mask_with_a_hole(memory_length, memory_length, 5)
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
        best_clusters(group, LENGTH),
        routes(group, query_real, real),
        query_real,
        real,
        bias,
    )
    golden_cases.assert_close(output, expected, 1e-5)
    assert np.all(output.swapaxes(1, 2)[~query_real] == 0.0)


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


@pytest.mark.parametrize(
    "name, received",
    [
        ("num_heads", 0),
        ("num_clusters", 0),
        ("num_clusters", 2.0),
        ("attention_window", -1),
        ("attention_window", None),
        ("seed", -1),
        ("seed", None),
        ("dropout", -0.1),
    ],
)
def test_refuses_wrong_arguments(name, received):
    options = {"num_heads": 2, "num_clusters": 2, "attention_window": 4}
    with pytest.raises(ValueError) as error:
        RandomHeads(**{**options, name: received})
    assert f"`{name}`" in str(error.value)
    assert f"Received: {name}={received!r}" in str(error.value)
