"""Tests of relative positions, against the tensor that is never built."""

import numpy as np
import pytest
from keras import ops

from routing_tf.layers import RelativePosition
from routing_tf.layers.relative_position import distances_to_keys
from routing_tf.layers.relative_position import keys_to_distances
from tests import golden_cases
from tests.layers import helpers

KEY_DIM, VALUE_DIM = 6, 5
CASES = pytest.mark.parametrize(
    "num_queries, num_keys, offset, limit",
    [(4, 4, 0, 2), (4, 12, 4, 3), (3, 8, 5, 20), (1, 5, 0, 1), (5, 1, 0, 2)],
)


def built_layer(limit):
    layer = RelativePosition(limit, embeddings_initializer="zeros")
    layer.build((2, 3, 4, KEY_DIM), (2, 3, 4, VALUE_DIM))
    helpers.randomize(layer)
    return layer


def vectors(table, num_queries, num_keys, offset, limit):
    """The naive `(queries, keys, dim)` tensor."""
    i, j = np.ogrid[:num_queries, :num_keys]
    distances = np.clip(j - offset - i, -limit, limit)
    return golden_cases.to_numpy(table)[distances + limit]


@CASES
def test_key_logits(num_queries, num_keys, offset, limit):
    layer = built_layer(limit)
    query = helpers.normal(2, 3, num_queries, KEY_DIM)
    logits = layer.key_logits(ops.convert_to_tensor(query), num_keys, offset)
    naive = vectors(layer.key_embeddings, num_queries, num_keys, offset, limit)
    expected = np.einsum("bhid,ijd->bhij", query, naive)
    golden_cases.assert_close(golden_cases.to_numpy(logits), expected, 1e-5)


@CASES
def test_value_sums(num_queries, num_keys, offset, limit):
    layer = built_layer(limit)
    weights = helpers.normal(2, 3, num_queries, num_keys)
    sums = layer.value_sums(ops.convert_to_tensor(weights), offset)
    naive = vectors(layer.value_embeddings, num_queries, num_keys, offset, limit)
    expected = np.einsum("bhij,ijd->bhid", weights, naive)
    golden_cases.assert_close(golden_cases.to_numpy(sums), expected, 1e-5)


def some_distances(*shape):
    """Distances of any order, many of them beyond the limit."""
    return np.random.default_rng(5).integers(-6, 7, size=shape).astype("int32")


@pytest.mark.parametrize(
    "query_axes, axes, limit",
    [((2, 3), (2, 3), 2), ((2, 3), (1, 3), 20), ((2, 1), (2, 3), 2)],
)
def test_key_logits_at_distances(query_axes, axes, limit):
    """The leading axes are broadcast either way."""
    layer = built_layer(limit)
    query, distances = (
        helpers.normal(*query_axes, 4, KEY_DIM),
        some_distances(*axes, 4, 7),
    )
    logits = layer.key_logits_at(ops.convert_to_tensor(query), distances)
    table = golden_cases.to_numpy(layer.key_embeddings)
    naive = table[np.clip(distances, -limit, limit) + limit]
    expected = np.einsum("...id,...ijd->...ij", query, naive)
    assert logits.shape == expected.shape == (2, 3, 4, 7)
    golden_cases.assert_close(golden_cases.to_numpy(logits), expected, 1e-5)


@pytest.mark.parametrize(
    "shape, limit", [((2, 3, 4, 7), 2), ((2, 1, 4, 7), 20), ((3, 1, 7), 2)]
)
def test_value_sums_at_distances(shape, limit):
    layer = built_layer(limit)
    weights, distances = helpers.normal(2, 3, 4, 7), some_distances(*shape)
    sums = layer.value_sums_at(ops.convert_to_tensor(weights), distances)
    distances = np.broadcast_to(distances, weights.shape)
    table = golden_cases.to_numpy(layer.value_embeddings)
    naive = table[np.clip(distances, -limit, limit) + limit]
    expected = np.einsum("bhij,bhijd->bhid", weights, naive)
    golden_cases.assert_close(golden_cases.to_numpy(sums), expected, 1e-5)


