"""Tests of what groups get that ask for the features of the queries."""

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers

BATCH, DIM, KEY_DIM = 2, 8, 4
ON_JAX = keras.backend.backend() == "jax"


class GatedHeads(layers.FullHeads):
    """Full heads with a gate for each query, made of its features."""

    needs_features = True

    def build(self, query_shape, key_shape, value_shape, features_shape):
        super().build(query_shape, key_shape, value_shape)
        self.gate = self.add_weight(name="gate", shape=(features_shape[-1],))

    def _gates(self, inputs):
        gates = ops.matmul(inputs.features, ops.convert_to_tensor(self.gate))
        return ops.tanh(gates)[:, None, :, None]

    def attend(self, inputs, training=None):
        return super().attend(inputs, training) * self._gates(inputs)

    def step(self, cache, index, inputs):
        output, cache = super().step(cache, index, inputs)
        return output * self._gates(inputs), cache

    def read_memory(self, cache, index, inputs):
        output, cache = super().read_memory(cache, index, inputs)
        return output * self._gates(inputs), cache


def built_attention(shape=(BATCH, 9, DIM), **options):
    groups = [layers.FullHeads(1, name="full"), GatedHeads(2, name="gated")]
    attention = layers.MixedAttention(
        groups, KEY_DIM, kernel_initializer="zeros", **options
    )
    attention.build(shape)
    helpers.randomize(attention)
    return attention


def gates(attention, x):
    return np.tanh(x @ golden_cases.to_numpy(attention.head_groups[1].gate))


@pytest.mark.parametrize("shape", [(9,), (3, 5)])
def test_features_stand_at_the_places_of_their_queries(shape):
    """Also in blocked order: the map of a head is that of its gate times another."""
    x = helpers.normal(BATCH, *shape, DIM)
    options = {"block_shape": (2, 2)} if len(shape) > 1 else {}
    attention = built_attention(x.shape, **options)
    (_, scores), _ = golden_cases.run(
        attention, x, use_causal_mask=True, return_attention_scores=True
    )
    expected = gates(attention, x).reshape(BATCH, 1, -1)
    sums = np.broadcast_to(expected, (BATCH, 2, expected.shape[-1]))
    golden_cases.assert_close(scores[:, 1:].sum(axis=-1), sums, 1e-5)


@pytest.mark.parametrize("memory", [None, 5])
def test_steps_have_features(memory):
    attention, x = built_attention(), helpers.normal(BATCH, 9, DIM)
    options = {"use_causal_mask": True}
    if memory is not None:
        options = {"value": helpers.normal(BATCH, memory, DIM, seed=1)}

    def both(x):
        cache = attention.make_cache(BATCH, 9, value=options.get("value"))
        first, cache = attention(x[:, :4], cache=cache, cache_index=0)
        rest, _ = attention(x[:, 4:], cache=cache, cache_index=4)
        return attention(x, **options), ops.concatenate([first, rest], axis=1)

    expected, steps = helpers.compiled(both, ON_JAX or None)(x)
    golden_cases.assert_close(steps, expected, 1e-5)


def test_gradients_flow_to_features_that_are_forgotten():
    x, gradients = helpers.normal(BATCH, 9, DIM), []
    for remat in (False, True):
        attention = built_attention(remat=remat)
        gradients.append(
            golden_cases.gradients(
                attention,
                lambda output, losses: keras.ops.sum(output**2),
                {"query": x, "training": True, "use_causal_mask": True},
                wrt=("query",),
            ).inputs["query"]
        )
    assert np.any(gradients[0] != 0.0)
    golden_cases.assert_close(gradients[1], gradients[0], 1e-5)


def test_a_group_called_on_its_own_needs_them_where_it_reads_them():
    arrays = [helpers.normal(BATCH, 2, 9, KEY_DIM, seed=i) for i in range(3)]
    with pytest.raises(ValueError, match="`features` must be given.*features=None"):
        GatedHeads(2)(*arrays)
    features = helpers.normal(BATCH, 9, DIM)
    assert layers.FullHeads(2)(*arrays, features=features).shape == arrays[2].shape


def test_a_group_called_on_its_own_takes_them_too():
    group = GatedHeads(2)
    arrays = [helpers.normal(BATCH, 2, 9, KEY_DIM, seed=i) for i in range(3)]
    features = helpers.normal(BATCH, 9, DIM, seed=4)
    group(*map(ops.convert_to_tensor, arrays), features=ops.convert_to_tensor(features))
    output, _ = golden_cases.run(group, *arrays, features=features)
    attended, _ = golden_cases.run(layers.FullHeads(2), *arrays)
    gate = np.tanh(features @ golden_cases.to_numpy(group.gate))
    golden_cases.assert_close(output, attended * gate[:, None, :, None], 1e-5)
