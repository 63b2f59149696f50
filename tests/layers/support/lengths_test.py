"""Tests of sequences whose length is unknown while TensorFlow traces a layer."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

pytestmark = helpers.only_on("tensorflow", "JAX always knows the length")

BATCH, DIM = 2, 8
# One of each way to arrange tokens, and of the few ways to shift keys.
CAUSAL = ["local", "dilated", "strided", "fixed", "sliding_strided", "threshold"]
CAUSAL += ["cluster_strided", "rounds", "global", "criss_cross", "best_blocks"]
CAUSAL += ["indexed_copies", "synthesizer", "native_sparse", "convolution_and_window"]
CAUSAL += ["long_short", "luna", "sinkhorn", "token_choice_apart_shifted"]
CAUSAL += ["prefix_shifted", "performer_shifted", "multipole_shifted"]
WHOLE = ("criss_cross", "best_blocks", "clustered_queries", "induced", "hashed")
WHOLE += ("sinkhorn", "experts_apart", "block_pair", "nystrom", "multipole")
MEMORIES = ("local", "strided", "experts_apart", "cluster_strided", "hashed", "linear")
MEMORIES += ("best_blocks", "luna", "multipole")


def sequence(length, seed=0):
    return helpers.normal(BATCH, length, DIM, seed=seed)


def assert_one_graph_serves(function, *batches):
    """Fails unless a function traced once for all lengths returns what it should."""
    import tensorflow as tf

    specs = [tf.TensorSpec([BATCH, None, *x.shape[2:]], x.dtype) for x in batches[0]]
    compiled = tf.function(function, input_signature=specs, autograph=False)
    for batch in batches:
        expected = golden_cases.to_numpy(function(*map(tf.constant, batch)))
        predicted = golden_cases.to_numpy(compiled(*batch))
        np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    kinds.some(CAUSAL, ("local", "token_choice_apart_shifted")),
)
def test_causal_self_attention(kind):
    attention = helpers.attention(kinds.CAUSAL[kind]())
    assert_one_graph_serves(
        lambda x, real: attention(x, query_mask=real, use_causal_mask=True),
        *([sequence(n), helpers.tail_mask(n, n, n - 2)] for n in (10, 7)),
    )


@pytest.mark.parametrize("kind", kinds.some(WHOLE, ("experts_apart",)))
def test_attention_without_a_causal_mask(kind):
    attention = helpers.attention(kinds.WHOLE[kind]())
    batches = [[sequence(n), helpers.tail_mask(n, n, n - 2)] for n in (10, 7, 3)]
    assert_one_graph_serves(
        lambda x, real: attention(x, query_mask=real),
        *batches[: 2 + (kind == "nystrom")],
    )


@pytest.mark.parametrize("kind", kinds.some(MEMORIES, ("local", "experts_apart")))
def test_attention_to_a_memory(kind):
    attention = helpers.attention(kinds.MEMORIES[kind](), memory_dim=DIM)
    assert_one_graph_serves(
        lambda x, memory, real: attention(
            x, memory, value_mask=real, self_attention=False
        ),
        *(
            [sequence(n), sequence(m, seed=1), helpers.tail_mask(m, m, m - 3)]
            for n, m in ((12, 9), (7, 10), (9, 12))
        ),
    )


@pytest.mark.thorough
def test_blocks_with_a_timing_signal_learn_from_several_lengths():
    attention = layers.RoutingAttention(
        4, 4, 3, 5, num_local_heads=2, clustering={"revive_after": 2}
    )
    block = layers.TransformerBlock(attention, layers.FeedForward(16))
    inputs = keras.Input((None, DIM))
    outputs = block(layers.TimingSignal()(inputs))
    models = [keras.Model(inputs, outputs)]
    helpers.randomize(models[0])
    models.append(keras.models.clone_model(models[0]))
    models[1].set_weights(models[0].get_weights())
    # A model that computes eagerly knows all lengths.
    for model, eager in zip(models, (False, True)):
        model.compile("sgd", "mse", jit_compile=False, run_eagerly=eager)
        for length in (10, 7):
            model.train_on_batch(sequence(length), sequence(length, seed=1))
    for weights in zip(*(model.get_weights() for model in models)):
        np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_dropout_in_prefixes_draws_alike():
    import tensorflow as tf

    heads = kinds.CAUSAL["prefix"](dropout=0.5, dropout_seed=1, prefix_block_size=None)
    attention = layers.MixedAttention([heads], key_dim=4)
    inputs = keras.Input((None, DIM))
    model = keras.Model(inputs, attention(inputs, use_causal_mask=True))
    helpers.randomize(model)
    state = heads.dot_product.dropout_layer.seed_generator.state
    weights, results = model.get_weights(), []
    for eager in (True, False):
        state.assign([1, 0])
        model.set_weights(weights)
        call = model if eager else tf.function(model, reduce_retracing=True)
        outputs = [call(sequence(n), training=True) for n in (10, 7)]
        results.append(golden_cases.to_numpy([*outputs, state]))
    for known, unknown in zip(*results):
        np.testing.assert_allclose(known, unknown, atol=1e-5)


def test_attention_scores_of_a_model():
    """Keras knows no length while it makes one, either."""
    attention = layers.MixedAttention([layers.LocalHeads(2, (4,))], key_dim=4)
    inputs = keras.Input((None, DIM))
    model = keras.Model(inputs, attention(inputs, return_attention_scores=True)[1])
    model.compile(jit_compile=False)
    for length in (10, 7):
        predicted = model.predict(sequence(length), verbose=0)
        expected = golden_cases.to_numpy(model(sequence(length)))
        np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["random", "random_blocks", "linformer", "image"])
def test_refuses_unknown_lengths_where_it_needs_them(kind):
    import tensorflow as tf

    make = kinds.WHOLE["full" if kind == "image" else kind]
    attention = layers.MixedAttention([make()], key_dim=4)
    shape = (BATCH, 4, 4, DIM) if kind == "image" else (BATCH, 4, DIM)
    attention.build(shape)
    spec = tf.TensorSpec([BATCH, *[None] * (len(shape) - 2), DIM])
    message = r"`query`.*query\.shape=.*(run_eagerly|Linformer)"
    with pytest.raises(ValueError, match=message):
        tf.function(attention).get_concrete_function(spec)


def test_lengths_that_must_be_equal():
    import tensorflow as tf

    attention = layers.MixedAttention([kinds.WHOLE["fixed"]()], key_dim=4)
    spec = tf.TensorSpec([BATCH, None, DIM])
    attend = tf.function(attention, input_signature=[spec, spec], autograph=False)
    assert attend(sequence(7), sequence(7, seed=1)).shape == (BATCH, 7, DIM)
    with pytest.raises(tf.errors.InvalidArgumentError):
        attend(sequence(10), sequence(7, seed=1))
