"""Tests of sequences whose length is unknown while TensorFlow traces a layer."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="JAX always knows the length"
)

BATCH, DIM = 2, 8
SHIFTED = {"key_shift": 1, "max_relative_position": 3}
SEPARATE = {"share_query_key": False, "max_relative_position": 3}
EXPERT = {"routing": "expert_choice"}
PREFIX = {**EXPERT, "routing_scope": "prefix"}
CAUSAL = {
    "full": lambda: layers.FullHeads(2, max_relative_position=3),
    "full, shifted": lambda: layers.FullHeads(2, **SHIFTED),
    "local": lambda: layers.LocalHeads(2, (4,), max_relative_position=3),
    "local, shifted": lambda: layers.LocalHeads(2, (16,), key_shift=1),
    "dilated": lambda: layers.LocalHeads(2, (2,), dilation=3, **SHIFTED),
    "strided": lambda: layers.StridedHeads(2, (3,), **SHIFTED),
    "fixed": lambda: layers.FixedHeads(2, (4,), num_summary_columns=2),
    "fixed, separate": lambda: layers.FixedHeads(
        2, (4,), num_summary_columns=2, arrangement="separate", key_shift=1
    ),
    "linear": lambda: layers.FeatureMapHeads(2, chunk_length=3),
    "performer": lambda: layers.FeatureMapHeads(
        2, "positive", num_features=5, chunk_length=3, key_shift=1
    ),
    "compressed": lambda: layers.CompressedHeads(2),
    "luna": lambda: layers.LunaHeads(2, 3, chunk_length=3),
    "long and short": lambda: layers.LongShortHeads(2, 5, 3, 2),
    "synthesizer": lambda: layers.SynthesizerHeads(2, max_length=12, rank=5),
    "random logits": lambda: layers.SynthesizerHeads(2, "random", max_length=12),
    "global": lambda: layers.GlobalHeads(2, (0, 8), 4, max_relative_position=3),
    "global, learned": lambda: layers.GlobalHeads(2, (1,), None, 2, key_shift=1),
    "column": lambda: layers.AxialHeads(2, 0, 3, **SHIFTED),
    "criss-cross": lambda: layers.AxialHeads(2, width=3),
    "best blocks": lambda: layers.BlockTopKHeads(2, 3, 3, **SHIFTED),
    "native sparse": lambda: layers.NativeSparseHeads(2, 4, 2, 4, 3),
    "fixed, distinct": lambda: layers.FixedHeads(2, (4,), 2, distinct_summaries=True),
    "sliding": lambda: layers.SlidingHeads(2, 3, **SHIFTED),
    "sliding, strided": lambda: layers.SlidingHeads(2, 3, is_strided=True),
    "sinkhorn": lambda: layers.SinkhornHeads(2, 4),
    "hashed": lambda: layers.HashedHeads(2, 4, 5, **SHIFTED),
    "hashed in rounds": lambda: layers.HashedHeads(2, 4, 5, num_rounds=2),
    "token choice": lambda: layers.RoutedHeads(2, 3, 16, max_relative_position=3),
    "token choice, shifted": lambda: layers.RoutedHeads(
        2, 3, 5, key_shift=1, **SEPARATE
    ),
    "threshold": lambda: layers.RoutedHeads(
        2, 3, 5, routing="expert_threshold", **SEPARATE
    ),
    "expert choice": lambda: layers.RoutedHeads(2, 3, 8, **EXPERT, **SHIFTED),
    "expert choice, separate": lambda: layers.RoutedHeads(
        2, 3, 5, **EXPERT, **SEPARATE
    ),
    "prefix": lambda: layers.RoutedHeads(2, 3, 5, **PREFIX, **SHIFTED),
    "cluster-strided": lambda: layers.ClusterStridedHeads(2, 3, 5, key_shift=1),
}
WITHOUT_A_MASK = {
    "sinkhorn": lambda: layers.SinkhornHeads(2, 4),
    "block pair": lambda: layers.BlockPairHeads(2, 3, max_relative_position=3),
    "local": lambda: layers.LocalHeads(2, (8,), max_relative_position=3),
    "strided": lambda: layers.StridedHeads(2, (3,)),
    "performer": lambda: layers.FeatureMapHeads(2, "positive", num_features=5),
    "criss-cross": lambda: layers.AxialHeads(2, width=3),
    "global": lambda: layers.GlobalHeads(2, (0, 8), 4, max_relative_position=3),
    "best blocks": lambda: layers.BlockTopKHeads(2, 4, 2),
    "compressed": lambda: layers.CompressedHeads(2, "mean", ratio=2),
    "clustered queries": lambda: layers.ClusteredQueryHeads(2, 3, 4),
    "induced": lambda: layers.InducedHeads(2, 3),
    "hashed": lambda: layers.HashedHeads(2, 4, 5),
    "reformer": lambda: layers.HashedHeads(
        2, 4, 5, hash="rotation", attends_to_self=False
    ),
    "routed": lambda: layers.RoutedHeads(2, 3, 8, **SEPARATE),
    "cluster-strided": lambda: layers.ClusterStridedHeads(2, 3, 5),
}


OF_ONE_SEQUENCE = ("global", "criss-cross", "block pair", "sinkhorn")


def sequence(length, seed=0):
    return helpers.normal(BATCH, length, DIM, seed=seed)


def free_model(layer, *inputs, **options):
    """A compiled model of a layer for sequences of any length."""
    inputs = inputs or [keras.Input((None, DIM))]
    model = keras.Model(inputs, layer(*inputs, **options))
    helpers.randomize(model)
    model.compile("sgd", "mse", jit_compile=False)
    return model


def built_attention(group, *value_shape):
    attention = layers.MixedAttention([group], key_dim=4, kernel_initializer="zeros")
    attention.build((None, None, DIM), *value_shape)
    helpers.randomize(attention)
    return attention


def assert_one_graph_serves(function, *batches):
    """Fails unless a function traced once for all lengths returns what it should."""
    import tensorflow as tf

    specs = [tf.TensorSpec([BATCH, None, *x.shape[2:]], x.dtype) for x in batches[0]]
    compiled = tf.function(function, input_signature=specs, autograph=False)
    for batch in batches:
        expected = golden_cases.to_numpy(function(*map(tf.constant, batch)))
        predicted = golden_cases.to_numpy(compiled(*batch))
        np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-5)


def some_thorough(kinds, few):
    return [
        pytest.param(kind, marks=() if kind in few else pytest.mark.thorough)
        for kind in kinds
    ]


@pytest.mark.parametrize(
    "kind",
    some_thorough(
        CAUSAL,
        (
            "local",
            "fixed",
            "token choice, shifted",
            "performer",
        ),
    ),
)
def test_causal_self_attention(kind):
    attention = built_attention(CAUSAL[kind]())
    assert_one_graph_serves(
        lambda x, real: attention(x, query_mask=real, use_causal_mask=True),
        *([sequence(n), helpers.tail_mask(n, n, n - 2)] for n in (10, 7)),
    )


@pytest.mark.parametrize("is_cross_attention", [False, True])
@pytest.mark.parametrize("kind", some_thorough(WITHOUT_A_MASK, ("routed",)))
def test_attention_without_a_causal_mask(kind, is_cross_attention):
    if is_cross_attention and kind in OF_ONE_SEQUENCE:
        pytest.skip("These heads attend inside one sequence only")
    shapes = [(None, None, DIM)] * is_cross_attention
    attention = built_attention(WITHOUT_A_MASK[kind](), *shapes)
    batches = [[sequence(n), sequence(m, seed=1)] for n, m in ((10, 10), (7, 9))]
    if not is_cross_attention:
        batches = [batch[:1] for batch in batches]
    assert_one_graph_serves(attention, *batches)


@pytest.mark.parametrize("has_padding", [False, True])
def test_segments_of_landmarks(has_padding):
    attention = built_attention(layers.NystromHeads(2, 4, convolution_size=3))
    batches = [[sequence(n), helpers.tail_mask(n, n, n - 2)] for n in (10, 8, 3)]
    assert_one_graph_serves(
        lambda x, real: attention(x, query_mask=real if has_padding else None),
        *batches,
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

    heads = layers.RoutedHeads(2, 3, 3, **PREFIX, dropout=0.5, dropout_seed=1)
    attention = layers.MixedAttention([heads], key_dim=4)
    model = free_model(attention, use_causal_mask=True)
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


@pytest.mark.thorough
def test_exports_free_lengths(tmp_path):
    import tensorflow as tf

    attention = layers.RoutingAttention(4, 4, 3, 5, num_local_heads=2)
    model = free_model(attention, use_causal_mask=True)
    model.export(tmp_path, verbose=False)
    loaded = tf.saved_model.load(tmp_path)
    for length in (10, 7):
        x = tf.constant(sequence(length))
        np.testing.assert_allclose(loaded.serve([x]), model([x]), atol=1e-5)


@pytest.mark.parametrize("kind", ["random", "random blocks", "image"])
def test_refuses_unknown_lengths_where_it_needs_them(kind):
    import tensorflow as tf

    group = layers.FullHeads(2)
    if kind == "random":
        group = layers.RandomHeads(2, 3, 4)
    if kind == "random blocks":
        group = layers.RandomBlockHeads(2)
    attention = layers.MixedAttention([group], key_dim=4)
    shape = (BATCH, 4, 4, DIM) if kind == "image" else (BATCH, 4, DIM)
    attention.build(shape)
    spec = tf.TensorSpec([BATCH, *[None] * (len(shape) - 2), DIM])
    message = "length of `query` must be known.*run_eagerly"
    with pytest.raises(ValueError, match=message):
        tf.function(attention).get_concrete_function(spec)


@pytest.mark.parametrize("kind, causal", [("fixed", False), ("full", True)])
def test_lengths_that_must_be_equal(kind, causal):
    import tensorflow as tf

    attention = layers.MixedAttention([CAUSAL[kind]()], key_dim=4)
    spec = tf.TensorSpec([BATCH, None, DIM])

    @tf.function(input_signature=[spec, spec])
    def attend(query, value):
        return attention(query, value, use_causal_mask=causal)

    assert attend(sequence(7), sequence(7, seed=1)).shape == (BATCH, 7, DIM)
    with pytest.raises(tf.errors.InvalidArgumentError):
        attend(sequence(10), sequence(7, seed=1))


def test_local_heads_and_a_padded_memory():
    attention = built_attention(WITHOUT_A_MASK["local"](), *[(None, None, DIM)])
    assert_one_graph_serves(
        lambda x, memory, real: attention(
            x, memory, value_mask=real, self_attention=False
        ),
        *(
            [sequence(n), sequence(m, seed=1), helpers.tail_mask(m, m, m - 3)]
            for n, m in ((12, 9), (7, 10), (9, 12))
        ),
    )
