import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf.layers.softmax import softmax_attention
from routing_tf.layers.support.backends import are_stated
from tests import golden_cases
from tests.layers.helpers import dense_attention
from tests.layers.helpers import normal

QUERIES, KEYS = 6, 9
STEP = 1e-4


def causal():
    return np.arange(KEYS) <= np.arange(QUERIES)[:, None] + KEYS - QUERIES


def some_mask():
    """Hides a third of all pairs, and all keys from one query."""
    mask = normal(2, 3, QUERIES, KEYS, seed=7) > -0.4
    mask[1, 2, 3] = False
    return mask


def gradients(tensors, cotangent, dtype="float32", remat=False, **arguments):
    """Gradients of query, key and value, by name."""
    layer = layers.ScaledDotProduct(dtype=dtype)
    layer.remat = remat
    names = ("query", "key", "value")
    tensors = dict(zip(names, tensors, strict=True))
    layer.build(*(x.shape for x in tensors.values()))
    result = golden_cases.gradients(
        layer,
        lambda output, losses: ops.sum(
            ops.multiply(ops.cast(output, "float32"), cotangent)
        ),
        {**tensors, **arguments},
        wrt=names,
    )
    return result.inputs


def slope(tensors, cotangent, mask, name):
    """How the sum of outputs grows along a direction of one tensor, in float64."""
    names = ("query", "key", "value")
    direction = normal(*tensors[names.index(name)].shape, seed=8)

    def objective(step):
        moved = dict(zip(names, (np.asarray(x, "float64") for x in tensors)))
        moved[name] = moved[name] + step * direction
        query = np.broadcast_to(moved.pop("query"), (*cotangent.shape[:-1], 4))
        return np.sum(dense_attention(query, *moved.values(), mask)[0] * cotangent)

    return direction, (objective(STEP) - objective(-STEP)) / (2 * STEP)


@pytest.mark.parametrize(
    "mask, batches, is_causal",
    [
        (None, (2, 2), False),
        (None, (2, 1), True),
        (some_mask(), (2, 2), True),
        (some_mask(), (2, 1), False),
        (some_mask(), (1, 1), False),
    ],
)
def test_gradients_are_those_of_numpy(mask, batches, is_causal):
    batch = batches[1]
    query = normal(batches[0], 3, QUERIES, 4)
    key, value = normal(batch, 3, KEYS, 4, seed=1), normal(batch, 3, KEYS, 5, seed=2)
    cotangent = normal(batches[0] if mask is None else 2, 3, QUERIES, 5, seed=3)
    tensors = (query, key, value)
    found = gradients(
        tensors, cotangent, attention_mask=mask, use_causal_mask=is_causal
    )
    seen = np.ones((QUERIES, KEYS), bool) if mask is None else mask
    seen = seen & causal() if is_causal else seen
    for name, gradient in found.items():
        direction, expected = slope(tensors, cotangent, seen, name)
        assert gradient.shape == direction.shape
        np.testing.assert_allclose(np.sum(gradient * direction), expected, rtol=1e-4)


@pytest.mark.skipif(not are_stated(), reason="Torch keeps what it differentiates")
@pytest.mark.parametrize("queries", [QUERIES, 64])
def test_weights_that_are_not_kept(monkeypatch, queries):
    """Under a causal mask 64 queries attend in parts."""
    shapes = ((2, 3, queries, 4), (2, 3, 64, 4), (2, 3, 64, 5))
    tensors = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    mask = normal(2, 1, 1, 64, seed=4) > -0.4
    arguments = {"attention_mask": mask, "use_causal_mask": True}
    cotangent = normal(2, 3, queries, 5, seed=3)
    expected = gradients(tensors, cotangent, **arguments)
    sizes = []

    def softmax(logits):
        sizes.append(logits.shape[-2])
        return ops.softmax(logits)

    monkeypatch.setattr(softmax_attention, "softmax", softmax)
    found = gradients(tensors, cotangent, remat="weights", **arguments)
    assert sum(sizes) == 2 * queries
    seen = mask & np.tri(queries, 64, 64 - queries, dtype=bool)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-6)
        direction, growth = slope(tensors, cotangent, seen, name)
        np.testing.assert_allclose(np.sum(gradient * direction), growth, rtol=1e-3)


def test_gradients_of_half_precision():
    shapes = ((2, 3, QUERIES, 4), (2, 3, KEYS, 4), (2, 3, KEYS, 5))
    tensors = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    cotangent = normal(2, 3, QUERIES, 5, seed=3)
    exact = gradients(tensors, cotangent)
    found = gradients(tensors, cotangent, dtype="mixed_bfloat16")
    for name, gradient in found.items():
        error = np.abs(np.asarray(gradient, "float32") - exact[name]).max()
        assert error < 0.03 * np.abs(exact[name]).max()


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="of JAX")
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


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow")
@pytest.mark.parametrize("xla, keeps_weights", [(False, True), (True, False)])
def test_gradients_have_gradients(xla, keeps_weights):
    """As those of a penalty need."""
    import tensorflow as tf

    tensors = [
        tf.constant(normal(1, n, 4, seed=seed)) for seed, n in enumerate((3, 5, 5))
    ]

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
