"""Dropout of every kind of heads is on in training, and only there."""

import functools
import inspect

import numpy as np
import pytest

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.zoo import cases

KINDS = {
    **{
        name: make
        for name, make in cases.SMALL.items()
        if name not in cases.WITHOUT_DROPOUT
    },
    **{
        name: functools.partial(getattr(layers, name), 2, **options)
        for name, options in kinds.REQUIRED.items()
    },
    "ReformerHeads": functools.partial(zoo.ReformerHeads, 2, 2, 4, num_rounds=2),
    "ThresholdHeads": functools.partial(zoo.ThresholdHeads, 2, 2, 4),
    "longformer": lambda **o: zoo.longformer_heads(2, 4, **o)[0],
}


def test_every_group_stands_here():
    groups = kinds.exported().keys() - cases.WITHOUT_DROPOUT
    assert groups == set(KINDS) - {"longformer"}


FEW = ("FullHeads", "RoutedHeads", "MultipoleHeads", "NativeSparseHeads", "HashedHeads")


@pytest.mark.parametrize("kind", kinds.some(KINDS, FEW))
def test_dropout_is_on_in_training_alone(kind):
    """Keras hands `training` to those layers whose `call` names it."""
    layer = helpers.attention(KINDS[kind](dropout=0.5))
    layer.trainable = False  # no centroid moves
    for part in layer._flatten_layers():
        if getattr(part, "dropout", 0):
            assert "training" in inspect.signature(part.call).parameters, part.name
    x = helpers.normal(2, 8, 8)
    options = {"use_causal_mask": kind in (*cases.ONLY_CAUSAL, "ThresholdHeads")}
    inference, first, second = (
        golden_cases.run(layer, x, training=training, **options)[0]
        for training in (False, True, True)
    )
    assert np.abs(first - second).max() > 1e-3
    assert np.abs(first - inference).max() > 1e-3
