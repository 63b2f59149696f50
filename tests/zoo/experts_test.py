"""Tests of feed-forward networks with experts, against a dense oracle of their own."""

import json

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.layers.support import replicas_test
from tests.zoo.dense_blocks import softmax
from tests.zoo.dense_blocks import weights_of

BATCH, LENGTH, DIM, HIDDEN, EXPERTS = 2, 12, 6, 5, 3
CAPACITY = 4  # some tokens of 12 find no place


# Each layer is called a few times.
pytestmark = pytest.mark.usefixtures("eager")


def built(**options):
    options = {"kernel_initializer": "zeros", **options}
    with keras.RematScope(mode="activations"):  # changes an attribute in calls
        layer = zoo.MixtureOfExperts(EXPERTS, HIDDEN, CAPACITY, **options)
    return helpers.randomized(layer, (BATCH, LENGTH, DIM))


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def expert_output(weights, activation, expert, x):
    hidden = x @ weights["expert_input_kernel"][expert]
    if activation == "geglu":
        hidden = gelu(hidden) * (x @ weights["expert_gate_kernel"][expert])
        return hidden @ weights["expert_output_kernel"][expert]
    hidden = hidden + weights["expert_input_bias"][expert]
    hidden = gelu(hidden) if activation == "gelu" else np.maximum(hidden, 0)
    output = hidden @ weights["expert_output_kernel"][expert]
    return output + weights["expert_output_bias"][expert]


def router(layer, x):
    """Returns logits and probabilities in float64."""
    logits = x.astype("float64") @ weights_of(layer)["router_kernel"]
    return logits, softmax(logits)


def in_order(layer, probabilities, real):
    """Yields pairs of token and number of choice as they look for places."""
    tokens, choices = np.flatnonzero(real), range(layer.top_k)
    if layer.places == "by_token":
        yield from ((t, c) for t in tokens for c in choices)
        return
    if layer.places == "by_probability":
        tokens = tokens[np.argsort(-probabilities[tokens].max(-1), kind="stable")]
    yield from ((t, c) for c in choices for t in tokens)


def oracle(layer, x, real):
    """Sends one token after another to its experts.

    Returns:
        The outputs, and the number of choices that found no place.
    """
    weights, (_, probabilities) = weights_of(layer), router(layer, x)
    output, dropped = np.zeros(x.shape), 0
    for b in range(len(x)):
        taken = np.zeros(layer.num_experts, "int32")
        for token, choice in in_order(layer, probabilities[b], real[b]):
            p = probabilities[b, token]
            best = np.argsort(-p, kind="stable")[: layer.top_k]
            weight = p[best] / (p[best].sum() if layer.top_k == 2 else 1)
            expert = best[choice]
            if taken[expert] == layer.capacity:
                dropped += 1
                continue
            taken[expert] += 1
            output[b, token] += weight[choice] * expert_output(
                weights, layer.activation, expert, x[b, token].astype("float64")
            )
    return output, dropped


CASES = {
    "switch": {},
    "switch-gelu": {"activation": "gelu"},
    "glam": {"top_k": 2, "activation": "geglu"},
    "gshard": {"top_k": 2, "places": "by_choice"},
    "v-moe": {"top_k": 2, "places": "by_probability"},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name):
    layer = built(**CASES[name])
    x = helpers.normal(BATCH, LENGTH, DIM, seed=1)
    real = helpers.mask_with_a_hole(LENGTH, LENGTH, 9)
    output, _ = golden_cases.run(layer, x, mask=real)
    expected, dropped = oracle(layer, x, real)
    golden_cases.assert_close(output, expected, 1e-5)
    assert dropped > 0
    routes = golden_cases.to_numpy(layer.route(x, real))
    assert np.sum(routes.is_chosen & ~routes.is_placed) == dropped
    assert np.sum(routes.is_chosen) == layer.top_k * real.sum()


@pytest.mark.parametrize("places", ["by_choice", "by_probability"])
def test_other_orders_leak_as_documented(places):
    layer = built(top_k=2, places=places)
    x = helpers.normal(1, LENGTH, DIM, seed=1)
    before, _ = golden_cases.run(layer, x)
    changed = np.concatenate([x[:, :8], 9 * helpers.normal(1, 4, DIM)], axis=1)
    after, _ = golden_cases.run(layer, changed)
    assert np.any(after[:, :8] != before[:, :8])


