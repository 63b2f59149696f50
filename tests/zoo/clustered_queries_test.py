"""Tests of clustered attention; `compressing_test` has what such kinds share."""

import functools

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import softmax

BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 5, 4


def built_group(clusters, keys, **options):
    return helpers.built(
        zoo.ClusteredQueryHeads(HEADS, clusters, keys, **options),
        KEY_DIM,
        VALUE_DIM,
        False,
    )


tokens = functools.partial(helpers.streams, dim=KEY_DIM, value_dim=VALUE_DIM)


def clusters_of(group, query):
    """Returns the clusters of the real queries of a head, `[length, key_dim]`."""
    bits, number = query > 0, group.num_clusters
    length = len(bits)
    centroids = bits[[c * length // number for c in range(number)]].copy()
    for iteration in range(group.num_iterations + 1):
        distances = (bits[:, None] != centroids).sum(axis=-1)
        cluster = distances.argmin(axis=-1)
        if iteration == group.num_iterations:
            return cluster
        for c in set(cluster):
            members = bits[cluster == c]
            centroids[c] = 2 * members.sum(axis=0) > len(members)


def expected_output(group, query, key, value, query_real, real, bias):
    """The equations of the paper, for one cluster after the other."""
    projections = golden_cases.to_numpy(group.projections)
    output = np.zeros((*query.shape[:3], VALUE_DIM))
    for b, h in np.ndindex(BATCH, HEADS):
        asks, seen = np.flatnonzero(query_real[b]), np.flatnonzero(real[b])
        products = query[b, h, asks] @ projections[h, :KEY_DIM] * np.sqrt(KEY_DIM)
        if group.hash_bias:
            products += projections[h, KEY_DIM]
        cluster = clusters_of(group, products)
        keys, values, biases = key[b, h, seen], value[b, h, seen], bias[b, seen]
        for c in set(cluster):
            members = asks[cluster == c]
            mean = query[b, h, members].mean(axis=0)
            weights = softmax(keys @ mean + biases)
            best = np.argsort(-weights, kind="stable")[: group.num_keys or 0]
            for i in members:
                own = weights.copy()
                if len(best):
                    exact = softmax(keys[best] @ query[b, h, i] + biases[best])
                    own[best] = weights[best].sum() * exact
                output[b, h, i] = own @ values
    return output


@pytest.mark.parametrize(
    "clusters, keys, length, memory_length",
    [(3, 4, 17, 17), (3, None, 17, 17), (1, 40, 9, 9), (30, 3, 8, 13)],
)
def test_equals_the_formula(clusters, keys, length, memory_length):
    biased = clusters == 3
    group = built_group(clusters, keys, num_bits=7, num_iterations=3, hash_bias=biased)
    arrays = tokens(length, memory_length)
    query_real = helpers.mask_with_a_hole(length, length - 2, length)
    query_real[1, :2] = False
    real = query_real
    if length != memory_length:
        real = helpers.mask_with_a_hole(memory_length, memory_length, 2)
    bias = helpers.normal(BATCH, memory_length, seed=5)

    output, _ = golden_cases.run(
        group,
        *arrays,
        query_mask=query_real,
        value_mask=real,
        token_bias=bias,
        is_cross_attention=length != memory_length,
    )

    arrays = [x.astype("float64") for x in arrays]
    expected = expected_output(group, *arrays, query_real, real, bias)
    shown = np.broadcast_to(query_real[:, None], output.shape[:3])
    golden_cases.assert_close(output[shown], expected[shown], 1e-5)


def test_projections_stay_as_they_are_drawn():
    group, same, other = (built_group(2, 2, seed=seed) for seed in (3, 3, 4))
    drawn = [golden_cases.to_numpy(g.projections) for g in (group, same, other)]
    assert not group.trainable_weights
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.all(drawn[0] != drawn[2])
