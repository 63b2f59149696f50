"""Tests of hashed heads; `oracle_test` has their rule."""

import numpy as np
import pytest

from routing_tf.layers import HashedHeads
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns

BATCH, HEADS, LENGTH, DIM = 2, 2, 12, 6


def built_group(num_buckets=4, randomize=True, kind=HashedHeads, **options):
    options = {"attention_window": 5, "embeddings_initializer": "zeros", **options}
    group = kind(HEADS, num_buckets, **options)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    if randomize:
        helpers.randomize(group)
    return group


def tokens(memory_length=LENGTH):
    lengths = (LENGTH, memory_length, memory_length)
    return [
        helpers.normal(BATCH, HEADS, size, DIM, seed=seed)
        for seed, size in enumerate(lengths)
    ]


def bucket_numbers(group, stream):
    """The signs of the products with the projections, read as binary digits."""
    projections = golden_cases.to_numpy(group.projections)
    products = np.einsum("bhld,hnd->bhln", helpers.normalize(stream), projections)
    return patterns.bucket_numbers(products)


def members_of(group, query, value_dim=LENGTH):
    """Which tokens see which, `<bool>[batch, heads, length, length]`."""
    everyone = np.broadcast_to(
        np.eye(value_dim, dtype="float32"), (BATCH, HEADS, LENGTH, value_dim)
    )
    output, _ = golden_cases.run(group, query, None, everyone)
    return output > 0


def test_a_full_bucket_keeps_its_first_tokens_and_a_small_one_has_no_strangers():
    group = built_group(2, attention_window=4)
    projection = np.ones((1, DIM)) * [[1, -1] * (DIM // 2)]
    group.projections.assign(np.broadcast_to(projection, (HEADS, 1, DIM)))
    query = np.broadcast_to(-projection, (BATCH, HEADS, LENGTH, DIM)).copy()
    query[:, :, [2, 5]] *= -1  # two in one bucket, ten in the other
    sees = members_of(group, query.astype("float32"))
    expected = np.zeros((LENGTH, LENGTH), "bool")
    expected[np.ix_([2, 5], [2, 5])] = True
    expected[np.ix_([0, 1, 3, 4], [0, 1, 3, 4])] = True
    np.testing.assert_array_equal(sees, np.broadcast_to(expected, sees.shape))


@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_bucket_numbers_equal_the_release(size):
    case = golden_cases.load("pieces/hash_items_fn.npz")
    group = HashedHeads(2, num_buckets=size, attention_window=4)
    group.build(*[(2, 2, 10, 6)] * 3)
    group.projections.assign(case[f"var/hash_{size}/projection_tensors"])
    buckets = golden_cases.to_numpy(group.buckets(case["in/items"]))
    np.testing.assert_array_equal(buckets, case[f"out/bucket_size_{size}"])


def test_projections_are_orthogonal_and_never_move():
    group = built_group(17, randomize=False, dtype="mixed_bfloat16")
    before = golden_cases.to_numpy(group.projections)
    assert group.num_bits == 4 and before.shape == (HEADS, 4, DIM)
    products = before @ np.swapaxes(before, 1, 2)
    np.testing.assert_allclose(products, [np.eye(4)] * HEADS, atol=1e-5)
    assert np.abs(before[0] - before[1]).max() > 0.1
    assert group.trainable_weights == []
    assert group.projections.dtype == "float32"

    query, _, value = tokens()
    _, losses = golden_cases.run(group, query, None, value, training=True)

    np.testing.assert_array_equal(golden_cases.to_numpy(group.projections), before)
    assert losses == []
