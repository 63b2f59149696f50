"""The formulas of docs/scale.md are those of models that are small."""

import keras
import keras_hub
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import models
from tests.layers import helpers
from tools import scale_table

SMALL = scale_table.Model(1, 32, 4, 2, 8, 64, 96)
# With the default block: half of the window is near.
MULTIPOLE = scale_table.Heads(8, 32, members=16, recent=32, sinks=4, block=32)
TOKEN_CHOICE = scale_table.Heads(8, 64)
GROUPS = {
    "full": (None, lambda: layers.FullHeads(4)),
    "token choice": (
        TOKEN_CHOICE,
        lambda: layers.RoutedHeads(4, 8, 64, share_query_key=False),
    ),
    "multipole": (
        MULTIPOLE,
        lambda: layers.MultipoleHeads(
            4, 8, 32, clusters_per_query=4, num_recent=32, members_per_cluster=16
        ),
    ),
}


def test_the_page_has_the_tables():
    page = scale_table.PAGE.read_text()
    assert scale_table.renewed(page) == page
    assert all(lines in page for lines in scale_table.tables().values())


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_are_those_of_keras_hub(is_tied):
    model = scale_table.Model(2, 32, 4, 2, 8, 64, 96, is_tied)
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=model.vocabulary,
        num_layers=model.layers,
        num_query_heads=model.heads,
        num_key_value_heads=model.key_heads,
        hidden_dim=model.dim,
        intermediate_dim=model.inner_dim,
        tie_word_embeddings=is_tied,
    )
    assert model.weights == backbone.count_params()


def test_adam_keeps_two_averages():
    weights = keras.Sequential([keras.Input((8,)), keras.layers.Dense(512)]).weights
    optimizer = keras.optimizers.Adam()
    optimizer.build(weights)
    kept = sum(np.prod(x.shape) * 4 for x in [*weights, *optimizer.variables])
    gradients = number = sum(np.prod(x.shape) for x in weights)
    assert kept + 4 * gradients == pytest.approx(scale_table.STATE * number, rel=1e-2)


@pytest.mark.parametrize("kind", GROUPS)
def test_caches(kind):
    heads, make = GROUPS[kind]
    options = {"num_key_value_heads": SMALL.key_heads}
    attention = layers.MixedAttention([make()], SMALL.head_dim, **options)
    attention.build((1, 512, SMALL.dim))
    cache = keras.tree.flatten(attention.make_cache(1, 512))
    numbers = [x for x in cache if "float" in keras.backend.standardize_dtype(x.dtype)]
    found = sum(4 * int(np.prod(x.shape)) for x in numbers)
    expected = scale_table.cache_bytes(SMALL, heads, 512, bytes_per_number=4)
    assert found == pytest.approx(expected, rel=0.03)


def kept_bytes(function, *arguments):
    """Returns the bytes that gradients need of what a function has computed."""
    import jax

    def residuals(*arguments):
        return jax.vjp(function, *arguments)[1]

    found = jax.tree.leaves(jax.eval_shape(residuals, *arguments))
    return sum(x.size * x.dtype.itemsize for x in found if hasattr(x, "size"))


# Two heads of the sizes in the tables, whose layers are traced and not computed.
TRAINED = {
    "full": (None, 1024, lambda: layers.FullHeads(2)),
    "token choice": (
        scale_table.TOKEN_CHOICE,
        32768,
        lambda: layers.RoutedHeads(2, 64, 512),
    ),
    "multipole": (
        scale_table.MULTIPOLE,
        8192,
        lambda: layers.MultipoleHeads(
            *(2, 64, 256),
            clusters_per_query=8,
            members_per_cluster=128,
            num_recent=256,
        ),
    ),
}


@helpers.only_on("jax")
@pytest.mark.parametrize("kind", TRAINED)
def test_what_gradients_of_a_layer_need(kind):
    import jax

    heads, tokens, make = TRAINED[kind]
    found = []
    for remat in (False, True):
        attention = layers.MixedAttention([make()], 64, remat=remat)
        attention.build((1, tokens, 32))
        state = [x.value for x in attention.non_trainable_variables]

        def call(weights, x, attention=attention, state=state):
            options = {"use_causal_mask": True, "training": True}
            return attention.stateless_call(weights, state, x, **options)[0]

        weights = [x.value for x in attention.trainable_variables]
        x = jax.ShapeDtypeStruct((1, tokens, 32), "float32")
        found.append(kept_bytes(call, weights, x))
    expected = scale_table.layer_bytes(
        scale_table.Model(1, 32, 2, 2, 64, 1, 1), heads, tokens
    )
    assert found[0] - found[1] == pytest.approx(expected, rel=0.15)


@helpers.only_on("jax")
def test_inputs_of_blocks():
    tokens, found = 512, []
    for number in (2, 4):
        lm = models.RoutingTransformerCausalLM.from_preset(
            "byte_tiny", num_layers=number, max_sequence_length=tokens, remat=True
        )
        dim = lm.backbone.hyperparameters.hidden_dim
        state = [x.value for x in lm.non_trainable_variables]
        ids = np.ones((1, tokens), "int32")
        inputs = {"token_ids": ids, "padding_mask": ids > 0}

        def call(weights, lm=lm, state=state, inputs=inputs):
            return lm.stateless_call(weights, state, inputs, training=True)[0]

        weights = [x.value for x in lm.trainable_variables]
        own = sum(x.size * 4 for x in weights)
        found.append(kept_bytes(call, weights) - own)
    growth = (found[1] - found[0]) / 2
    expected = scale_table.input_bytes(scale_table.Model(1, dim, *[1] * 5), tokens)
    assert growth == pytest.approx(2 * expected, rel=0.25)  # here in float32
