"""Tests of clustered attention; `every_head_test` has what all kinds share."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import HEADS
from tests.zoo.dense_blocks import assert_follows
from tests.zoo.dense_blocks import softmax


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


def expected_output(group, query, key, value, real, bias, query_real):
    """The equations of the paper, for one cluster after the other."""
    projections, size = golden_cases.to_numpy(group.projections), query.shape[-1]
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h in np.ndindex(query.shape[:2]):
        asks, seen = np.flatnonzero(query_real[b]), np.flatnonzero(real[b])
        products = query[b, h, asks] @ projections[h, :size] * np.sqrt(size)
        if group.hash_bias:
            products += projections[h, size]
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
    options = {"num_bits": 7, "num_iterations": 3, "hash_bias": clusters == 3}
    group = zoo.ClusteredQueryHeads(HEADS, clusters, keys, **options)
    query_real = helpers.mask_with_a_hole(length, length - 2, length)
    query_real[1, :2] = False
    real = query_real
    if length != memory_length:
        real = helpers.mask_with_a_hole(memory_length, memory_length, 2)
    about = {"real": real, "query_real": query_real, "has_bias": True}
    assert_follows(expected_output, group, length, memory_length, **about)


def test_projections_stay_as_they_are_drawn():
    group, same, other = (
        helpers.built(zoo.ClusteredQueryHeads(HEADS, 2, 2, seed=seed), is_random=False)
        for seed in (3, 3, 4)
    )
    drawn = [golden_cases.to_numpy(g.projections) for g in (group, same, other)]
    assert not group.trainable_weights
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.all(drawn[0] != drawn[2])
