"""Tests of the order of tokens by cluster, in chunks, against loops in NumPy."""

import functools

import keras
import numpy as np
import pytest

from routing_tf.layers.routing.cluster_order import ClusterOrder
from routing_tf.layers.routing.cluster_order import chunk_size_for
from routing_tf.layers.routing.cluster_order import sort_by_cluster
from routing_tf.layers.support.stated_gradients import are_stated
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS = 3, 2
ON_JAX = keras.backend.backend() == "jax"
CASES = pytest.mark.parametrize(
    "length, num_clusters, chunk_size",
    [
        (26, 4, 3),
        (13, 3, 1),
        (12, 2, 16),  # a chunk is longer than the text
        (5, 9, 2),  # more clusters than tokens
        (1, 1, 4),
    ],
)


def some_clusters(length, num_clusters):
    """Clusters of all sizes, and each row and head has other ones that are empty."""
    random = np.random.default_rng(length)
    clusters = random.integers(num_clusters, size=(BATCH, HEADS, length))
    clusters[0, 1] = num_clusters - 1  # one has everything
    clusters[1, 0] = 0
    clusters[1, 1] = random.choice([0, num_clusters - 1], length)
    clusters[2, 0] = np.minimum(clusters[2, 0], 1)
    clusters[2, 1] = np.sort(clusters[2, 1])[::-1]
    return clusters.astype("int32")


