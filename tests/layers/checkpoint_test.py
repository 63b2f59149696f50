"""Checkpoints of TensorFlow have all weights of layers and models."""

import functools

import keras
import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.models import small_models
from tests.models import small_seq2seq
from tests.zoo import every_layer_test

tf = pytest.importorskip("tensorflow")
pytestmark = [
    helpers.only_on("tensorflow"),
    pytest.mark.usefixtures("eager"),
]
DIM, LENGTH = 8, 22


def of_heads(make):
    return helpers.attention(make(), dim=DIM, key_dim=6)


def of_zoo(make):
    layer, shape = make(), (2, LENGTH, DIM)
    if "Backbone" in type(layer).__name__ and not layer.built:
        layer(np.zeros(shape, "float32"))
    elif type(layer).__name__ == "TokenFuser":
        layer(np.zeros((2, 3, DIM), "float32"), np.zeros(shape, "float32"))
    elif not layer.built:
        layer(np.zeros(shape, "float32"))
    return layer


class Own(keras.Model):
    """Holds its layers as attributes."""

    def __init__(self):
        super().__init__()
        self.first = layers.TokenEmbedding(9, DIM)
        self.places = layers.GridEmbedding((5, 5))
        self.last = helpers.block(kinds.experts(), feed_forward=layers.FeedForward(6))

    def call(self, ids):
        return self.last(self.places(self.first(ids)))


def own():
    model = Own()
    model(np.zeros((1, LENGTH), "int32"))
    return model


def functional():
    x = keras.Input((LENGTH, DIM))
    return keras.Model(x, keras.layers.Dense(2)(layers.RoutingAttention(2, 8, 3, 6)(x)))


MODELS = {
    "own": own,
    "functional": functional,
    "text": small_models.language_model,
    "pairs": small_seq2seq.language_model,
}
CASES = {
    **{kind: functools.partial(of_heads, make) for kind, make in kinds.WHOLE.items()},
    **{kind: functools.partial(of_heads, make) for kind, make in kinds.CAUSAL.items()},
    **{
        f"zoo, {name}": functools.partial(of_zoo, make)
        for name, make in {**every_layer_test.CASES, **every_layer_test.SAVED}.items()
    },
    **MODELS,
}


FEW = ("prefix_apart", "hashed", "learned", "zoo, perceiver", "zoo, memory", *MODELS)
FEW += ("zoo, projections, small_modules", "zoo, recurrent backbone")


@pytest.mark.parametrize("case", kinds.some(CASES, FEW))
def test_a_checkpoint_has_all_weights(case, tmp_path):
    layer = CASES[case]()
    generator = np.random.default_rng(0)
    expected = []
    for weight in layer.weights:
        expected.append(generator.integers(1, 99, weight.shape))
        weight.assign(expected[-1])
    checkpoint = tf.train.Checkpoint(layer=layer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    for weight in layer.weights:
        weight.assign(keras.ops.zeros_like(weight))
    checkpoint.read(path).assert_consumed()
    for weight, values in zip(layer.weights, expected, strict=True):
        np.testing.assert_array_equal(weight.numpy(), values, weight.path)


@pytest.mark.parametrize("make", [own, of_heads])
def test_another_model_reads_it(make, tmp_path):
    heads = () if make is own else (kinds.CAUSAL["token_choice_apart"],)
    saved, other = make(*heads), make(*heads)
    for weight in other.weights:
        weight.assign(weight + 1.0)
    path = tf.train.Checkpoint(m=saved).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(m=other).read(path).assert_consumed()
    x, options = helpers.normal(1, LENGTH, DIM), {"use_causal_mask": True}
    if make is own:
        x, options = np.arange(LENGTH)[None] % 9, {}
    outputs = [golden_cases.run(each, x, **options)[0] for each in (saved, other)]
    np.testing.assert_array_equal(*outputs)