@pytest.mark.parametrize("top_k", [1, 2])
def test_steps_equal_the_whole(top_k):
    layer = built(top_k=top_k, activation="geglu")
    x = helpers.normal(BATCH, LENGTH, DIM, seed=1)
    real = helpers.mask_with_a_hole(LENGTH, LENGTH, LENGTH - 2)
    expected, _ = golden_cases.run(layer, x, mask=real)

    def step(x, real, cache, start):
        return layer(x, mask=real, cache=cache)

    cache = layer.make_cache(BATCH)
    output, cache = helpers.in_pieces(step, (5, 1, 1, 3, 2), (x, real), cache)
    golden_cases.assert_close(output, expected, 1e-6)
    assert cache.shape == (BATCH, EXPERTS) and cache.max() == CAPACITY


@pytest.mark.parametrize("top_k", [1, 2])
def test_losses_are_those_of_the_papers(top_k):
    layer = built(top_k=top_k, load_balancing_weight=0.1, z_loss_weight=0.01)
    x = helpers.normal(BATCH, LENGTH, DIM, seed=1)
    real = helpers.mask_with_a_hole(LENGTH, LENGTH, 9)
    _, losses = golden_cases.run(layer, x, mask=real, training=True)
    logits, p = (values[real] for values in router(layer, x))
    shares = np.bincount(p.argmax(-1), minlength=EXPERTS) / len(p)
    balance = EXPERTS * np.sum(shares * p.mean(axis=0))
    z_loss = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    golden_cases.assert_close(losses, [0.1 * balance, 0.01 * z_loss], 1e-5)
    read = golden_cases.to_numpy(dict(layer.statistics))
    names = ["load_balancing_loss", "router_z_loss", "dropped"]
    expected = [balance, z_loss, oracle(layer, x, real)[1]]
    golden_cases.assert_close([read[name] for name in names], expected, 1e-5)
    assert golden_cases.run(layer, x, mask=real)[1] == []


def test_gradients_reach_router_and_experts():
    layer = built(top_k=2, load_balancing_weight=0.1, z_loss_weight=0.01)
    x = helpers.normal(BATCH, LENGTH, DIM, seed=1)
    result = golden_cases.gradients(
        layer,
        lambda output, losses: ops.sum(output**2) + sum(losses),
        {"inputs": x, "training": True},
    )
    assert all(np.any(gradient) for gradient in result.variables.values())
    # That of the router is what differences tell.
    path = layer.router_kernel.path
    kernel = golden_cases.to_numpy(layer.router_kernel)

    def value(step):
        moved = kernel.copy()
        moved[2, 1] += step
        layer.router_kernel.assign(moved)
        output, losses = golden_cases.run(layer, x, training=True)
        return np.sum(output.astype("float64") ** 2) + sum(losses)

    difference = (value(1e-3) - value(-1e-3)) / 2e-3
    np.testing.assert_allclose(result.variables[path][2, 1], difference, rtol=2e-2)


def test_random_second_choices_are_taken_by_their_weights():
    layer = zoo.MixtureOfExperts(
        2, 4, 4000, 2, second_choice="random", kernel_initializer="zeros", seed=3
    )
    layer.build((None, None, 1))
    # The second choice has a weight of 0.2, so that two of five are taken.
    layer.router_kernel.assign([[0.0, np.log(4.0)]])
    layer.output_bias.assign([[1.0], [0.0]])
    x = np.ones((1, 4000, 1), "float32")
    whole, _ = golden_cases.run(layer, x)
    np.testing.assert_allclose(whole, 0.2, rtol=1e-5)
    outputs = [golden_cases.run(layer, x, training=True)[0] for _ in range(2)]
    for output in outputs:
        is_taken = output > 0.1
        np.testing.assert_allclose(output[is_taken], 0.2, rtol=1e-5)
        assert not np.any(output[~is_taken])
        assert abs(is_taken.mean() - 0.4) < 0.04
    assert np.any(outputs[0] != outputs[1])


