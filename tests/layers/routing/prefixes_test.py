"""Tests of membership judged among the tokens up to the query, whatever the blocks.

The rule itself is tested with the heads that follow it.
"""

import keras
import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, LENGTH, DIM = 2, 2, 12, 6
KINDS = {
    "routed": lambda **o: layers.RoutedHeads(
        HEADS, routing="expert_choice", routing_scope="prefix", **o
    ),
    "cluster_strided": lambda **o: layers.ClusterStridedHeads(HEADS, **o),
}
ON_JAX = helpers.ON_JAX
WITHOUT_XLA = pytest.mark.skipif(ON_JAX, reason="JAX always compiles the loop")


def compiled(group, jit_compile):
    """Returns a function that trains the group on queries and values."""
    options = {"use_causal_mask": True, "training": True}
    if keras.backend.backend() != "tensorflow":
        return lambda *x: golden_cases.run(group, x[0], None, x[1], **options)[0]
    import tensorflow as tf

    call = tf.function(
        lambda query, value: group(query, None, value, **options),
        jit_compile=jit_compile,
    )
    return lambda query, value: golden_cases.to_numpy(call(query, value))


@pytest.mark.parametrize(
    "kind, jit_compile",
    [
        pytest.param("routed", False, marks=WITHOUT_XLA),
        pytest.param("routed", True, marks=() if ON_JAX else pytest.mark.thorough),
        pytest.param("cluster_strided", True, marks=pytest.mark.thorough),
    ],
)
def test_dropout_differs_in_each_block_and_call(kind, jit_compile):
    block = 4
    group = KINDS[kind](
        num_clusters=1, attention_window=LENGTH, dropout=0.5, prefix_block_size=block
    )
    helpers.built(group, DIM, LENGTH)
    # So small that no weight is zero; values that show the weights.
    query = 0.01 * helpers.normal(BATCH, HEADS, LENGTH, DIM)
    value = np.broadcast_to(
        np.eye(LENGTH, dtype="float32"), (BATCH, HEADS, *[LENGTH] * 2)
    )
    call = compiled(group, jit_compile)

    dropped = np.stack([call(query, value) == 0.0 for _ in range(2)])

    earlier = np.broadcast_to(np.tri(LENGTH, dtype="bool"), dropped.shape)
    assert np.all(dropped[~earlier])
    assert 0.4 < np.mean(dropped[earlier]) < 0.6
    # If each block dropped the same, these would be alike.
    _, second, third = np.split(dropped[..., :block], 3, axis=-2)
    for one, other in ((second, third), (dropped[0], dropped[1])):
        assert np.mean(one != other) > 0.2


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="Torch has no XLA")
@pytest.mark.thorough
def test_trains_under_xla_where_the_batch_size_varies():
    """Then TensorFlow's shapes in the loop are not all static."""
    group = KINDS["routed"](
        num_clusters=3, attention_window=5, prefix_block_size=5, max_relative_position=3
    )
    attention = layers.MixedAttention([group], key_dim=DIM)
    inputs = keras.Input((LENGTH, 8))
    model = keras.Model(inputs, attention(inputs, use_causal_mask=True))
    model.compile("sgd", "mse", jit_compile=True)
    before = attention.get_weights()
    x = helpers.normal(3, LENGTH, 8)
    model.fit(x, x, batch_size=2, verbose=0)
    assert all(np.any(a != b) for a, b in zip(before, attention.get_weights()))