def test_distances_in_the_order_of_slots_give_the_same_twice():
    layer = built_layer(3)
    query, weights = helpers.normal(2, 4, KEY_DIM), helpers.normal(2, 4, 12)
    i, j = np.ogrid[:4, :12]
    distances = (j - 5 - i).astype("int32")
    pairs = [
        (layer.key_logits(query, 12, 5), layer.key_logits_at(query, distances)),
        (layer.value_sums(weights, 5), layer.value_sums_at(weights, distances)),
    ]
    for in_order, at_distances in golden_cases.to_numpy(pairs):
        golden_cases.assert_close(at_distances, in_order, 1e-5)


@pytest.mark.parametrize("columns", [5, 7])
def test_shifts_are_transposes(columns):
    i, j = np.ogrid[:3, :4]
    exists = (j + 3 - i < columns).astype("float32")
    weights = helpers.normal(2, 3, 4) * exists
    shifted = golden_cases.to_numpy(keys_to_distances(weights, columns))
    assert shifted.shape == (2, 3, columns)
    for i, j in zip(*np.nonzero(exists)):
        np.testing.assert_array_equal(shifted[:, i, j + 3 - i], weights[:, i, j])
    assert np.count_nonzero(shifted) == np.count_nonzero(weights)
    back = golden_cases.to_numpy(distances_to_keys(shifted, num_keys=4))
    np.testing.assert_array_equal(back * exists, weights)


@CASES
def test_causal_results_are_those_of_all_keys(num_queries, num_keys, offset, limit):
    layer = built_layer(limit)
    visible = np.tri(num_queries, num_keys, num_keys - num_queries, dtype="float32")
    query = ops.convert_to_tensor(helpers.normal(2, 3, num_queries, KEY_DIM))
    weights = ops.convert_to_tensor(helpers.normal(2, 3, *visible.shape) * visible)
    all_keys, causal = (
        golden_cases.to_numpy(
            (
                layer.key_logits(query, num_keys, offset, is_causal),
                layer.value_sums(weights, offset, is_causal),
            )
        )
        for is_causal in (False, True)
    )
    golden_cases.assert_close(causal[0] * visible, all_keys[0] * visible, 1e-5)
    golden_cases.assert_close(causal[1], all_keys[1], 1e-5)


def test_tables_and_settings():
    helpers.assert_keeps_settings(RelativePosition(3, embeddings_initializer="ones"))
    for received in (0, -1, 2.5, None, True):
        with pytest.raises(ValueError) as error:
            RelativePosition(received)
        assert f"Received: max_relative_position={received!r}" in str(error.value)
    found = {(w.name, tuple(w.shape), w.trainable) for w in built_layer(3).weights}
    assert found == {
        ("key_embeddings", (7, KEY_DIM), True),
        ("value_embeddings", (7, VALUE_DIM), True),
    }


@pytest.mark.parametrize(
    "name, limit, num_queries, num_keys, row",
    [
        ("relative_matrix_6_6", 4, 6, 6, slice(None)),
        ("relative_matrix_5_9", 3, 5, 9, slice(None)),
        ("relative_matrix_decode_1_8_step_6_block4", 5, 4, 8, slice(2, 3)),
    ],
)
def test_distances_equal_release(name, limit, num_queries, num_keys, row):
    """The number of the vector of each pair, read off a table of row numbers."""
    case = golden_cases.load("pieces/block_layout.npz")
    relative = RelativePosition(limit, embeddings_initializer="zeros")
    relative.build((num_queries, 1), (num_keys, 1))
    rows = np.arange(2 * limit + 1, dtype="float32")
    relative.key_embeddings.assign(rows[:, None])
    query = np.ones((num_queries, 1), "float32")
    logits = relative.key_logits(query, num_keys, offset=num_keys - num_queries)
    np.testing.assert_array_equal(
        golden_cases.to_numpy(logits)[row], case[f"out/{name}"]
    )
