"""Tests of what any heads may have: a soft cap, normalised queries and keys, entmax.

`oracle_test` has what these compute in every kind of heads.
"""

import functools

import numpy as np
import pytest
from keras import ops
from keras_hub.src.models.gemma.gemma_attention import CachedGemmaAttention
from keras_hub.src.models.gemma3.gemma3_attention import CachedGemma3Attention

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.zoo import cases

BATCH, HEADS, LENGTH, DIM = 2, 2, 24, 6
WAYS = {"capped": {"logit_soft_cap": 1.5}, "normalised": {"qk_norm": True}}
every_way = pytest.mark.parametrize("way", WAYS)


sequences = functools.partial(helpers.streams, LENGTH)


@pytest.mark.parametrize("kind", ["BlockPairHeads", "LinformerHeads", "SinkhornHeads"])
def test_near_zero_queries_that_see_the_same_read_the_same(kind):
    outputs = []
    for cap in (None, 1e-7):
        group = cases.SMALL[kind](logit_soft_cap=cap)
        group.build(*[(BATCH, HEADS, 8, DIM)] * 3)
        helpers.randomize(group)
        output, _ = golden_cases.run(group, *(x[:, :, :8] for x in sequences()))
        outputs.append(output[:, :, 1] - output[:, :, 0])
    without, within = (np.abs(x).max() for x in outputs)
    assert without > 0.1 and within < 1e-5


@every_way
def test_as_in_gemma(way):
    """Gemma 2 has the cap, Gemma 3 the norms, with scales one more than its weights."""
    gemma = CachedGemmaAttention(DIM, HEADS, HEADS, logit_soft_cap=1.5)
    if way == "normalised":
        options = {"use_query_key_norm": True, "rope_wavelength": 10000.0}
        gemma = CachedGemma3Attention(DIM, HEADS, HEADS, **options)
    x = helpers.normal(BATCH, LENGTH, 8) * np.float32(0.1)  # epsilon counts
    gemma.build(x.shape)
    group = layers.FullHeads(HEADS, rotary_positions=True)
    attention = helpers.attention(group, key_dim=DIM, **WAYS[way])
    for name in ("query", "key", "value"):
        kernel = 0.1 * helpers.normal(HEADS, 8, DIM, seed=len(name))
        getattr(gemma, f"{name}_dense").kernel.assign(kernel)
        kernel = np.moveaxis(kernel, 0, 1).reshape(8, HEADS * DIM)
        getattr(attention, f"{name}_kernel").assign(kernel)
    kernel = helpers.normal(HEADS, DIM, 8)
    gemma.output_dense.kernel.assign(kernel)
    attention.output_kernel.assign(kernel.reshape(HEADS * DIM, 8))
    for name in ("query", "key") if way == "normalised" else ():
        scale = helpers.normal(DIM, seed=20 + len(name))
        getattr(gemma, f"{name}_norm").scale.assign(scale)
        getattr(group, f"{name}_scale").assign(1 + scale)
    causal = np.broadcast_to(np.tri(LENGTH, dtype="bool"), (BATCH, LENGTH, LENGTH))
    call = helpers.compiled(lambda x, mask: gemma(x, attention_mask=mask), None)
    found, _ = golden_cases.run(attention, x, use_causal_mask=True)
    golden_cases.assert_close(found, call(x, causal), 1e-5)


def test_gradients_are_finite_where_the_cap_leaves_none():
    result = golden_cases.gradients(
        helpers.attention(
            layers.LocalHeads(1, (4,)), layers.RoutedHeads(1, 3, 6), **WAYS["capped"]
        ),
        lambda output, losses: ops.sum(ops.sin(output)),
        {"query": np.float32(1e4) * helpers.normal(BATCH, LENGTH, 8)}
        | {"use_causal_mask": True, "training": True},
        wrt=("query",),
    )
    for gradient in (*result.inputs.values(), *result.variables.values()):
        assert np.all(np.isfinite(gradient))


def test_scales_learn_with_grouped_queries_and_half_precision():
    dtype = {"dtype": "mixed_bfloat16"}
    groups = [
        layers.LocalHeads(2, (4,), **dtype),
        layers.RoutedHeads(2, 3, 6, share_query_key=False, **dtype),
    ]
    options = {"num_key_value_heads": 2, "qk_norm": True, **dtype}
    attention = helpers.attention(*groups, **options)
    result = golden_cases.gradients(
        attention,
        lambda output, losses: ops.sum(ops.sin(ops.cast(output, "float32"))),
        {"query": helpers.normal(BATCH, LENGTH, 8)}
        | {"use_causal_mask": True, "training": True},
    )
    scales = [g for path, g in result.variables.items() if path.endswith("_scale")]
    assert len(scales) == 4
    for gradient in scales:
        assert np.all(np.isfinite(gradient)) and np.any(gradient)


def test_settings_and_saving(tmp_path):
    own = layers.LocalHeads(1, (4,), logit_soft_cap=7)
    options = {"logit_soft_cap": 1.5, "qk_norm": True}
    attention = layers.MixedAttention([own, layers.FullHeads(1)], DIM, **options)
    assert [g.logit_soft_cap for g in attention.head_groups] == [7, 1.5]
    x = helpers.normal(BATCH, LENGTH, 8)
    helpers.assert_survives_saving(attention, tmp_path, x, use_causal_mask=True)
