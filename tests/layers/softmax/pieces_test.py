"""Tests of attention that is computed in pieces."""

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import zoo
from routing_tf.layers import FullHeads
from routing_tf.layers import MixedAttention
from routing_tf.layers import ScaledDotProduct
from routing_tf.layers.softmax import scaled_dot_product
from routing_tf.layers.softmax import softmax_attention
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

BATCH, HEADS, BLOCKS, QUERIES, KEYS, DIM = 2, 3, 4, 64, 96, 5
LOGITS = BATCH * HEADS * BLOCKS * QUERIES * KEYS
SHAPES = {
    "one for all": (1, 1, 1, QUERIES, KEYS),
    "of less axes": (QUERIES, KEYS),
    "of keys": (KEYS,),
    "of each sequence": (BATCH, 1, 1, 1, KEYS),
    "of each block": (BATCH, 1, BLOCKS, 1, KEYS),
    "of each head": (HEADS, 1, 1, KEYS),
    "of each pair": (BATCH, HEADS, BLOCKS, QUERIES, KEYS),
}


@pytest.fixture(autouse=True)
def one_cpu(monkeypatch):
    monkeypatch.setattr(keras.distribution, "list_devices", lambda: ["cpu:0"])


def attention(**options):
    cls = zoo.EntmaxDotProduct if "entmax_alpha" in options else ScaledDotProduct
    layer = cls(**options)
    return helpers.randomized(layer, *(x.shape for x in inputs()))


def inputs():
    return [
        helpers.normal(BATCH, HEADS, BLOCKS, length, DIM, seed=seed)
        for seed, length in enumerate((QUERIES, KEYS, KEYS))
    ]


def hidden_keys(shape):
    """A mask that also has queries that see nothing."""
    mask = np.random.default_rng(3).random(shape) < 0.5
    if len(shape) > 1:
        mask.reshape(-1, shape[-1])[0] = False
        assert not mask.any(axis=-1).all()
    return mask


def distances(shape):
    found = np.random.default_rng(5).integers(-8, 9, size=SHAPES[shape])
    return {"distances": found.astype("int32")}


CAUSAL = {"use_causal_mask": True, "offset": 32}
HIDDEN = {"attention_mask": hidden_keys(SHAPES["of each block"]), **CAUSAL}
RELATIVE = {"max_relative_position": 3}
# Options of the layer, and arguments of its call.
CASES = {
    **{
        f"mask and bias {name}": (
            {},
            {"attention_mask": hidden_keys(shape), "bias": helpers.normal(*shape)},
        )
        for name, shape in SHAPES.items()
    },
    "distances of less axes": (RELATIVE, distances("of less axes")),
    "distances of each block": (RELATIVE, distances("of each block")),
    "entmax": ({"entmax_alpha": 1.5}, {}),
    "soft cap": ({"logit_soft_cap": 1.5}, CAUSAL),
    "causal": ({}, HIDDEN),
    "causal, relative": (RELATIVE, HIDDEN),
}


FEW = ("mask and bias of each block", "distances of each block", "entmax", "soft cap")
FEW += ("causal, relative",)


@pytest.mark.parametrize("name", kinds.some(CASES, FEW))
def test_pieces_equal_attention_at_once(monkeypatch, name):
    """Results and gradients."""
    options, arguments = CASES[name]
    layer = attention(**options)
    arguments = {**arguments, **dict(zip(("query", "key", "value"), inputs()))}
    wrt = ("query", "key", "value", *["bias"] * ("bias" in arguments))
    sizes, found = [], []

    def counted(function):
        def count(logits):
            sizes.append(np.prod(logits.shape))
            return function(logits)

        return count

    def objective(outputs, losses):
        return sum(ops.sum(ops.sin(x)) for x in keras.tree.flatten(outputs))

    for owner, name in ((layer, "normalized"), (softmax_attention, "softmax")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    for size in (LOGITS, LOGITS // 6):
        monkeypatch.setattr(softmax_attention, "PIECE_SIZE", size)
        sizes.append(0)
        found.append(golden_cases.gradients(layer, objective, arguments, wrt))
    assert len(sizes) > 2 + 1 and 0 < sizes[-1] <= LOGITS // 6
    whole, in_pieces = found
    assert all(np.any(x) for x in (*whole.inputs.values(), *whole.variables.values()))
    helpers.assert_same_results(in_pieces, whole)


def test_what_cannot_be_cut_stays_whole(monkeypatch):
    monkeypatch.setattr(softmax_attention, "PIECE_SIZE", LOGITS // 6)
    query, key, value = inputs()
    assert softmax_attention.num_pieces(query, key, value, [None]) == 6
    # One key for all heads; a mask that is small, and would not be for each of them.
    assert softmax_attention.num_pieces(query, key[:, :1], value, []) == 1
    mask = hidden_keys((BATCH, 1, 1, QUERIES, KEYS))
    assert softmax_attention.num_pieces(query, key, value, [mask]) == 1
    # Masks of more axes than the query, or of several queries where it has one.
    for shape in ((1, *SHAPES["of each pair"]), (4, HEADS, BLOCKS, QUERIES, KEYS)):
        mask = np.ones(shape, "bool")
        assert softmax_attention.num_pieces(query, key, value, [mask]) == 1


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="Keras lists no devices")
@pytest.mark.parametrize("devices", [["gpu:0"], ["cpu:0", "cpu:1"]])
def test_only_one_cpu_takes_pieces(monkeypatch, devices):
    monkeypatch.setattr(softmax_attention, "PIECE_SIZE", LOGITS // 6)
    monkeypatch.setattr(keras.distribution, "list_devices", lambda: devices)
    assert softmax_attention.num_pieces(*inputs(), []) == 1


@pytest.mark.parametrize("options", [{"entmax_alpha": "learned"}, {"dropout": 0.5}])
def test_heads_that_must_be_whole(monkeypatch, options):
    found = []
    for size in (LOGITS, LOGITS // 6):
        monkeypatch.setattr(softmax_attention, "PIECE_SIZE", size)
        layer = attention(**options, seed=1)
        found.append(golden_cases.run(layer, *inputs(), training=True)[0])
    golden_cases.assert_close(*found, 1e-6)


def test_sums_of_exponentials(monkeypatch):
    found = []
    for size in (LOGITS, LOGITS // 6):
        monkeypatch.setattr(softmax_attention, "PIECE_SIZE", size)
        options = {"return_logsumexp": True, "use_causal_mask": True}
        found.append(golden_cases.run(attention(), *inputs(), **options)[0])
    assert softmax_attention.num_pieces(*inputs(), []) == 6
    for expected, actual in zip(*found, strict=True):
        golden_cases.assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("remat", [False, True])
def test_what_is_computed_again_is_whole(monkeypatch, remat):
    numbers = []

    def in_pieces(attend, number, *arguments):
        numbers.append(number)
        return softmax_attention.in_pieces(attend, number, *arguments)

    monkeypatch.setattr(scaled_dot_product, "in_pieces", in_pieces)
    monkeypatch.setattr(softmax_attention, "PIECE_SIZE", 64)
    layer = MixedAttention([FullHeads(2)], key_dim=4, remat=remat)
    layer.build((1, 16, 8))
    golden_cases.run(layer, helpers.normal(1, 16, 8), training=True)
    assert bool(numbers) == (not remat)
