"""Rotary positions against keras_hub; `oracle_test` has them in every kind of heads."""

import functools

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from routing_tf.layers.softmax.queries_and_keys import rotate
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

BATCH, HEADS, LENGTH, DIM = 2, 2, 15, 6
ROTARY = {"rotary_positions": True, "rotary_wavelength": 50}


@pytest.mark.parametrize("start, wavelength", [(0, 10000), (7, 50)])
def test_turns_as_keras_hub_does(start, wavelength):
    x = helpers.normal(BATCH, HEADS, LENGTH, DIM)
    rotary = keras_hub.layers.RotaryEmbedding(wavelength, sequence_axis=2)
    expected = golden_cases.to_numpy(rotary(x, start_index=start))
    for first in (start, ops.convert_to_tensor(start, "int32")):
        found = golden_cases.to_numpy(rotate(x, first, wavelength))
        golden_cases.assert_close(found, expected, 1e-6)
    if not start:
        golden_cases.assert_close(helpers.turned(x, wavelength), expected, 1e-6)


@pytest.mark.parametrize("shift", [0, 1])
def test_linear_heads_compare_turned_vectors(shift):
    """And a shifted key keeps its position."""
    arrays = [helpers.normal(BATCH, HEADS, LENGTH, DIM, seed=i) for i in range(3)]
    turned = [helpers.turned(x, 50).astype("float32") for x in arrays[:2]]
    found, expected = (
        golden_cases.run(
            zoo.FeatureMapHeads(HEADS, key_shift=shift, **options),
            *vectors,
            arrays[2],
            use_causal_mask=True,
        )[0]
        for options, vectors in ((ROTARY, arrays[:2]), ({}, turned))
    )
    golden_cases.assert_close(found, expected, 1e-5)


def test_half_precision_is_turned_in_full():
    x = ops.cast(helpers.normal(1, 1, 2000, DIM), "bfloat16")
    found = rotate(x, 100_000, 10000)
    assert keras.backend.standardize_dtype(found.dtype) == "bfloat16"
    expected = rotate(ops.cast(x, "float32"), 100_000, 10000)
    expected = golden_cases.to_numpy(ops.cast(expected, "bfloat16"))
    np.testing.assert_array_equal(golden_cases.to_numpy(found), expected)


@keras.saving.register_keras_serializable("tests")
class Turn(keras.layers.Layer):
    """The rotary positions of another model."""

    def call(self, x, positions):
        return rotate(x, 0, 50, positions)


@pytest.mark.parametrize("kind", kinds.some(("full", "token_choice"), ["full"]))
def test_a_layer_turns_instead(kind):
    make = {"full": layers.FullHeads, "token_choice": layers.RoutedHeads}[kind]
    make = functools.partial(make, HEADS, *(() if kind == "full" else (2, 4)))
    x, ids = helpers.normal(BATCH, LENGTH, 8), np.repeat([[1] * 6 + [2] * 9], BATCH, 0)
    expected = layers.MixedAttention([make(**ROTARY)], DIM)
    found = layers.MixedAttention([make(rotary=Turn())], DIM)
    found = layers.MixedAttention.from_config(found.get_config())
    for layer in (expected, found):
        layer.build(x.shape)
    found.set_weights(expected.get_weights())
    for options in ({}, {"segment_ids": ids}):
        calls = (
            layer(x, use_causal_mask=True, **options) for layer in (expected, found)
        )
        np.testing.assert_array_equal(*(golden_cases.to_numpy(y) for y in calls))


def test_only_a_layer_turns():
    with pytest.raises(ValueError, match="`rotary`.*rotary='yes'"):
        layers.FullHeads(HEADS, rotary="yes")


@pytest.mark.parametrize("kind", ["full", "token_choice"])
def test_refused(kind):
    make = {"full": layers.FullHeads, "token_choice": layers.RoutedHeads}[kind]
    make = functools.partial(make, HEADS, *(() if kind == "full" else (1, 100)))
    with pytest.raises(ValueError, match="`key_dim`.*key_dim=5"):
        layers.MixedAttention([make(**ROTARY)], 5).build((None, 4, 8))
    attention = layers.MixedAttention([make(**ROTARY)], 4)
    x = helpers.normal(BATCH, 5, 8)
    with pytest.raises(
        ValueError, match="`rotary_positions=True`.*is_cross_attention=True"
    ):
        attention(x, helpers.normal(BATCH, 7, 8))
    attention = layers.MixedAttention([make(**ROTARY)], 4)
    attention.build(x.shape)
    with pytest.raises(
        ValueError, match="`rotary_positions=True`.*is_cross_attention=True"
    ):
        attention.make_cache(BATCH, 5, value=x)
