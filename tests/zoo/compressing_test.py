"""Tests of what holds for all heads that read tokens in compressed form."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import causality_test as causality
from tests.layers import helpers

BATCH, HEADS, LENGTH, DIM = 2, 2, 29, 6
RELATIVE = {"max_relative_position": 3, "embeddings_initializer": "zeros"}
compressed = functools.partial(zoo.CompressedHeads, HEADS)
CAUSAL = {
    "convolution": compressed,
    "convolution_and_window": functools.partial(
        compressed, ratio=4, attention_window=6, **RELATIVE
    ),
    "mean": functools.partial(compressed, "mean", 5, attention_window=3),
    "max": functools.partial(compressed, "max", 2),
    "long_short": functools.partial(zoo.LongShortHeads, HEADS, 5, 4, 2, **RELATIVE),
    "luna": functools.partial(zoo.LunaHeads, HEADS, 4, chunk_length=3),
}
ALL = {
    **CAUSAL,
    "long_short_of_the_whole": functools.partial(zoo.LongShortHeads, HEADS, 4, None, 3),
    "induced": functools.partial(zoo.InducedHeads, HEADS, 4),
    "clustered_queries": functools.partial(zoo.ClusteredQueryHeads, HEADS, 3, 4),
}
MEMORIES = ("convolution", "max", "luna", "induced")
ON_JAX = keras.backend.backend() == "jax"


def thorough(kinds, few):
    return [
        pytest.param(kind, marks=() if kind in few else pytest.mark.thorough)
        for kind in kinds
    ]


def built_attention(kind, **options):
    attention = layers.MixedAttention(
        [ALL[kind](**options)], DIM, kernel_initializer="zeros", **options
    )
    attention.build((None, None, DIM))
    helpers.randomize(attention)
    return attention


def call_of(attention, **options):
    """Returns the layer as a function of tokens, a mask and a bias."""

    def call(x, real, bias, **more):
        (group,) = attention.head_groups
        # One logit for many tokens has no place for it.
        bias = None if isinstance(group, zoo.CompressedHeads) else bias
        return attention(x, query_mask=real, token_bias=bias, **options, **more)

    return call


@pytest.mark.parametrize("kind", CAUSAL)
def test_later_tokens_change_no_bit_of_earlier_outputs(kind):
    layer = causality.built_attention(CAUSAL[kind])
    call = causality.forward(layer)
    query, real = causality.sequence(2, 41), causality.padding(2, 41)
    causality.assert_causal(call, query, real, (0, 13, 39))


@pytest.mark.parametrize("kind", thorough(CAUSAL, ("convolution_and_window",)))
def test_no_gradient_flows_to_later_tokens(kind):
    layer = causality.built_attention(CAUSAL[kind])
    call = causality.gradient(layer, ON_JAX or None)
    query, real = causality.sequence(2, 41), causality.padding(2, 41)
    for last in (0, 27, 39):
        later = np.arange(41) > last
        cotangent = np.where(later[:, None], 0, causality.sequence(2, 41, seed=5))
        by_query = call(query, real, cotangent)
        assert np.all(np.isfinite(by_query)) and np.all(by_query[:, later] == 0.0)
        assert np.all(np.any(by_query[:, ~later] != 0.0, axis=(1, 2)))


@pytest.mark.parametrize("kind", thorough(CAUSAL, ("convolution_and_window", "luna")))
def test_steps_equal_the_whole(kind):
    has_bias = kind not in ("convolution", "convolution_and_window", "mean", "max")
    helpers.assert_steps_equal_the_whole(built_attention(kind), DIM, has_bias=has_bias)


@pytest.mark.parametrize("kind", MEMORIES)
def test_steps_of_attention_to_a_memory(kind):
    helpers.assert_steps_read_a_memory(built_attention(kind), DIM)


@pytest.mark.parametrize(
    "kind, causal",
    [
        *((kind, False) for kind in ALL),
        *(pytest.param(kind, True, marks=pytest.mark.thorough) for kind in CAUSAL),
    ],
)
def test_padding_has_no_influence(kind, causal):
    """Not its numbers, nor whether it is there at the end."""
    call = call_of(built_attention(kind), use_causal_mask=causal)
    length, used = 9, 14
    real = helpers.tail_mask(used, length, 7)
    real[:, [0, 3]] = False
    x, bias = helpers.normal(BATCH, used, DIM), helpers.normal(BATCH, used, seed=5)
    results = []
    for end, noise in ((length, 0.0), (used, 0.0), (used, 50.0)):
        other = x + noise * ~real[..., None], real, bias + noise * ~real
        output = helpers.compiled(call, ON_JAX or None)(*(a[:, :end] for a in other))
        results.append(output[:, :length][real[:, :length]])
    for other in results[1:]:
        golden_cases.assert_close(other, results[0], 1e-5)


@pytest.mark.parametrize("kind", ALL)
def test_settings_and_weights_survive_saving(kind, tmp_path):
    attention = layers.MixedAttention(
        [ALL[kind](dropout=0.1, name=kind)], DIM, kernel_initializer="ones", name="a"
    )
    # On its own: a layer hands its dtype to the groups that it holds.
    helpers.assert_keeps_settings(ALL[kind](dropout=0.1, name=kind))
    x = helpers.normal(BATCH, 9, DIM)
    causal = kind in CAUSAL
    helpers.assert_survives_saving(attention, tmp_path, x, use_causal_mask=causal)


@pytest.mark.parametrize("kind", thorough(ALL, ("long_short",)))
def test_maps_show_who_is_seen(kind):
    attention, x = built_attention(kind), helpers.normal(BATCH, 13, DIM)
    for causal in (False, True) if kind in CAUSAL else (False,):
        (_, scores), _ = golden_cases.run(
            attention, x, use_causal_mask=causal, return_attention_scores=True
        )
        assert np.all(scores >= 0.0)
        later = np.broadcast_to(~np.tri(13, dtype="bool"), scores.shape)
        assert np.any(scores[later] > 0) == (not causal)
        sums = scores.sum(axis=-1)
        # The learned key has the rest; causal sums of Luna are not normalized.
        if kind not in ("convolution", "max") and not (causal and kind == "luna"):
            np.testing.assert_allclose(sums, 1.0, atol=1e-5)
        elif kind != "luna":
            assert np.all(sums < 1.0 + 1e-5) and np.all(sums[:, :, 3:] > 0.0)


@pytest.mark.parametrize("kind", thorough(ALL, ("luna", "induced")))
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision(kind, dtype):
    half, exact = built_attention(kind, dtype=dtype), built_attention(kind)
    x = helpers.normal(BATCH, LENGTH, DIM) / 4
    output, expected = (
        golden_cases.run(a, x, use_causal_mask=kind in CAUSAL)[0] for a in (half, exact)
    )
    assert keras.backend.standardize_dtype(output.dtype) == half.compute_dtype
    golden_cases.assert_close(output, expected, 0.05)


@pytest.mark.parametrize("kind", thorough(ALL, ("luna", "induced")))
def test_learns_all_weights(kind):
    attention = built_attention(kind)
    result = golden_cases.gradients(
        attention,
        lambda output, losses: ops.sum(output**2),
        {
            "query": helpers.normal(BATCH, 14, DIM),
            "query_mask": helpers.tail_mask(14, 0, 9),
            "use_causal_mask": kind in CAUSAL,
        },
    )
    for gradient in result.variables.values():
        assert np.all(np.isfinite(gradient)) and np.any(gradient)


def test_drops_weights_in_training_alone():
    attention = built_attention("convolution_and_window")
    group = CAUSAL["convolution_and_window"](dropout=0.5, dropout_seed=1)
    dropping = layers.MixedAttention([group], DIM)
    dropping.build((None, None, DIM))
    for weight, other in zip(
        dropping.trainable_weights, attention.weights, strict=True
    ):
        weight.assign(other)
    x = helpers.normal(BATCH, 14, DIM)
    outputs = [
        golden_cases.run(layer, x, training=training, use_causal_mask=True)[0]
        for layer, training in ((attention, True), (dropping, False), (dropping, True))
    ]
    golden_cases.assert_close(outputs[1], outputs[0], 1e-6)
    assert golden_cases.relative_error(outputs[2], outputs[0]) > 0.1