def slots_by_hand(clusters, num_clusters, chunk_size):
    """The slot of each token: clusters one after the other, each in chunks."""
    slots, chunk = np.zeros(clusters.shape, "int32"), 0
    for cluster in range(num_clusters):
        (tokens,) = np.nonzero(clusters == cluster)
        slots[tokens] = chunk * chunk_size + np.arange(len(tokens))
        chunk += -(-len(tokens) // chunk_size)
    return slots


def on_order(clusters, num_clusters, chunk_size, function, *arrays):
    """Calls a function of the order and of arrays, all compiled at once."""

    def call(clusters, *tensors):
        return function(ClusterOrder(clusters, num_clusters, chunk_size), *tensors)

    return helpers.compiled(call, jit_compile=ON_JAX or None)(clusters, *arrays)


@CASES
def test_every_cluster_starts_a_chunk(length, num_clusters, chunk_size):
    clusters = some_clusters(length, num_clusters)
    slots, tokens, of_chunk, rank_of_chunk, ranks = on_order(
        clusters,
        num_clusters,
        chunk_size,
        lambda order: [
            order.slots,
            order.tokens,
            order.cluster_of_chunk,
            order.rank_of_chunk,
            order.ranks(),
        ],
    )
    chunks = tokens.shape[2]
    assert tokens.shape == ranks.shape == (BATCH, HEADS, chunks, chunk_size)
    assert of_chunk.shape == rank_of_chunk.shape == (BATCH, HEADS, chunks)
    # Enough where each cluster has one token in its last chunk, and hardly more.
    alone = min(length, num_clusters)
    assert 0 <= chunks - alone - (length - alone) // chunk_size <= 1
    # They are read where no token is, too.
    assert tokens.min() >= 0 and tokens.max() < length
    assert of_chunk.min() >= 0 and of_chunk.max() < num_clusters
    assert rank_of_chunk.min() >= 0
    for b, h in np.ndindex(BATCH, HEADS):
        own = clusters[b, h]
        expected = slots_by_hand(own, num_clusters, chunk_size)
        np.testing.assert_array_equal(slots[b, h], expected)
        assert slots[b, h].max() < chunks * chunk_size
        chunk, slot = np.divmod(expected, chunk_size)
        np.testing.assert_array_equal(tokens[b, h, chunk, slot], np.arange(length))
        np.testing.assert_array_equal(of_chunk[b, h, chunk], own)
        for i in range(length):
            rank = np.sum(own[:i] == own[i])
            assert ranks[b, h, chunk[i], slot[i]] == rank
            assert rank_of_chunk[b, h, chunk[i]] == rank // chunk_size


@CASES
def test_restore_undoes_arrange(length, num_clusters, chunk_size):
    x = helpers.normal(BATCH, HEADS, length, 3)
    slots, arranged, restored = on_order(
        some_clusters(length, num_clusters),
        num_clusters,
        chunk_size,
        lambda order, x: [
            order.slots,
            order.arrange(x),
            order.restore(order.arrange(x)),
        ],
        x,
    )
    assert arranged.shape[3:] == (chunk_size, 3)
    flat = arranged.reshape(BATCH, HEADS, -1, 3)
    np.testing.assert_array_equal(np.take_along_axis(flat, slots[..., None], 2), x)
    np.testing.assert_array_equal(restored, x)


@CASES
def test_gradients_go_where_tokens_stand(length, num_clusters, chunk_size):
    clusters = some_clusters(length, num_clusters)
    order = ClusterOrder(
        keras.ops.convert_to_tensor(clusters), num_clusters, chunk_size
    )
    slots = keras.ops.convert_to_numpy(order.slots)[..., None]
    shape = (*order.tokens.shape, 3)
    of_slots, of_tokens = helpers.normal(*shape), helpers.normal(*clusters.shape, 3)
    if not are_stated():  # The backend's gradient has what comes back to empty slots.
        of_slots *= keras.ops.convert_to_numpy(order.is_filled)[..., None]

    class Both(keras.layers.Layer):
        def call(self, x, y):
            return order.arrange(x), order.restore(y)

    found = golden_cases.gradients(
        Both(),
        lambda outputs, losses: (
            keras.ops.sum(keras.ops.multiply(outputs[0], of_slots))
            + keras.ops.sum(keras.ops.multiply(outputs[1], of_tokens))
        ),
        {"x": helpers.normal(*clusters.shape, 3), "y": helpers.normal(*shape)},
        wrt=("x", "y"),
    ).inputs
    flat = of_slots.reshape(BATCH, HEADS, -1, 3)
    expected = np.take_along_axis(flat, slots, axis=2)
    np.testing.assert_array_equal(found["x"], expected)
    # What stands in empty slots has none.
    expected = np.zeros_like(flat)
    np.put_along_axis(expected, slots, of_tokens, axis=2)
    np.testing.assert_array_equal(found["y"], expected.reshape(shape))


@CASES
def test_windows_hold_the_last_tokens_of_the_own_cluster(
    length, num_clusters, chunk_size
):
    clusters = some_clusters(length, num_clusters)
    windows = (1, chunk_size, chunk_size + 1, 3 * chunk_size + 2, 100)
    slots, *of_windows = on_order(
        clusters,
        num_clusters,
        chunk_size,
        lambda order: [
            order.slots,
            *(
                [
                    order.windows(order.tokens[..., None], window)[..., 0],
                    order.window_mask(window),
                    order.window_offset(window),
                ]
                for window in windows
            ),
        ],
    )
    for window, (tokens, mask, offset) in zip(windows, of_windows, strict=True):
        chunks, size = tokens.shape[2:]
        assert size == offset + chunk_size
        assert mask.shape == (BATCH, HEADS, chunks, chunk_size, size)
        # No more chunks than needed.
        assert offset % chunk_size == 0 and offset - chunk_size < window - 1 <= offset
        for b, h, i in np.ndindex(clusters.shape):
            chunk, slot = np.divmod(slots[b, h, i], chunk_size)
            (seen,) = np.nonzero(mask[b, h, chunk, slot])
            (own,) = np.nonzero(clusters[b, h, : i + 1] == clusters[b, h, i])
            np.testing.assert_array_equal(tokens[b, h, chunk, seen], own[-window:])
            # Distances in slots are distances in ranks.
            distances = np.arange(1 - len(own), 1)[-window:]
            np.testing.assert_array_equal(seen - offset - slot, distances)


def test_places_inside_a_cluster_do_not_depend_on_later_tokens():
    cut, chunk_size = 15, 3
    first = some_clusters(26, 4)
    second = first.copy()
    second[..., cut:] = 0
    places = []
    for clusters in (first, second):
        slots, ranks = on_order(
            clusters, 4, chunk_size, lambda order: [order.slots, order.rank_of_chunk]
        )
        chunk, slot = np.divmod(slots[..., :cut], chunk_size)
        places.append([slot, np.take_along_axis(ranks, chunk, axis=-1)])
    np.testing.assert_array_equal(*places)


@pytest.mark.parametrize(
    "window, chunk_size",
    [(1, 1), (3, 3), (16, 16), (17, 16), (64, 16), (65, 17), (128, 32), (130, 33)],
)
def test_chunks_are_about_a_quarter_of_the_window(window, chunk_size):
    assert chunk_size_for(window) == chunk_size


def test_keys_that_overflow_are_refused():
    clusters = np.zeros((1, 1, 2**20), "int32")
    for sort in (functools.partial(ClusterOrder, chunk_size=16), sort_by_cluster):
        with pytest.raises(ValueError, match="2048 clusters"):
            sort(clusters, num_clusters=2048)
