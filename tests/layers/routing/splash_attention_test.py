"""Tests of attention inside clusters by the splash kernel of JAX."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from routing_tf.layers.routing import splash_attention
from tests import golden_cases
from tests.layers import helpers
from tests.layers.softmax import fused_attention_test as fused

BATCH, HEADS, LENGTH, DIM = fused.BATCH, fused.HEADS, 150, fused.DIM
routed = functools.partial(layers.RoutedHeads, HEADS, 4, 20)
hashed = functools.partial(layers.HashedHeads, HEADS, 4, 20)
on_jax = fused.on_jax


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel runs on any device, in blocks of which there are several."""
    monkeypatch.setattr(splash_attention, "INTERPRET", True)
    monkeypatch.setattr(splash_attention, "LARGEST_BLOCK", 128)


built_group = functools.partial(fused.built_group, length=LENGTH)
results = functools.partial(fused.results, length=LENGTH)


def inputs(group, **options):
    return {**fused.inputs(group, LENGTH), "use_causal_mask": True, **options}


@on_jax
@pytest.mark.parametrize(
    "padded, make, key_shift",
    [
        (True, routed, 0),
        (True, routed, 1),
        pytest.param(False, routed, 1, marks=pytest.mark.thorough),
        pytest.param(True, hashed, 0, marks=pytest.mark.thorough),
    ],
)
def test_equals_the_plain_path(padded, make, key_shift, interpreted):
    options = {"padded": padded, "key_shift": key_shift}
    (actual, moved), (expected, state) = (
        results(make, each, **options) for each in ("splash", "plain")
    )
    helpers.assert_same_results(actual, expected)
    for found, wanted in zip(moved, state, strict=True):
        golden_cases.assert_close(found, wanted, 1e-5)
    output = actual.outputs
    assert np.any(output != 0.0) and (not padded or np.any(output == 0.0))


@on_jax
def test_equals_the_plain_path_in_bfloat16(interpreted):
    outputs = [
        results(routed, each, dtype="mixed_bfloat16")[0].outputs.astype("float32")
        for each in ("splash", "plain")
    ]
    golden_cases.assert_close(*outputs, 2e-2)


@on_jax
def test_later_tokens_change_no_bit_of_earlier_outputs(interpreted):
    group = built_group(routed, "splash", key_shift=1)
    call = helpers.compiled(
        lambda query, value: group(query, None, value, use_causal_mask=True)
    )
    query, value = (inputs(group)[name] for name in ("query", "value"))
    before = call(query, value)
    for seed, last in ((7, 40), (8, 101), (9, 140)):
        later = (np.arange(LENGTH) > last)[:, None]
        other = helpers.normal(*query.shape, seed=seed)
        after = call(np.where(later, other, query), np.where(later, other, value))
        np.testing.assert_array_equal(after[:, :, : last + 1], before[:, :, : last + 1])


@on_jax
def test_a_step_is_lowered_for_tpus(monkeypatch):
    """The kernel is in it, forward and for both gradients."""
    import jax

    group = built_group(routed, "auto", key_shift=1)
    monkeypatch.setattr(splash_attention, "lack_of_device", lambda: None)

    def loss(query, value):
        with keras.StatelessScope(collect_losses=True):
            return ops.sum(group(query, None, value, use_causal_mask=True))

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    arguments = [inputs(group)[name] for name in ("query", "value")]
    exported = jax.export.export(step, platforms=["tpu"])(*arguments)
    assert exported.mlir_module().count("tpu_custom_call") == 3


SPLASH = "`attention_implementation`.*attention_implementation='splash'"
REFUSED = {
    "relative positions": ({"max_relative_position": 4}, {}),
    "entmax": ({"cls": functools.partial(zoo.EntmaxRoutedHeads, HEADS, 4, 20)}, {}),
    "a soft cap": ({"logit_soft_cap": 1.5}, {}),
    "dropout": ({"dropout": 0.5}, {"training": True}),
    "a bias of tokens": ({}, {"token_bias": np.zeros((BATCH, LENGTH), "float32")}),
    "not in float16": ({"dtype": "mixed_float16"}, {}),
    "apart from keys": ({"share_query_key": False}, {}),
}


@on_jax
@pytest.mark.parametrize("reason", REFUSED)
def test_what_needs_logits_is_refused(reason, interpreted):
    options, arguments = REFUSED[reason]
    options = {"cls": routed, **options}
    group = built_group(options.pop("cls"), "splash", **options)
    with pytest.raises(ValueError, match=SPLASH):
        group(**inputs(group, **arguments))


def test_the_kernel_needs_a_tpu():
    group = built_group(routed, "splash")
    with pytest.raises(ValueError, match=SPLASH):
        group(**inputs(group))


def test_other_heads_are_plain():
    outputs = []
    for each in ("splash", "plain"):
        group = built_group(fused.KINDS["local"], each)
        outputs.append(golden_cases.run(group, **inputs(group))[0])
    np.testing.assert_array_equal(*outputs)
