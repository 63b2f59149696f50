"""Every variable of every preset, against the table beside this file.

`python tools/preset_table.py --variables --output=tests/models/preset_variables.json`
writes the table anew; its diff then shows what has changed.
"""

import json
import math
import pathlib

import pytest

from routing_tf import models
from routing_tf.models.release import hparams_sets
from tests import golden_cases
from tests.models import small_models
from tools import preset_table

PATH = pathlib.Path(__file__).parent / "preset_variables.json"
OF_EACH_KIND = ("pg19_rt_base", "pairs_small", "mnist_local_cluster_strided")
TABLE = json.loads(PATH.read_text())
GOLDEN = json.loads((golden_cases.FOLDER / "pg19/full_size_variables.json").read_text())


def shapes(name, names, *kinds):
    """Returns shapes by name of a preset; `kinds` are `weights` and `state`."""
    found = {}
    for kind in kinds or ("weights", "state"):
        found |= preset_table.expand(TABLE[name][names][kind])
    return found


def sizes(shapes):
    return sorted(math.prod(shape) for shape in shapes.values())


def test_the_table_is_complete_and_as_the_command_writes_it():
    assert TABLE.keys() == set(models.preset_names())
    assert PATH.read_text() == preset_table.to_json(TABLE)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OF_EACH_KIND else small_models.FURTHER)
        for name in models.preset_names()
    ],
)
def test_variables_at_full_size(name):
    assert preset_table.variables(name) == TABLE[name]


@pytest.mark.parametrize("name", hparams_sets.RELEASE_SETS)
def test_each_variable_has_a_name_of_the_release(name):
    for kind in ("weights", "state"):
        keras, release = shapes(name, "keras", kind), shapes(name, "release", kind)
        assert len(keras) == len(release)
        assert sizes(keras) == sizes(release)


def count_by_hand(h):
    """Returns the number of values in all variables of a model, state included."""
    dim, norm = h.hidden_dim, 2 * h.hidden_dim
    feed_forward = {
        "geglu": 3 * dim * h.intermediate_dim,
        "relu": 2 * dim * h.intermediate_dim + h.intermediate_dim + dim,
        "sigmoid_gelu": 2 * dim * h.intermediate_dim + h.intermediate_dim + dim,
    }[h.feed_forward]
    total = count_ends_by_hand(h)
    for layer in range(h.num_layers):
        total += count_attention_by_hand(h, layer) + feed_forward + 2 * norm
        if h.kind == "seq2seq":
            total += count_attention_by_hand(h, layer, cross=True) + norm
    for layer in range(h.num_encoder_layers):
        total += count_attention_by_hand(h, layer, causal=False)
        total += feed_forward + 2 * norm
    return total


def count_ends_by_hand(h):
    """What stands before and behind the blocks."""
    dim, embedding_dim = h.hidden_dim, h.embedding_dim or h.hidden_dim
    final_norm = 2 * dim if h.norm_position == "pre" else 0
    logits = embedding_dim * h.vocabulary_size + h.vocabulary_size
    if h.kind == "image":
        channels, classes = h.num_channels, h.num_classes or 0
        if h.coordinate_embeddings:
            rows = h.vocabulary_size + h.image_height + h.image_width + channels
            return (rows + classes) * dim + logits + final_norm
        rows = max(h.image_height, h.image_width, channels)
        positions = 2 * rows * channels * dim
        embeddings = h.vocabulary_size * channels * dim + classes * dim
        return embeddings + positions + logits + final_norm
    embeddings = h.vocabulary_size * embedding_dim
    if h.coordinate_embeddings:
        rows = -(-h.max_sequence_length // h.local_block_length)
        embeddings += (rows + h.local_block_length) * dim
    if h.kind == "seq2seq":
        embeddings += h.vocabulary_size * dim + final_norm
    if h.embedding_dim:
        embeddings += embedding_dim * dim + dim
    if embedding_dim != dim:
        logits += dim * embedding_dim + embedding_dim
    return embeddings + logits + final_norm


def count_attention_by_hand(h, layer, cross=False, causal=True):
    key_dim = h.key_dim or h.hidden_dim // h.num_heads
    routed, strided = h.num_routed_heads, h.num_cluster_strided_heads
    if layer < h.num_local_only_layers:
        routed = strided = 0
    local = h.num_heads - routed - strided
    # Routed heads share queries and keys in causal self-attention alone.
    shared = 0 if h.project_shared_keys or cross or not causal else routed + strided
    key_heads = h.num_heads - shared
    keys = (h.num_heads + key_heads) * key_dim
    values = h.num_heads * (h.value_dim or key_dim)
    total = (keys + 2 * values) * h.hidden_dim
    total += (keys + values + h.hidden_dim) * h.attention_bias
    total += key_dim**2 if h.shared_head_projection else 0
    if not cross:
        tables = 2 * (2 * h.max_relative_position + 1) * key_dim
        local -= h.num_factorized_heads
        total += tables * (bool(local) and h.local_relative_positions)
        total += tables * (bool(routed) and h.routed_relative_positions)
        total += tables * (bool(strided) and h.cluster_strided_relative_positions)
    centroids = h.num_clusters * (2 * key_dim + 1 + bool(h.balance_rate))
    if h.routing == "hashed":
        centroids = (h.num_clusters.bit_length() - 1) * key_dim
    return total + (routed + strided) * centroids


@pytest.mark.parametrize("name", models.preset_names())
def test_number_of_values(name):
    h = models.preset_hyperparameters(name)
    assert sum(sizes(shapes(name, "keras"))) == count_by_hand(h)


@pytest.mark.parametrize(
    "name, key, number, total",
    [
        ("pg19_rt_base", "released_hparams_json", 345, 490718460),
        ("pg19_local_cluster8k", "preset_pg19_local_cluster8k", 318, 583327974),
    ],
)
def test_variables_are_those_of_the_release(name, key, number, total):
    golden = GOLDEN[key]["variables"]
    assert len(golden) == number
    assert shapes(name, "release") == {v["name"]: v["shape"] for v in golden}
    assert sum(sizes(shapes(name, "release"))) == total
    # The one known difference: the release lists `means` as trainable, although they
    # never have a gradient and moving averages alone move them. Here they are state.
    assert shapes(name, "release", "weights").keys() == {
        v["name"] for v in golden if v["trainable"] and not v["name"].endswith("/means")
    }


def test_byte_tiny_is_tiny():
    assert sum(sizes(shapes("byte_tiny", "keras"))) == 38930


@pytest.mark.parametrize(
    "layered, flat",
    [
        ({"block_[0-2]/a": [1]}, ["block_0/a", "block_1/a", "block_2/a"]),
        ({"x/layer_[0,2-3]/a_1": [1]}, [f"x/layer_{i}/a_1" for i in (0, 2, 3)]),
        ({"block_[7]/block_1/a": [1]}, ["block_7/block_1/a"]),
        ({"norm_0/a": [1]}, ["norm_0/a"]),
    ],
)
def test_equal_layers_are_written_as_one(layered, flat):
    assert preset_table.expand(layered) == {name: [1] for name in flat}
    assert preset_table.collapse({name: [1] for name in flat}) == layered


def test_layers_of_other_shapes_are_written_apart():
    layers = {"block_0/a": [1], "block_1/a": [2, 3], "block_2/a": [1]}
    assert preset_table.collapse(layers) == {
        "block_[0,2]/a": [1],
        "block_[1]/a": [2, 3],
    }
