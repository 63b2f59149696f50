"""Tests of attention inside clusters by the splash kernel of JAX."""

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf.layers.routing import splash_attention
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, LENGTH, DIM = 2, 2, 150, 12
ON_JAX = keras.backend.backend() == "jax"
on_jax = pytest.mark.skipif(not ON_JAX, reason="the kernel is that of JAX")


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel runs on any device, in blocks of which there are several."""
    monkeypatch.setattr(splash_attention, "INTERPRET", True)
    monkeypatch.setattr(splash_attention, "LARGEST_BLOCK", 128)


def built_group(implementation, cls=layers.RoutedHeads, **options):
    options = {"attention_implementation": implementation, **options}
    group = cls(HEADS, 4, 20, name="heads", **options)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    helpers.randomize(group)
    return group


def inputs(**options):
    query, value = (
        helpers.normal(BATCH, HEADS, LENGTH, DIM, seed=seed) for seed in range(2)
    )
    return {"query": query, "value": value, "use_causal_mask": True, **options}


def results(implementation, padding, **options):
    group = built_group(implementation, **options)
    masks = {}
    if padding:
        real = helpers.mask_with_a_hole(LENGTH, LENGTH, 99)
        masks = {"query_mask": real, "value_mask": real}
    upstream = helpers.normal(BATCH, HEADS, LENGTH, DIM, seed=5)

    def objective(output, losses):
        return ops.sum(ops.cast(output, "float32") * upstream) + sum(losses)

    arguments = inputs(training=True, **masks)
    found = golden_cases.gradients(group, objective, arguments, ("query", "value"))
    state = [golden_cases.to_numpy(x) for x in group.non_trainable_variables]
    return [found.outputs, *found.inputs.values(), *state]


@on_jax
@pytest.mark.parametrize(
    "padding, options",
    [
        (True, {}),
        (True, {"key_shift": 1}),
        pytest.param(False, {"key_shift": 1}, marks=pytest.mark.thorough),
        pytest.param(True, {"cls": layers.HashedHeads}, marks=pytest.mark.thorough),
    ],
)
def test_equals_the_plain_path(padding, options, interpreted):
    expected = results("plain", padding, **options)
    found = results("splash", padding, **options)
    for actual, wanted in zip(found, expected, strict=True):
        golden_cases.assert_close(actual, wanted, 1e-5)
    assert np.any(found[0] != 0.0) and (not padding or np.any(found[0] == 0.0))


@on_jax
def test_equals_the_plain_path_in_bfloat16(interpreted):
    outputs = [
        results(each, True, dtype="mixed_bfloat16")[0].astype("float32")
        for each in ("splash", "plain")
    ]
    golden_cases.assert_close(*outputs, 2e-2)


@on_jax
def test_later_tokens_change_no_bit_of_earlier_outputs(interpreted):
    group = built_group("splash", key_shift=1)
    call = helpers.compiled(
        lambda query, value: group(query, None, value, use_causal_mask=True)
    )
    query, value = (inputs()[name] for name in ("query", "value"))
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

    group = built_group("auto", key_shift=1)
    monkeypatch.setattr(splash_attention, "lack_of_device", lambda: None)

    def loss(query, value):
        with keras.StatelessScope(collect_losses=True):
            return ops.sum(group(query, None, value, use_causal_mask=True))

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    arguments = [inputs()[name] for name in ("query", "value")]
    exported = jax.export.export(step, platforms=["tpu"])(*arguments)
    assert exported.mlir_module().count("tpu_custom_call") == 3


REFUSED = {
    "relative positions": ({"max_relative_position": 4}, {}),
    "entmax": ({"entmax_alpha": 1.5}, {}),
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
    group = built_group("splash", **options)
    arguments = inputs(**arguments)
    if group.needs_keys:
        arguments["key"] = arguments["query"]
    with pytest.raises(ValueError, match=f'must be "auto" or "plain".*{reason}'):
        group(**arguments)


def test_the_kernel_needs_a_tpu():
    group = built_group("splash")
    reason = "there is no TPU" if ON_JAX else "the kernel is JAX's"
    with pytest.raises(ValueError, match=reason):
        group(**inputs())


def test_other_heads_are_plain():
    group = layers.LocalHeads(HEADS, (8,), attention_implementation="splash")
    x = helpers.normal(BATCH, HEADS, 16, DIM)
    group.build(x.shape, x.shape, x.shape)
    plain = layers.LocalHeads(HEADS, (8,))
    plain.build(x.shape, x.shape, x.shape)
    outputs = [each(x, x, x, use_causal_mask=True) for each in (group, plain)]
    np.testing.assert_array_equal(*golden_cases.to_numpy(outputs))