def test_experts_start_differently_at_the_scale_of_one():
    seeds, make = (4, keras.random.SeedGenerator(4)), keras.initializers.GlorotUniform
    for initializer in ("glorot_uniform", *map(make, seeds)):
        layer = zoo.MixtureOfExperts(3, 20, 4, kernel_initializer=initializer)
        layer.build((1, 4, 10))
        kernels = golden_cases.to_numpy(layer.input_kernel)
        assert np.all(np.abs(kernels).max(axis=(1, 2)) > 0.9 * np.sqrt(6 / 30))
        assert np.abs(kernels).max() <= np.sqrt(6 / 30)
        assert len(np.unique(kernels.reshape(3, -1)[:, 0])) == 3


def test_router_computes_in_float32():
    layer, exact = built(top_k=2, dtype="mixed_bfloat16"), built(top_k=2)
    x = ops.cast(helpers.normal(BATCH, LENGTH, DIM, seed=1), "bfloat16")

    def found(layer):
        return helpers.compiled(lambda x: (layer.route(x), layer(x)), None)(x)

    (routes, output), (wanted, expected) = found(layer), found(exact)
    for a, b in zip(routes, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert str(output.dtype) == "bfloat16"
    golden_cases.assert_close(output, expected, 3e-2)


@pytest.mark.parametrize(
    "jit_compile", [False, pytest.param(True, marks=pytest.mark.thorough)]
)
def test_trains_compiled_where_the_length_is_open(compiled, jit_compile):
    layer = zoo.MixtureOfExperts(
        EXPERTS, HIDDEN, CAPACITY, 2, second_choice="random", places="by_probability"
    )
    inputs = keras.Input((None, DIM))
    model = keras.Model(inputs, layer(inputs))
    helpers.randomize(model)
    before = golden_cases.to_numpy(list(layer.trainable_variables))
    x = helpers.normal(BATCH, LENGTH, DIM, seed=1)
    expected = oracle(layer, x, np.ones((BATCH, LENGTH), "bool"))[0]
    model.compile(keras.optimizers.SGD(0.01), loss="mse", jit_compile=jit_compile)
    golden_cases.assert_close(model.predict(x, verbose=0), expected, 1e-5)
    model.fit(x, x, verbose=0)
    for old, new in zip(before, layer.trainable_variables, strict=True):
        assert np.any(golden_cases.to_numpy(new) != old)
    assert golden_cases.to_numpy(layer.statistics["dropped"]) > 0


# Trains a step with the experts on one device or shared out among four.
PROGRAM = """
import json, sys
import keras, numpy as np
from routing_tf import zoo

if sys.argv[1] == "4":
    devices = keras.distribution.list_devices()
    assert len(devices) == 4
    mesh = keras.distribution.DeviceMesh((4,), ("experts",), devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*expert_.*_kernel"] = ("experts", None, None)
    layout_map[".*expert_.*_bias"] = ("experts", None)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map)
    )
inputs = keras.Input((12, 6))
experts = zoo.MixtureOfExperts(8, 5, 3, top_k=2, z_loss_weight=0.01)
model = keras.Model(inputs, experts(inputs))
random = np.random.default_rng(0)
model.set_weights([random.normal(size=w.shape) for w in model.weights])
if sys.argv[1] == "4":
    for weight in experts.weights:
        parts = {str(shard.index) for shard in weight.value.addressable_shards}
        assert len(parts) == (4 if "expert_" in weight.name else 1), weight
x = random.normal(size=(4, 12, 6)).astype("float32")
model.compile(keras.optimizers.SGD(0.1), loss="mse")
output = model.predict(x, verbose=0)
loss = model.fit(x, x, batch_size=4, verbose=0).history["loss"]
weights = {w.path: keras.ops.convert_to_numpy(w).tolist() for w in model.weights}
print(json.dumps([output.tolist(), loss, weights]))
"""


@pytest.mark.slow
@helpers.only_on("jax", "Keras shares weights out there alone")
def test_four_devices_compute_what_one_does():
    (*one, weights), (*several, other_weights) = (
        json.loads(replicas_test.lines_of(PROGRAM, str(number), number)[-1])
        for number in (1, 4)
    )
    for actual, expected in zip(several, one, strict=True):
        golden_cases.assert_close(actual, expected, 1e-5)
    assert other_weights.keys() == weights.keys()
    for name, weight in weights.items():
        golden_cases.assert_close(other_weights[name], weight, 1e-5, 1e-6, name)
