"""Centroids that each sequence has for itself: k-means over the keys of its prompt."""

import dataclasses

import keras
from keras import ops

from routing_tf.layers.attention.stepping import in_pieces
from routing_tf.layers.routing.online_kmeans import normalize

NUM_ITERATIONS = 10


def found_in(keys, mask, num_clusters):
    """Returns the centroids of each sequence, by spherical k-means.

    Args:
        keys: `<float>[batch, heads, length, dim]`, not turned.
        mask: `<bool>[batch, 1, length]`, True for real tokens; None for all.
        num_clusters: number of centroids of a head.

    Returns:
        `<float32>[batch, heads, num_clusters, dim]`.
    """
    keys = normalize(keys)
    batch, _, length = ops.shape(keys)[:3]
    if mask is None:
        mask = ops.ones((batch, 1, length), "bool")
    real = ops.cast(mask, "float32")
    # Spread evenly over the real tokens, wherever the padding is.
    total = ops.sum(real, axis=-1, keepdims=True)
    wanted = (ops.arange(num_clusters, dtype="float32") + 0.5) / num_clusters * total
    ranks = ops.cumsum(real, axis=-1)
    places = ops.sum(
        ops.cast(ranks[:, :, None] <= ops.floor(wanted)[..., None], "int32"), axis=-1
    )
    places = ops.minimum(places, length - 1)[..., None]
    centroids = ops.take_along_axis(
        keys, ops.broadcast_to(places, (*ops.shape(keys)[:2], num_clusters, 1)), axis=2
    )
    for _ in range(NUM_ITERATIONS):
        scores = ops.matmul(keys, ops.swapaxes(centroids, 2, 3))
        own = ops.one_hot(ops.argmax(scores, axis=-1), num_clusters, dtype="float32")
        sums = ops.matmul(ops.swapaxes(own * real[..., None], 2, 3), keys)
        is_empty = ops.all(sums == 0, axis=-1, keepdims=True)
        centroids = ops.where(is_empty, centroids, normalize(sums))
    return centroids


def attend(group, inputs):
    """Attends with a whole sequence, by the centroids of all its keys."""
    centroids = _of(group, inputs)
    return _by_row(centroids, inputs, lambda row, _: group(inputs=row), group)


def start(group, cache, inputs):
    """Attends with a prompt, whose centroids then stay; see `HeadGroup.start`."""
    centroids = _of(group, inputs)

    def start_row(row, cache):
        return group.start(cache, row)

    outputs, cache = _by_row(centroids, inputs, start_row, group, cache["tokens"])
    return outputs, {"tokens": cache, "centroids": centroids}


def step(group, cache, inputs, index):
    """Attends with tokens after those in a cache; see `HeadGroup.step`."""
    index, centroids = ops.cast(index, "int32"), cache["centroids"]

    def step_row(row, cache):
        return in_pieces(group, "tokens", cache, row, index)

    outputs, cache = _by_row(centroids, inputs, step_row, group, cache["tokens"])
    return outputs, {"tokens": cache, "centroids": centroids}


def make_cache(group, batch_size, max_length):
    """Returns an empty cache; see `HeadGroup.make_cache`."""
    return {
        "tokens": group.make_cache(batch_size, max_length),
        "centroids": ops.zeros((batch_size, *group.kmeans.centroids.shape)),
    }


def _of(group, inputs):
    return found_in(inputs.key, inputs.key_mask, group.num_clusters)


def _by_row(centroids, inputs, function, group, cache=None):
    """Calls a function for each sequence, with its own centroids in the group."""
    batch = inputs.query.shape[0]
    if batch is None:
        raise ValueError(
            '`centroids="sequence"` needs a known number of sequences. Received: a '
            "batch of unknown size. Call the model on tensors of known shapes"
        )
    # In a scope, variables without a value would be those of no scope.
    values = [(x, ops.convert_to_tensor(x)) for x in group.variables]
    results = []
    for row in range(batch):
        of_row = cache and keras.tree.map_structure(
            lambda x, row=row: x[row : row + 1], cache
        )
        own = [(group.kmeans.centroids, centroids[row])]
        with keras.StatelessScope(state_mapping=values + own):
            results.append(function(_row(row, inputs), of_row))
    return keras.tree.map_structure(lambda *x: ops.concatenate(x, axis=0), *results)


def _row(row, inputs):
    """Returns the `HeadInputs` of one sequence."""
    names = ("query", "key", "value", "query_mask", "key_mask", "value_mask", "source")
    parts = {name: getattr(inputs, name) for name in names}
    parts = {
        name: x if x is None or x.shape[0] == 1 else x[row : row + 1]
        for name, x in parts.items()
    }
    return dataclasses.replace(inputs, **parts)
