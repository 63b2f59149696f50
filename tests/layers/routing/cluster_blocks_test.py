"""Tests of clusters whose first tokens stand in blocks, and later ones in chunks."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from routing_tf.layers.routing import last_members
from routing_tf.layers.routing.cluster_blocks import ClusterBlocks
from routing_tf.layers.routing.cluster_blocks import block_size_for
from routing_tf.layers.support import backends
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

BATCH, HEADS, LENGTH, DIM = 2, 3, 70, 6
pytestmark = helpers.only_on("tensorflow", "JAX has static shapes alone")


@pytest.fixture(autouse=True)
def one_cpu(monkeypatch):
    monkeypatch.setattr(keras.distribution, "list_devices", lambda: ["cpu:0"])
    # Small windows would have one chunk alone.
    monkeypatch.setattr(last_members, "chunk_size_for", lambda window: -(-window // 4))


def test_no_sequences_need_no_blocks():
    group = heads()
    nothing = np.zeros((0, HEADS, LENGTH, DIM), "float32")
    call = helpers.compiled(
        lambda x: group(x, x, x, use_causal_mask=True), jit_compile=False
    )
    assert call(nothing).shape == nothing.shape


def test_blocks_have_as_many_tokens_as_equal_clusters_or_a_window():
    assert block_size_for(8192, 32, 256, 64) == 256
    assert block_size_for(8192, 64, 256, 64) == 128
    assert block_size_for(8192, 16, 256, 64) == 256
    assert block_size_for(100, 9, 30, 8) == 16


def heads(cls=layers.RoutedHeads, num_clusters=4, window=12, **options):
    options = {"relative_key_initializer": "random_normal", "name": "heads", **options}
    return helpers.built(cls(HEADS, num_clusters, window, **options))


def inputs(crowded):
    query, key, value = helpers.streams(LENGTH, dim=DIM, heads=HEADS)
    if crowded:  # nearly all tokens lie in one cluster
        query += 5 * helpers.normal(1, HEADS, 1, DIM, seed=4)
    return {"query": query, "key": key, "value": value}


def objective(outputs, losses):
    return ops.sum(ops.sin(ops.cast(outputs, "float32"))) + sum(losses)


PADDING = helpers.mask_with_a_hole(LENGTH, LENGTH, LENGTH - 9)
MASKS = {"query_mask": PADDING, "value_mask": PADDING}
BIAS = {"token_bias": helpers.normal(BATCH, LENGTH, seed=5)}
WAYS = {
    "plain": ({}, {}),
    "shifted with padding": ({"key_shift": 1}, MASKS),
    "relative positions": ({"max_relative_position": 7, "key_shift": 1}, BIAS),
    "other keys": ({"share_query_key": False, "query_cluster": "key"}, MASKS),
    "many clusters": ({"num_clusters": 16, "key_shift": 1}, MASKS),
    "a window in no whole chunks": ({"window": 9}, BIAS),
    "a window of everything": ({"window": 99, "key_shift": 1}, {}),
    "hashed": ({"cls": layers.HashedHeads, "key_shift": 1}, MASKS),
    "entmax": ({"cls": zoo.EntmaxRoutedHeads}, MASKS),
    "half": ({"dtype": "mixed_bfloat16"}, MASKS),
}


@pytest.mark.parametrize(
    "way, crowded",
    kinds.some(
        [(way, bool(i % 2)) for i, way in enumerate(WAYS)],
        [("plain", False), ("shifted with padding", True), ("hashed", True)],
    ),
)
def test_blocks_give_what_static_shapes_give(way, crowded, monkeypatch):
    options, arguments = WAYS[way]
    arguments = {**inputs(crowded), **arguments, "use_causal_mask": True}
    used, found = [], []

    def counted(*arguments):
        used.append(ClusterBlocks(*arguments))
        return used[-1]

    monkeypatch.setattr(last_members, "ClusterBlocks", counted)
    wrt = ["query", "value", *(["token_bias"] if "token_bias" in arguments else [])]
    if not options.get("share_query_key", True):
        wrt.append("key")
    else:
        del arguments["key"]
    for shapes in (backends.static_shapes(), contextlib.nullcontext()):
        group = heads(**options)
        with shapes:
            found.append(golden_cases.gradients(group, objective, arguments, wrt))
    assert len(used) == 1
    static, blocks = found
    assert all(np.any(x) for x in (*static.inputs.values(), *static.variables.values()))
    helpers.assert_same_results(blocks, static, 2e-2 if "dtype" in options else 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"cls": zoo.EntmaxRoutedHeads, "entmax_alpha": "learned"},
        {"dropout": 0.5},
        {"num_clusters": 2},  # of which most members are later ones
    ],
)
def test_heads_that_keep_static_shapes(options, monkeypatch):
    monkeypatch.setattr(last_members, "ClusterBlocks", None)
    output = heads(**options)(**inputs(False), use_causal_mask=True, training=True)
    assert output.shape == (BATCH, HEADS, LENGTH, DIM)


def test_batches_of_any_size_have_static_shapes(monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr(last_members, "ClusterBlocks", None)
    group = heads()
    spec = tf.TensorSpec((None, HEADS, LENGTH, DIM))
    call = tf.function(
        lambda query, value: group(query, None, value, use_causal_mask=True),
        input_signature=[spec, spec],
    )
    query, value = (inputs(False)[name] for name in ("query", "value"))
    assert call(query, value).shape == value.shape
