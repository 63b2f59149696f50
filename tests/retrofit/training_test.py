"""Training of changed models."""

import keras
import numpy as np
import pytest

from routing_tf import retrofit
from tests.retrofit import families
from tests.retrofit.families_test import FAR

pytestmark = families.NOT_ON_JAX


def changed(family="GPT2", **options):
    model = families.causal_lm(family)
    options = {"keep_full": (), **FAR, **options}
    return retrofit.sparsify(model, families.IDS[:1], **options).model


def centroids(model):
    found = [x for x in model.weights if x.path.endswith("centroids")]
    return [keras.ops.convert_to_numpy(x) for x in found]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "frozen", [pytest.param(True, marks=pytest.mark.thorough), False]
)
def test_adapters_are_trained_and_centroids_move_if_they_may(frozen):
    model = changed(frozen=frozen)
    old = centroids(model)
    assert len(old) == 2
    model.backbone.enable_lora(2)
    names = {weight.name for weight in model.trainable_weights}
    assert {"lora_kernel_a", "lora_kernel_b"} <= names
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    targets = np.roll(families.IDS, -1, axis=1)
    history = model.fit(families.INPUTS, targets, epochs=2, verbose=0)
    losses = history.history["loss"]
    assert losses[-1] < losses[0]
    pairs = zip(centroids(model), old, strict=True)
    moved = [not np.array_equal(*pair) for pair in pairs]
    assert moved == [not frozen] * 2


@pytest.mark.parametrize(
    "family", ["Llama3", pytest.param("GPT2", marks=pytest.mark.thorough)]
)
def test_distillation_brings_layers_closer_to_the_full_ones(family):
    model = changed(family)
    before = [keras.ops.convert_to_numpy(x) for x in model.weights]
    flags = [x.trainable for x in model.weights]
    optimizer = keras.optimizers.Adam(0.006)
    losses = retrofit.distill(model, families.IDS, 4, optimizer)
    assert len(losses) == 4
    # The two sequences take turns.
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2])
    assert flags == [x.trainable for x in model.weights]
    for weight, old in zip(model.weights, before, strict=True):
        same = np.array_equal(keras.ops.convert_to_numpy(weight), old)
        is_trained = weight.path.split("/")[-2] in ("query", "key")
        assert same or is_trained, weight.path
