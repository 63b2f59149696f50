"""Tests of relative positions; `scaled_dot_product_test` has what they add."""

import numpy as np
import pytest

from routing_tf.layers import RelativePosition
from tests import golden_cases


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
