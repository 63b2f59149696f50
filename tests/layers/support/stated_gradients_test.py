"""Gradients that are stated, and those that the backend finds."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

LENGTH, DIM = 12, 8
KINDS = ("full", "local", "token_choice", "prefix", "hashed", "best_blocks")


def built_block(kind):
    return helpers.block(kinds.CAUSAL[kind](), feed_forward=layers.FeedForward(8))


@pytest.mark.parametrize("kind", kinds.some(KINDS, ("local", "token_choice")))
def test_stated_gradients_are_those_that_the_backend_finds(kind):
    block, x = built_block(kind), helpers.normal(2, LENGTH, DIM)

    def gradients():
        found = golden_cases.gradients(
            block, lambda output, losses: keras.ops.sum(output**2), {"inputs": x}
        )
        return found.variables

    stated = gradients()
    with layers.automatic_gradients():
        found = gradients()
    assert stated.keys() == found.keys() and stated
    for name, gradient in found.items():
        np.testing.assert_allclose(stated[name], gradient, rtol=1e-3, atol=1e-4)


@helpers.only_on("jax")
@pytest.mark.parametrize("kind", kinds.some(KINDS, ("full", "token_choice")))
def test_forward_mode(kind):
    import jax

    block = built_block(kind)
    x, along, onto = (helpers.normal(2, LENGTH, DIM, seed=i) for i in range(3))
    with pytest.raises(TypeError, match="automatic_gradients"):
        jax.jvp(block, (x,), (along,))
    with layers.automatic_gradients():
        _, forward = jax.jit(lambda x, along: jax.jvp(block, (x,), (along,)))(x, along)
    _, backward = jax.vjp(block, x)
    expected = np.sum(np.asarray(backward(onto)[0]) * along)
    np.testing.assert_allclose(np.sum(np.asarray(forward) * onto), expected, rtol=1e-3)


@helpers.only_on("jax")
def test_second_derivatives():
    import jax

    attention = layers.MixedAttention([layers.FullHeads(1)], key_dim=3)
    x = helpers.normal(1, 4, 3)
    attention(x)
    objective = jax.jit(lambda x: keras.ops.sum(attention(x) ** 2))
    with layers.automatic_gradients():
        forward = jax.hessian(lambda x: keras.ops.sum(attention(x) ** 2))(x)
    backward = jax.jacrev(jax.grad(objective))(x)
    np.testing.assert_allclose(forward, backward, rtol=1e-3, atol=1e-4)
