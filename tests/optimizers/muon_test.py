"""Tests of Muon for matrices between layers, with Adam for all else."""

import keras
import numpy as np
import pytest

from routing_tf import optimizers
from tests import golden_cases

LEARNING_RATE = 0.1
SHAPE = (6, 4)


def moves(layers, weight_decay=None):
    """Returns what one step takes from each weight of layers, by path.

    The gradients of matrices have singular values from 1 to 1000.
    """
    optimizer = optimizers.Muon(LEARNING_RATE, weight_decay=weight_decay)
    optimizer = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(optimizer)
    )
    weights = [weight for layer in layers for weight in layer.trainable_weights]
    before = {w.path: golden_cases.to_numpy(w) for w in weights}
    left, _ = np.linalg.qr(np.random.default_rng(0).normal(size=SHAPE))
    steep = (left * np.geomspace(1, 1000, SHAPE[1])).astype("float32")
    gradients = [
        steep if tuple(w.shape) == SHAPE else np.ones(w.shape, "float32")
        for w in weights
    ]
    optimizer.build(weights)
    optimizer.apply(gradients, weights)
    return {w.path: before[w.path] - golden_cases.to_numpy(w) for w in weights}


def built(layer):
    layer.build((None, SHAPE[0]))
    return layer


def test_kernels_move_by_one_pace_in_all_directions():
    (kernel, bias) = moves([built(keras.layers.Dense(SHAPE[1], name="dense"))]).values()
    paces = np.linalg.svd(kernel, compute_uv=False)
    # Five iterations bring directions a thousand times apart this near to each other.
    assert paces.max() < 2 * paces.min()
    assert 0.4 < paces.max() / (LEARNING_RATE * 0.2 * np.sqrt(max(SHAPE))) < 1.3
    golden_cases.assert_close(bias, np.full(SHAPE[1], LEARNING_RATE), 1e-4)


def test_embeddings_tables_and_logits_are_adams():
    others = [
        built(keras.layers.Embedding(*SHAPE, name="token_embedding")),
        built(keras.layers.Dense(SHAPE[1], use_bias=False, name="logits")),
    ]
    table = keras.layers.Layer(name="heads")
    table.add_weight(name="learned_tokens", shape=SHAPE)
    moved = moves([*others, table])
    assert len(moved) == 3
    # The first step of Adam is the sign of the gradient.
    for move in moved.values():
        golden_cases.assert_close(np.abs(move), np.full(SHAPE, LEARNING_RATE), 1e-3)


def test_decay_leaves_biases_alone():
    dense = built(
        keras.layers.Dense(SHAPE[1], bias_initializer="ones", kernel_initializer="ones")
    )
    kernel, bias = moves([dense], weight_decay=0.5).values()
    without, same = moves(
        [built(keras.layers.Dense(SHAPE[1], kernel_initializer="ones"))]
    ).values()
    golden_cases.assert_close(kernel - without, np.full(SHAPE, 0.05), 1e-4)
    golden_cases.assert_close(bias, same, 1e-4)


def test_two_rates_of_decay_are_refused():
    with pytest.raises(ValueError, match="`adam_weight_decay`.*Received: .*=0"):
        optimizers.Muon(weight_decay=0.1, adam_weight_decay=0.3)
