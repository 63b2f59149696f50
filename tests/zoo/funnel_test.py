"""Encoders of ever shorter sequences, against a dense oracle of their own in NumPy."""

import functools
import itertools

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.zoo import dense_blocks

BATCH, LENGTH, DIM, HEADS = 2, 12, 8, 2
CASES = {
    "cls": {"num_decoder_layers": 1},
    "all_pooled": {"separate_cls": False, "num_decoder_layers": 1},
    "encoder": {"num_decoder_layers": 0},
}


def built(name):
    model = zoo.FunnelBackbone(DIM, HEADS, block_sizes=(1, 2, 1), **CASES[name])
    return helpers.randomized(model, (None, None, DIM))


def pooled(model, x, real, positions):
    """Pools one pair after another, besides a first token that stays apart."""
    apart = int(model.separate_cls)
    states, masks = [x[:, i] for i in range(apart)], [real[:, i] for i in range(apart)]
    for start in range(apart, x.shape[1], 2):
        pair, mask = x[:, start : start + 2], real[:, start : start + 2]
        number = np.maximum(mask.sum(axis=1), 1)[:, None]
        states.append((pair * mask[..., None]).sum(axis=1) / number)
        masks.append(mask.any(axis=1))
    positions = positions[:apart] + positions[apart::2]
    return np.stack(states, axis=1), np.stack(masks, axis=1), positions


def relative_logits(heads, queries, keys, query, key):
    """Those of Transformer-XL, with a vector of waves for each pair of positions."""
    content, place, kernel = dense_blocks.values(
        heads.content_bias, heads.position_bias, heads.position_kernel
    )
    frequencies = 10_000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    logits = (content @ key.swapaxes(-1, -2)) * np.ones((*query.shape[:3], 1))
    for (i, a), (j, b) in itertools.product(enumerate(queries), enumerate(keys)):
        if a is None or b is None:
            continue
        angles = (a - b) * frequencies
        waves = np.concatenate([np.sin(angles), np.cos(angles)])
        vector = np.einsum("d,hdk->hk", waves, kernel)
        logits[:, :, i, j] += np.sum((query[:, :, i] + place[:, 0]) * vector, axis=-1)
    return logits


def oracle(model, x, real):
    """Returns the outputs, and the mask of the last block."""
    positions, x, of_first = list(range(LENGTH)), x.astype("float64"), None
    if model.separate_cls:
        positions[0] = None
    whole = positions, real
    for number, block in enumerate(model.blocks):
        for index, layer in enumerate(block):
            memory, keys, seen = None, positions, real
            if number > 0 and index == 0:
                memory = x
                x, real, positions = pooled(model, x, real, positions)
            x = oracle_of_layer(layer, x, seen, memory, positions, keys)
        of_first = x if of_first is None else of_first
    if not model.decoder_layers:
        return x, real
    positions, seen = whole
    # Each token takes the last state that begins at or before it.
    apart = int(model.separate_cls)
    index = [i if i < apart else apart + (i - apart) // 4 for i in range(LENGTH)]
    x = of_first + x[:, index]
    for layer in model.decoder_layers:
        x = oracle_of_layer(layer, x, seen, None, positions, positions)
    return x, seen


def oracle_of_layer(layer, x, seen, memory, queries, keys):
    attention = layer.attention or layer.cross_attention
    logits = functools.partial(relative_logits, attention.head_groups[0], queries, keys)
    sees = np.repeat(seen[:, None], x.shape[1], axis=1)
    return dense_blocks.block(x, layer, sees, memory, logits)


@pytest.mark.parametrize("name", kinds.some(CASES, ["cls"]))
def test_equals_the_oracle(name):
    model, x = built(name), helpers.normal(BATCH, LENGTH, DIM)
    real = helpers.mask_with_a_hole(LENGTH, LENGTH, 6)
    expected, mask = oracle(model, x, real)
    actual, _ = golden_cases.run(model, x, mask=real)
    golden_cases.assert_close(actual[mask], expected[mask], 1e-4)
    assert model.compute_output_shape(x.shape) == actual.shape
    kept = golden_cases.to_numpy(model.compute_mask(x, ops.convert_to_tensor(real)))
    np.testing.assert_array_equal(kept, mask)
    # Keras masks hide it, too; and what padding contains has no influence.
    x = np.where(real[..., None], x, 0.0).astype("float32")
    masked = helpers.compiled(lambda x: model(keras.layers.Masking()(x)), None)
    golden_cases.assert_close(masked(x)[mask], actual[mask], 1e-5)


def test_short_sequences():
    model = built("cls")
    for length in (1, 2, 3):
        x = helpers.normal(BATCH, length, DIM)
        output, _ = golden_cases.run(model, x)
        assert output.shape == x.shape and np.all(np.isfinite(output))
