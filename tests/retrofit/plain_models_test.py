"""Functional, Sequential and subclassed models with attention of Keras."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import retrofit
from tests.retrofit import families
from tests.retrofit.families_test import FAR
from tests.retrofit.families_test import NEAR

pytestmark = families.NOT_ON_JAX
LENGTH, DIM = 20, 8
REAL = np.arange(LENGTH) < np.array([[LENGTH], [13]])
KINDS = ("causal", "encoder", "grouped", "subclassed")


def tokens():
    return np.random.default_rng(0).integers(1, 9, (2, LENGTH)) * REAL


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed = keras.layers.Embedding(10, DIM)
        self.attention = keras.layers.MultiHeadAttention(2, 4)
        self.cross = keras.layers.MultiHeadAttention(2, 4)

    def call(self, ids):
        x = self.embed(ids)
        x = x + self.attention(x, x, use_causal_mask=True)
        return x + self.cross(x, self.embed(ids + 0))


def made(kind):
    """Returns a built model."""
    if kind == "subclassed":
        model = Subclassed()
        model(tokens())
        return model
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(10, DIM, keras.initializers.RandomNormal(stddev=1.0))(
        ids
    )
    mask = keras.ops.expand_dims(keras.ops.not_equal(ids, 0), 1)
    for place in range(2):
        if kind == "grouped":
            attention = keras.layers.GroupQueryAttention(4, 4, 2, name=f"own_{place}")
        else:
            attention = keras.layers.MultiHeadAttention(
                2, 4, bias_initializer="normal", name=f"own_{place}"
            )
        causal = kind != "encoder"
        x = x + attention(x, x, attention_mask=mask, use_causal_mask=causal)
    # Attention to another sequence stays.
    memory = keras.layers.Dense(DIM)(x)
    other = keras.layers.MultiHeadAttention(2, 4, name="other")
    other = other(x, memory, attention_mask=mask)
    return keras.Model(ids, keras.layers.Dense(3)(x + other))


def outputs(model):
    return keras.ops.convert_to_numpy(model(tokens()))[REAL]


@pytest.mark.parametrize("kind", KINDS)
def test_exact_where_all_pairs_are_near(kind):
    model = made(kind)
    before = outputs(model)
    report = retrofit.sparsify(
        model, tokens(), keep_full=(), **{**NEAR, "num_recent": 64}
    )
    *changed, other = report.layers
    assert {layer.heads for layer in changed} == {"MultipoleHeads"}
    assert other.reason == "another sequence"
    assert (report.model is model) == (kind == "subclassed")
    np.testing.assert_allclose(outputs(report.model), before, atol=1e-4)
    restored = retrofit.restore(report.model)
    assert restored is model
    np.testing.assert_array_equal(outputs(model), before)


@pytest.mark.parametrize(
    "kind", ["causal", pytest.param("encoder", marks=pytest.mark.thorough)]
)
def test_files_give_the_model_back(kind, tmp_path):
    model = made(kind)
    before = outputs(model)
    sparse = retrofit.sparsify(model, tokens(), keep_full=(1,), **FAR).model
    after = outputs(sparse)
    assert np.abs(after - before).max() > 1e-5
    sparse.save(tmp_path / "sparse.keras")
    read = keras.models.load_model(tmp_path / "sparse.keras")
    np.testing.assert_allclose(outputs(read), after, atol=1e-6)
    assert "MixedAttention" in {type(layer).__name__ for layer in read.layers}


def test_masks_of_pairs_are_refused_and_the_model_stays():
    x = keras.Input((LENGTH, DIM))
    mask = keras.Input((LENGTH, LENGTH), dtype="bool")
    attention = keras.layers.MultiHeadAttention(2, 4)
    model = keras.Model([x, mask], attention(x, x, attention_mask=mask))
    values = np.ones((1, LENGTH, DIM)), np.eye(LENGTH, dtype=bool)[None]
    heads = layers.FullHeads(2)
    with pytest.raises(ValueError, match=r"\(1, 20, 20\) .*`use_causal_mask=True`"):
        retrofit.sparsify(model, [[values]], heads=heads)
    assert type(attention) is keras.layers.MultiHeadAttention
