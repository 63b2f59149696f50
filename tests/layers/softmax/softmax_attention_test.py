import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf.layers.softmax import softmax_attention
from routing_tf.layers.support.stated_gradients import are_stated
from tests import golden_cases
from tests.layers import helpers
from tests.layers.helpers import normal

QUERIES, KEYS = 6, 9
# Hides a third of all pairs, and all keys from one query.
SOME = normal(2, 3, QUERIES, KEYS, seed=7) > -0.4
SOME[1, 2, 3] = False
where_stated = pytest.mark.skipif(not are_stated(), reason="Torch finds all gradients")


def inputs(batches=(2, 2), queries=QUERIES, keys=KEYS):
    shapes = zip((batches[0], batches[1], batches[1]), (queries, keys, keys), (4, 4, 5))
    return [normal(b, 3, n, size, seed=i) for i, (b, n, size) in enumerate(shapes)]


def gradients(tensors, dtype="float32", remat=False, **arguments):
    """Gradients of query, key and value, by name."""
    layer = layers.ScaledDotProduct(dtype=dtype)
    layer.remat = remat
    tensors = dict(zip(("query", "key", "value"), tensors, strict=True))
    layer.build(*(x.shape for x in tensors.values()))
    result = golden_cases.gradients(
        layer,
        lambda output, losses: ops.sum(ops.sin(ops.cast(output, "float32"))),
        {**tensors, **arguments},
        wrt=tuple(tensors),
    )
    return result.inputs


def assert_close_to_automatic_ones(found, tensors, **arguments):
    with layers.automatic_gradients():
        expected = gradients(tensors, **arguments)
    for name, gradient in found.items():
        golden_cases.assert_close(gradient, expected[name], 1e-5, label=name)


@where_stated
@pytest.mark.parametrize(
    "mask, batches, is_causal",
    [
        (None, (2, 2), False),
        (None, (2, 1), True),
        (SOME, (2, 2), True),
        (SOME, (2, 1), False),
        (SOME, (1, 1), False),
    ],
)
def test_gradients_are_those_that_the_backend_finds(mask, batches, is_causal):
    tensors = inputs(batches)
    arguments = {"attention_mask": mask, "use_causal_mask": is_causal}
    found = gradients(tensors, **arguments)
    assert_close_to_automatic_ones(found, tensors, **arguments)


@where_stated
@pytest.mark.parametrize("queries", [QUERIES, 64])
def test_weights_that_are_not_kept(monkeypatch, queries):
    """Under a causal mask 64 queries attend in parts."""
    tensors = inputs(queries=queries, keys=64)
    mask = normal(2, 1, 1, 64, seed=4) > -0.4
    arguments = {"attention_mask": mask, "use_causal_mask": True}
    sizes = []

    def softmax(logits):
        sizes.append(logits.shape[-2])
        return ops.softmax(logits)

    monkeypatch.setattr(softmax_attention, "softmax", softmax)
    found = gradients(tensors, remat="weights", **arguments)
    assert sum(sizes) == 2 * queries
    assert_close_to_automatic_ones(found, tensors, **arguments)


def test_gradients_of_half_precision():
    exact = gradients(inputs())
    for name, gradient in gradients(inputs(), dtype="mixed_bfloat16").items():
        golden_cases.assert_close(gradient, exact[name], 0.03, label=name)


@helpers.only_on("jax")
@pytest.mark.parametrize("way", ["jit", "checkpoint"])
def test_gradients_of_what_is_traced_inside(way):
    """As where activations are computed again."""
    import jax

    layer = layers.ScaledDotProduct()
    query, key, value = (normal(1, 5, 4, seed=seed) for seed in range(3))

    def objective(query, padding):
        return ops.sum(layer(query, key, value, padding, use_causal_mask=True) ** 2)

    arguments = query, np.array([True, True, False, True, True])
    expected = jax.grad(objective)(*arguments)
    found = jax.grad(getattr(jax, way)(objective))(*arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_types_may_differ():
    query, key, value = (normal(1, 5, 4, seed=seed) for seed in range(3))
    layer = layers.ScaledDotProduct(autocast=False)
    half = ops.cast(key, "bfloat16")
    expected = layer(query, ops.cast(half, "float32"), value)
    np.testing.assert_allclose(layer(query, half, value), expected, rtol=1e-5)


@helpers.only_on("tensorflow")
@pytest.mark.parametrize("xla, keeps_weights", [(False, True), (True, False)])
def test_gradients_have_gradients(xla, keeps_weights):
    """As those of a penalty need."""
    import tensorflow as tf

    tensors = [tf.constant(normal(1, n, 4, seed=n)) for n in (3, 5, 6)]
    tensors[2] = tensors[2][:, 1:]

    @tf.function(jit_compile=xla)
    def second(attend):
        with tf.GradientTape() as outer:
            outer.watch(tensors)
            with tf.GradientTape() as inner:
                inner.watch(tensors)
                output = tf.reduce_sum(attend(*tensors) ** 3)
            first = inner.gradient(output, tensors)
            size = sum(tf.reduce_sum(x**2) for x in first)
        return outer.gradient(size, tensors)

    layer = layers.ScaledDotProduct()
    expected = second(lambda q, k, v: tf.nn.softmax(q @ tf.transpose(k, (0, 2, 1))) @ v)
    layer.remat = False if keeps_weights else "weights"
    found = second(layer)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
