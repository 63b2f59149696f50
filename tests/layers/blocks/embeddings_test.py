"""Tests of token embeddings, positions and token dropout."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers

IDS = np.array([[1, 1, 3, 0], [2, 1, 1, 4]], "int32")


def test_optimizer_sees_repeated_ids_added_up():
    """Slices that stand apart would be squared apart, without a word."""
    layer = helpers.randomized(layers.TokenEmbedding(5, 3, "zeros"), IDS.shape)
    cotangent = helpers.normal(2, 4, 3)
    expected = np.zeros((5, 3))
    np.add.at(expected, IDS, cotangent)
    model = keras.Sequential([keras.Input((4,), dtype="int32"), layer])
    before = golden_cases.to_numpy(layer.embeddings)
    # One step of RMSprop without momentum: g / sqrt((1 - rho) * g^2).
    model.compile(
        keras.optimizers.RMSprop(0.1, rho=0.75, epsilon=1e-12),
        loss=lambda y, output: ops.sum(y * output, axis=(1, 2)) * 2,
        jit_compile=False,
    )
    model.train_on_batch(IDS, cotangent)
    step = before - golden_cases.to_numpy(layer.embeddings)
    golden_cases.assert_close(step, 0.1 * np.sign(expected) / 0.5, 1e-4)


def test_timing_signal_equals_release():
    case = golden_cases.load("pieces/timing_signal_1d.npz")
    settings = case.config["args_length_channels_min_max_start"]
    for index, (length, channels, smallest, largest, start) in enumerate(settings):
        layer = layers.TimingSignal(smallest, largest, start)
        x = helpers.normal(2, length, channels)
        signal = golden_cases.to_numpy(layer(np.zeros((1, length, channels))))
        golden_cases.assert_close(signal, case[f"out/case_{index}"], 3e-6)
        golden_cases.assert_close(golden_cases.to_numpy(layer(x)), x + signal, 1e-6)


def test_grid_embedding_adds_a_vector_for_each_axis():
    layer = helpers.randomized(layers.GridEmbedding((2, 3, 2)), (None, None, 4))
    x = helpers.normal(2, 7, 4)
    tables = [golden_cases.to_numpy(table) for table in layer.tables]
    places = np.unravel_index(np.arange(16) % 12, (2, 3, 2))
    vectors = sum(table[index] for table, index in zip(tables, places))
    golden_cases.assert_close(golden_cases.to_numpy(layer(x)), x + vectors[:7], 1e-6)
    for offset in (5, ops.convert_to_tensor(5)):
        found = golden_cases.to_numpy(layer(x, offset=offset))
        golden_cases.assert_close(found, x + vectors[5:12], 1e-6)
    # Behind the grid, where the place is not known in advance: its last row.
    found = golden_cases.to_numpy(layer(x, offset=ops.convert_to_tensor(9)))
    expected = np.concatenate([vectors[9:12], vectors[6:10]])
    golden_cases.assert_close(found, x + expected, 1e-6)
    with pytest.raises(ValueError, match=r"`inputs`.* 13 .*\(2, 3, 2\)"):
        layer(x, offset=6)


def test_token_dropout_replaces_some_tokens_in_training():
    layer = layers.TokenDropout(0.25, seed=1)
    ids = np.arange(1, 4001, dtype="int32").reshape(4, 1000)
    for training in (None, False):
        output = golden_cases.to_numpy(layer(ids, training=training))
        np.testing.assert_array_equal(output, ids)
    first, second = (golden_cases.run(layer, ids, training=True)[0] for _ in range(2))
    assert first.dtype == "int32"
    kept = first != 0
    np.testing.assert_array_equal(first[kept], ids[kept])
    assert 0.2 < np.mean(~kept) < 0.3
    assert np.any(first != second)
    spec = layer(keras.Input((4,), dtype="int32"))
    assert (spec.shape, spec.dtype) == ((None, 4), "int32")


PLACES = np.zeros((1, 3, 8), "float32")
WHOLE = 2909  # not a number in half precision
MADE_OF_INTEGERS = {
    "token ids": (layers.TokenEmbedding, (3000, 4), {"scale": True}),
    "dropped ids": (layers.TokenDropout, (0.5,), {}),
    "sub-pixels": (layers.SubpixelEmbedding, (3000, 4), {}),
    "recurrent": (zoo.TransformerXLBackbone, (3000, 1, 2, 8, 16, 4), {}),
}


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("case", MADE_OF_INTEGERS)
def test_integers_that_come_as_floats_keep_their_digits(case, dtype):
    make, arguments, options = MADE_OF_INTEGERS[case]
    layer = make(*arguments, **options, dtype=dtype)
    shape = (1, 1, 2, 1) if case == "sub-pixels" else (1, 2)
    ids = np.full(shape, WHOLE)
    inputs = keras.Input(shape[1:])  # of floats
    model = keras.Model(inputs, layer(inputs))
    expected, *found = (
        golden_cases.to_numpy(ops.cast(call(x), "float32"))
        for call, x in ((layer, ids), (layer, ids + 0.0), (model, ids + 0.0))
    )
    for outputs in found:
        np.testing.assert_array_equal(outputs, expected)


@pytest.mark.parametrize(
    "make", [layers.TimingSignal, functools.partial(layers.GridEmbedding, (60, 50))]
)
def test_an_offset_that_comes_as_a_float_keeps_its_digits(make):
    layer = make(dtype="mixed_bfloat16")
    expected, found = (
        layer(PLACES, offset=offset) for offset in (WHOLE, np.array(WHOLE + 0.0))
    )
    np.testing.assert_array_equal(
        *golden_cases.to_numpy([ops.cast(x, "float32") for x in (found, expected)])
    )
