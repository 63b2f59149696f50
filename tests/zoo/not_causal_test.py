"""Tests of heads without a causal form."""

import functools

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, LENGTH, DIM = 2, 2, 14, 6
KINDS = {
    "linformer": functools.partial(zoo.LinformerHeads, HEADS, 20, 4),
    "linformer_of_each_head": functools.partial(
        zoo.LinformerHeads, HEADS, 20, 4, sharing=None
    ),
    "nystrom": functools.partial(zoo.NystromHeads, HEADS, 4, convolution_size=3),
    "nystrom_of_few_tokens": functools.partial(zoo.NystromHeads, HEADS, 20),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def built_group(kind, **options):
    group = KINDS[kind](**options)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    helpers.randomize(group)
    return group


def tokens():
    return [helpers.normal(BATCH, HEADS, LENGTH, DIM, seed=i) for i in range(3)]


def built_attention(kind, **options):
    attention = layers.MixedAttention([KINDS[kind](**options)], DIM)
    attention.build((None, None, DIM))
    helpers.randomize(attention)
    return attention


@every_kind
def test_padding_has_no_influence(kind):
    """Not its numbers, nor whether it is there."""
    group, length = built_group(kind), 9
    real = helpers.tail_mask(LENGTH, length, 7)
    real[:, [0, 3]] = False
    results = []
    for used, noise in ((length, 0.0), (LENGTH, 0.0), (LENGTH, 50.0)):
        arrays = [(x + noise * ~real[:, None, :, None])[:, :, :used] for x in tokens()]
        masks = {"query_mask": real[:, :used], "value_mask": real[:, :used]}
        output, _ = golden_cases.run(group, *arrays, **masks)
        results.append(output[:, :, :length].swapaxes(1, 2)[real[:, :length]])
    for other in results[1:]:
        golden_cases.assert_close(other, results[0], 1e-5)


@every_kind
def test_queries_that_see_nothing_get_zero(kind):
    nothing = np.zeros((BATCH, LENGTH), "bool")
    output, _ = golden_cases.run(built_group(kind), *tokens(), value_mask=nothing)
    assert np.all(output == 0.0)


@every_kind
def test_map_times_values_is_the_output(kind):
    """What `return_attention_scores` shows is what the heads do."""
    group, arrays = built_group(kind), tokens()
    eye = np.broadcast_to(
        np.eye(LENGTH, dtype="float32"), (BATCH, HEADS, LENGTH, LENGTH)
    )
    joined = np.concatenate([arrays[2], eye], axis=-1)
    output, _ = golden_cases.run(group, *arrays[:2], joined)
    golden_cases.assert_close(output[..., DIM:] @ arrays[2], output[..., :DIM], 1e-4)


@every_kind
def test_settings_and_weights_survive_saving(kind, tmp_path):
    attention = layers.MixedAttention(
        [KINDS[kind](name=kind)], DIM, kernel_initializer="ones", name="attention"
    )
    helpers.assert_keeps_settings(attention.head_groups[0])
    x = helpers.normal(BATCH, LENGTH, DIM)
    helpers.assert_survives_saving(attention, tmp_path, x)


@every_kind
def test_gradients_are_finite(kind):
    group = built_group(kind)
    names = ("query", "key", "value")
    result = golden_cases.gradients(
        group,
        lambda output, losses: keras.ops.sum(output**2),
        dict(zip(names, tokens())) | {"value_mask": helpers.tail_mask(LENGTH, 0, 9)},
        wrt=names,
    )
    for gradient in (*result.inputs.values(), *result.variables.values()):
        assert np.all(np.isfinite(gradient)) and np.any(gradient)


@every_kind
def test_refuses_what_is_causal(kind):
    group = built_group(kind)
    with pytest.raises(ValueError, match="`use_causal_mask` must be False: .*=True"):
        group(*tokens(), use_causal_mask=True)
    with pytest.raises(ValueError, match=f"Received: {type(group).__name__}"):
        built_attention(kind).make_cache(1, LENGTH)
    with pytest.raises(ValueError, match="`key_shift` must be 0: .*key_shift=1"):
        KINDS[kind](key_shift=1)


@every_kind
def test_refuses_what_needs_logits_of_keys(kind):
    group, bias = built_group(kind), helpers.normal(BATCH, LENGTH)
    with pytest.raises(ValueError, match=r"`token_bias` must be None: .*\(2, 1, 14\)"):
        group(*tokens(), token_bias=bias)
    for name, value in (
        ("max_relative_position", 3),
        ("token_bias_weight", "trainable"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be None: .*{name}="):
            KINDS[kind](**{name: value})


@pytest.mark.parametrize("kind", ["linformer", "linformer_of_each_head"])
def test_steps_of_attention_to_a_memory(kind):
    helpers.assert_steps_read_a_memory(built_attention(kind), DIM)
