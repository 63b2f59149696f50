"""Training by Keras' own `fit`, with a file in between."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases

LENGTH, DIM, IDS = 16, 8, 12
ON_TORCH = keras.backend.backend() == "torch"
ON_JAX = keras.backend.backend() == "jax"
# On the other backends models are trained too.
further = () if ON_TORCH else pytest.mark.thorough
HEADS = {
    "token choice": lambda: [layers.RoutedHeads(2, 3, 4)],
    "expert choice and local": lambda: [
        layers.RoutedHeads(1, 3, 4, routing="expert_choice", dropout=0.2),
        layers.LocalHeads(1, (4,)),
    ],
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=further if i else ()) for i, n in enumerate(HEADS)]
)
def test_fit_trains_and_goes_on_from_a_file(name, tmp_path):
    attention = layers.MixedAttention(HEADS[name](), key_dim=4)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(IDS, DIM, mask_zero=True)(inputs)
    x = layers.TransformerBlock(
        attention, layers.FeedForward(16), use_causal_mask=True
    )(x)
    model = keras.Model(inputs, keras.layers.Dense(IDS)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=ON_JAX)
    ids = np.random.default_rng(0).integers(1, IDS, (9, LENGTH))  # 4, 4 and 1
    ids[0, 12:] = 0
    kmeans = [w for w in attention.weights if w.name == "centroids"]
    before = golden_cases.to_numpy(kmeans)
    settings = {"batch_size": 4, "shuffle": False, "verbose": 0}
    losses = model.fit(ids, ids, epochs=4, **settings).history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    for old, new in zip(before, golden_cases.to_numpy(kmeans), strict=True):
        assert np.any(old != new) and np.all(np.isfinite(new))

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    expected, actual = (golden_cases.run(m, ids)[0] for m in (model, loaded))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    (after,) = loaded.fit(ids, ids, **settings).history["loss"]
    assert after < losses[-1]
