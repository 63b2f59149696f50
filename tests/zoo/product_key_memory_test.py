"""Tests of product key memory."""

import numpy as np
import pytest
from keras import ops

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import norm
from tests.zoo.dense_blocks import softmax

# Their names in the package product-key-memory.
PARTS = ("keys", "to_queries.weight", "values.weight", "norm.fn.weight", "norm.fn.bias")


# Each layer is called once or twice.
pytestmark = pytest.mark.usefixtures("eager")


def built(dim=6, **options):
    sizes = {"num_heads": 2, "num_keys": 7, "top_k": 4, "key_dim": 6}
    layer = zoo.ProductKeyMemory(**{**sizes, "kernel_initializer": "zeros", **options})
    return helpers.randomized(layer, (2, 5, dim))


def ours(name, array):
    """Turns an array of the package around."""
    if name == "keys":
        return array.transpose(2, 0, 1, 3)
    return array.T if name == "to_queries.weight" else array


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_equals_another_implementation(mode):
    """Of the package product-key-memory; see `tools/peers`."""
    golden = golden_cases.load("peers/product_key_memory.npz")
    layer = built(num_heads=3, num_keys=5, top_k=3, key_dim=8, query_norm="batch")
    weights = [layer.keys, layer.query_dense.kernel, layer.values]
    weights += [layer.norm.gamma, layer.norm.beta]
    variables = dict(zip(PARTS, weights, strict=True))
    for name, variable in variables.items():
        variable.assign(ours(name, golden[f"weight/{name}"]))
    layer.norm.moving_mean.assign(golden["weight/norm.fn.running_mean"])
    layer.norm.moving_variance.assign(golden["weight/norm.fn.running_var"])
    real = golden["mask"]
    cotangent = golden["cotangent"] * real[..., None]

    result = golden_cases.gradients(
        layer,
        lambda output, losses: ops.sum(output * ops.convert_to_tensor(cotangent)),
        {"inputs": golden["input"], "mask": real, "training": mode == "train"},
        variables=variables,
    )

    # The package does not normalize padding in either mode.
    expected = golden[f"{mode}/output"]
    golden_cases.assert_close(result.outputs[real], expected[real], 1e-5)
    for name in PARTS:
        gradient = ours(name, golden[f"{mode}/gradient/{name}"])
        golden_cases.assert_close(result.variables[name], gradient, 2e-5, label=name)
    if mode == "train":
        moved = golden_cases.to_numpy(layer.norm.moving_mean)
        golden_cases.assert_close(moved, golden["after/norm.fn.running_mean"], 1e-5)


@pytest.mark.parametrize("query_norm", ["layer", None])
def test_finds_the_best_of_all_keys(query_norm):
    layer = built(query_norm=query_norm, use_bias=True, value_dim=3)
    x = helpers.normal(2, 5, 6, seed=1)
    weights = golden_cases.to_numpy(layer.query_dense.weights)
    query = (x @ weights[0] + weights[1]).reshape(2, 5, 2, 2, 3)
    if query_norm == "layer":
        query = norm(query, layer.norm)
    keys, values = golden_cases.to_numpy([layer.keys, layer.values])
    halves = np.einsum("blphd,phnd->blphn", query, keys)
    everything = halves[:, :, 0, :, :, None] + halves[:, :, 1, :, None]
    everything = everything.reshape(2, 5, 2, 49)
    best = np.argsort(-everything, axis=-1)[..., :4]
    scores = np.take_along_axis(everything, best, axis=-1)

    found, numbers = golden_cases.to_numpy(layer.find(x))

    np.testing.assert_array_equal(numbers, best)
    golden_cases.assert_close(found, scores, 1e-5)
    expected = np.einsum("blhkd,blhk->bld", values[best], softmax(scores))
    golden_cases.assert_close(golden_cases.run(layer, x)[0], expected, 1e-5)


def test_mixed_precision_compares_scores_in_float32():
    layer, exact = built(dtype="mixed_bfloat16"), built()
    x = ops.cast(helpers.normal(2, 5, 6, seed=1), "bfloat16")

    def found(layer):
        return helpers.compiled(lambda x: (*layer.find(x), layer(x)), None)(x)

    (scores, numbers, output), (_, wanted, expected) = found(layer), found(exact)
    assert (str(scores.dtype), str(output.dtype)) == ("float32", "bfloat16")
    # A token whose last key is another one may differ more.
    same = np.all(numbers == wanted, axis=(-1, -2))
    assert same.mean() > 0.4
    golden_cases.assert_close(output[same], expected[same], 5e-2)
