"""What holds for layers that are no attention, and for those with fewer tokens."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers

DIM = 8
perceiver = functools.partial(
    zoo.PerceiverBackbone, 3, DIM, num_layers=1, num_heads=2, dropout=0.1
)
funnel = functools.partial(zoo.FunnelBackbone, DIM, 2, (1, 1), 1, dropout=0.1)
sparse = functools.partial(zoo.SparseFeedForward, 12, 4, 3, dropout=0.1)
OTHER_LAST = {"output_dim": 4, "num_outputs": 2, "num_cross_attentions": 2}
CASES = {
    "perceiver": functools.partial(perceiver, share_weights=False, **OTHER_LAST),
    "causal": functools.partial(
        perceiver, causal=True, heads=[layers.RoutedHeads(2, 2, 3)]
    ),
    "funnel": funnel,
    "sparse": functools.partial(sparse, temperature=0.2, seed=1),
    "learner": functools.partial(zoo.TokenLearner, 3, 5, "sigmoid", dropout=0.1),
}
SAVED = {
    **CASES,
    "experts": functools.partial(
        zoo.MixtureOfExperts,
        *(3, 5, 4, 2),
        places="by_choice",
        router_jitter=0.1,
        dropout=0.1,
        seed=3,
    ),
    "memory": functools.partial(
        zoo.ProductKeyMemory, 2, 7, 4, 6, 3, "batch", True, input_dropout=0.1, seed=3
    ),
    "recurrent": functools.partial(
        zoo.TransformerXLAttention, 2, 3, 6, 4, same_length=True, dropout=0.1
    ),
    "compressive": functools.partial(
        *(zoo.CompressiveAttention, 2, 3, 4, 4, 6, 2),
        reconstruction_weight=0.5,
        dropout=0.1,
    ),
}


@pytest.fixture(autouse=True)
def eager_calls(eager):
    """Each layer is called a few times."""


def built(name, **options):
    layer = CASES[name](**options)
    layer.build((None, None, DIM))
    helpers.randomize(layer)
    return layer


@pytest.mark.parametrize("name", [name for name in CASES if name != "causal"])
def test_learns_all_weights(name):
    layer = built(name)
    result = golden_cases.gradients(
        layer,
        lambda output, losses: ops.sum(output**3),
        {"inputs": helpers.normal(2, 11, DIM), "training": True},
        wrt=("inputs",),
    )
    # A constant in all keys of a query changes no weight of a softmax.
    of_all = {path: g for path, g in result.variables.items() if "key_bias" not in path}
    for gradient in (*of_all.values(), *result.inputs.values()):
        assert np.all(np.isfinite(gradient)) and np.any(gradient)


@pytest.mark.parametrize("name", SAVED)
def test_survives_saving(name, tmp_path):
    helpers.assert_survives_saving(SAVED[name](), tmp_path, helpers.normal(2, 8, DIM))


@pytest.mark.parametrize("name", [name for name in CASES if name != "causal"])
def test_half_precision(name):
    exact, half = built(name), built(name, dtype="mixed_bfloat16")
    for layer in (exact, half):
        if name == "sparse":  # no choice is close
            layer.controller.bias.assign(100.0 * np.arange(12))
    x = helpers.normal(2, 11, DIM)
    expected, actual = (golden_cases.run(layer, x)[0] for layer in (exact, half))
    assert keras.backend.standardize_dtype(actual.dtype) == "bfloat16"
    golden_cases.assert_close(actual, expected, 0.1)


def test_short_outputs_have_the_mask_of_embeddings():
    """Also where neither batch nor length is known."""
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(9, DIM, mask_zero=True)(ids)
    x = zoo.FunnelBackbone(DIM, 2, (1, 1), 0)(x)
    mean = keras.layers.GlobalAveragePooling1D()(x)
    found, padded = (
        keras.ops.convert_to_numpy(keras.Model(ids, mean)(row))
        for row in (np.array([[1, 2, 3]]), np.array([[1, 2, 3, 0, 0, 0]]))
    )
    golden_cases.assert_close(found, padded, 1e-5)


X = np.ones((2, 3, DIM), "float32")


@pytest.mark.parametrize(
    "refused, message",
    [
        (lambda: perceiver(causal=True, output_dim=4), "`output_dim` must be None"),
        (lambda: perceiver(num_outputs=2), "learned queries need a size"),
        (lambda: perceiver(num_cross_heads=3), "heads must divide the size"),
        (lambda: perceiver(causal=True)(X[..., 1:]), "of a causal model are its"),
        (lambda: perceiver()(X, X), "`output_queries` must be of the size"),
        (lambda: perceiver(output_dim=6)(X), "`output_queries` must be of the size"),
        (
            lambda: zoo.FunnelBackbone(DIM, 2, (1, 0)),
            "`block_sizes` must be a positive",
        ),
        (lambda: zoo.FunnelBackbone(DIM, 3), "heads must divide the size"),
        (lambda: funnel()(X[..., 1:]), "must be of the size `hidden_dim`"),
        (lambda: zoo.SparseFeedForward(12, 5), "`block_size` must divide"),
        (lambda: sparse(hard_probability=1.5), "`hard_probability` must be at most 1"),
        (lambda: built("causal")(X[None]), "must have the shape"),
        (lambda: built("funnel")(X[None]), "must have the shape"),
        (lambda: built("sparse")(X[0]), "must have the shape"),
        (lambda: built("sparse").choose(X[0]), "must have the shape"),
        (lambda: sparse().choose(X), "`choose` needs a layer that is built"),
        (lambda: funnel().encode(X), "`encode` needs a layer that is built"),
        (lambda: built("perceiver")(X[..., 1:]), "must be of the size 8"),
    ],
)
def test_refusals(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()
