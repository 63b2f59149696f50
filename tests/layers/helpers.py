"""Attention in plain NumPy, and saving a layer, for the tests of the layers.

The tests start most weights at zero and then `randomize` them: JAX compiles the
random initializers for every shape, which takes longer than the tests themselves.
"""

import inspect
import json

import keras
import numpy as np

from routing_tf.layers import HeadGroup
from tests import golden_cases


def normal(*shape, seed=0):
    """Returns normal random numbers in float32."""
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def tail_mask(length, *lengths):
    """Returns a mask with a row for each of `lengths`, True for that many tokens."""
    return np.arange(length)[None] < np.array(lengths)[:, None]


def randomize(layer, seed=0):
    """Fills all weights with random numbers; those of counts stay positive."""
    random = np.random.default_rng(seed)
    for weight in layer.weights:
        values = random.normal(size=weight.shape).astype("float32")
        weight.assign(np.abs(values) + 1.0 if weight.name == "counts" else values)


def normalize(tokens):
    """Layer normalization of the last axis, without scale and bias, in float64."""
    tokens = np.asarray(tokens).astype("float64")
    centred = tokens - tokens.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)


def dense_attention(query, key, value, mask, bias=0.0, tables=None, distances=None):
    """Softmax attention over all pairs, in float64.

    Args:
        query: scaled queries `[..., length, key_dim]`.
        key: keys `[..., memory length, key_dim]`.
        value: values `[..., memory length, value_dim]`.
        mask: `<bool>[..., length, memory length]`; a query without a key gets zero.
        bias: added to the logits.
        tables: relative position vectors of keys and of values; or None.
        distances: `<int>[..., length, memory length]`, which of the vectors to take.

    Returns:
        Outputs `[..., length, value_dim]` and weights.
    """
    query, key, value = (np.asarray(x, "float64") for x in (query, key, value))
    logits = query @ np.swapaxes(key, -1, -2) + bias
    if tables is not None:
        limit = len(tables[0]) // 2
        key_vectors, value_vectors = (
            np.asarray(table, "float64")[np.clip(distances, -limit, limit) + limit]
            for table in tables
        )
        logits = logits + np.einsum("...id,...ijd->...ij", query, key_vectors)
    mask = np.broadcast_to(mask, logits.shape)
    weights = np.where(mask, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0.0)
    weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    output = weights @ value
    if tables is not None:
        output = output + np.einsum("...ij,...ijd->...id", weights, value_vectors)
    return output, weights


def clustered_attention(
    group, query, key, value, routes, causal=False, bias=None, real=None
):
    """For each cluster dense attention among its members; then the mean.

    Args:
        group: the head group, for its relative position tables.
        query: queries `[batch, heads, length, key_dim]`, not yet normalised.
        key: keys `[batch, heads, memory length, key_dim]`, likewise.
        value: values `[batch, heads, memory length, value_dim]`.
        routes: function of batch row and head that returns the clusters, each as a
            pair of lists of positions: members that ask, and members that are seen.
        causal: whether no query sees a later key.
        bias: `[batch, memory length]`, added to the logits; or None.
        real: `<bool>[batch, memory length]`, False for what is never seen; or None.

    Returns:
        Outputs `[batch, heads, length, value_dim]`.
    """
    query, key = normalize(query), normalize(key)
    tables = relative_tables(group)
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    counts = np.zeros((*query.shape[:3], 1))
    for b, h in np.ndindex(query.shape[:2]):
        for rows, columns in routes(b, h):
            counts[b, h, rows] += 1
            if not len(rows) or not len(columns):
                continue
            # Ranks count from the front of each list.
            row, column = np.ix_(rows, columns)
            sees = (
                (column <= row)
                if causal
                else np.ones((len(rows), len(columns)), "bool")
            )
            if real is not None:
                sees = sees & real[b, columns]
            attended, _ = dense_attention(
                query[b, h, rows],
                key[b, h, columns],
                value[b, h, columns],
                sees,
                0.0 if bias is None else bias[b, columns],
                tables,
                np.arange(len(columns))[None] - np.arange(len(rows))[:, None],
            )
            output[b, h, rows] += attended
    return output / (counts + 1e-2)


def relative_tables(group):
    """Returns the relative position tables of a head group; None without them."""
    relative = group.dot_product.relative_position
    if relative is None:
        return None
    return golden_cases.to_numpy([relative.key_embeddings, relative.value_embeddings])


def assert_keeps_settings(layer):
    """Fails unless the config holds all arguments and makes the same layer."""
    config = layer.get_config()
    classes = [cls for cls in type(layer).__mro__ if issubclass(cls, HeadGroup)]
    for cls in classes or [type(layer)]:
        arguments = set(inspect.signature(cls.__init__).parameters)
        assert arguments - {"self", "args", "kwargs"} <= config.keys()
    assert type(layer).from_config(config).get_config() == config


def assert_survives_saving(layer, folder, *arrays, **options):
    """Fails unless settings, weights and outputs outlive a config and a file."""
    assert_keeps_settings(layer)
    inputs = [keras.Input(array.shape[1:], dtype=array.dtype) for array in arrays]
    model = keras.Model(inputs, layer(*inputs, **options))
    randomize(layer)
    path = folder / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    # A file turns tuples into lists.
    assert as_json(loaded.layers[-1].get_config()) == as_json(layer.get_config())
    for weight, copy in zip(model.weights, loaded.weights, strict=True):
        assert weight.path == copy.path
        assert weight.trainable == copy.trainable
        np.testing.assert_array_equal(*golden_cases.to_numpy([weight, copy]))
    outputs = [golden_cases.run(m, list(arrays))[0] for m in (model, loaded)]
    np.testing.assert_array_equal(*outputs)


def as_json(config):
    return json.loads(json.dumps(config))
