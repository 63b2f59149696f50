"""Tests of what any heads may have: a soft cap, normalised queries and keys, entmax.

`oracle_test` has what these compute in every kind of heads.
"""

import numpy as np
import pytest
from keras import ops
from keras_hub.src.models.gemma.gemma_attention import CachedGemmaAttention
from keras_hub.src.models.gemma3.gemma3_attention import CachedGemma3Attention

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo import cases

BATCH, HEADS, LENGTH, DIM = 2, 2, 24, 6
WAYS = {"capped": {"logit_soft_cap": 1.5}, "normalised": {"qk_norm": True}}


@pytest.mark.parametrize("kind", ["BlockPairHeads", "LinformerHeads", "SinkhornHeads"])
def test_near_zero_queries_that_see_the_same_read_the_same(kind):
    outputs = []
    for cap in (None, 1e-7):
        group = helpers.built(cases.SMALL[kind](logit_soft_cap=cap))
        output, _ = golden_cases.run(group, *helpers.streams(8))
        outputs.append(output[:, :, 1] - output[:, :, 0])
    without, within = (np.abs(x).max() for x in outputs)
    assert without > 0.1 and within < 1e-5


@pytest.mark.parametrize("way", WAYS)
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


HALF, FLOAT16 = {"dtype": "mixed_bfloat16"}, {"dtype": "mixed_float16"}
PREFIX = {"prefix_block_size": 5, "max_relative_position": 3, "dropout": 0.5}
SCOPE = {"routing_scope": "prefix"}
HIDDEN = np.where(np.arange(LENGTH) == 2, -np.inf, np.arange(LENGTH) / 7)
X = helpers.normal(BATCH, LENGTH, 8)
CAUSAL = {"query": X, "use_causal_mask": True}
# An attention layer, and arguments of its call.
LEARN = {
    "scales of grouped queries in half precision": (
        lambda: helpers.attention(
            layers.LocalHeads(2, (4,), **HALF),
            layers.RoutedHeads(2, 3, 6, share_query_key=False, **HALF),
            **{"num_key_value_heads": 2, "qk_norm": True, **HALF},
        ),
        CAUSAL,
    ),
    "the weight of a bias that hides a key": (
        lambda: helpers.attention(layers.FullHeads(1, token_bias_weight="trainable")),
        {**CAUSAL, "token_bias": np.stack([HIDDEN] * BATCH).astype("float32")},
    ),
    "sorted blocks with large scores": (
        lambda: helpers.attention(zoo.SinkhornHeads(2, 4, 3, 0.6)),
        {**CAUSAL, "query": 10 * X},
    ),
    "all sorted blocks with large scores": (
        lambda: helpers.attention(zoo.SinkhornHeads(2, 4, 3, 0.6)),
        {"query": 10 * X},
    ),
    # In float16 the logits of keys that two masks hide are -inf.
    "entmax beside keys that two masks hide": (
        lambda: helpers.attention(
            zoo.EntmaxFullHeads(HEADS, entmax_alpha="learned", **FLOAT16), **FLOAT16
        ),
        {**CAUSAL, "query_mask": helpers.tail_mask(LENGTH, 3, 3)},
    ),
    "members of prefixes with dropout": (
        lambda: helpers.attention(
            layers.RoutedHeads(2, 3, 5, "expert_choice", **SCOPE, **PREFIX)
        ),
        {**CAUSAL, "query": X[:, :12]},
    ),
    "members of clusters in strides with dropout": (
        lambda: helpers.attention(layers.ClusterStridedHeads(2, 3, 5, **PREFIX)),
        {**CAUSAL, "query": X[:, :12]},
    ),
    "a cap that leaves nothing": (
        lambda: helpers.attention(
            layers.LocalHeads(1, (4,)), layers.RoutedHeads(1, 3, 6), **WAYS["capped"]
        ),
        {**CAUSAL, "query": np.float32(1e4) * X},
    ),
}


@pytest.mark.parametrize("name", LEARN)
def test_gradients_are_finite_and_reach_all_weights(name):
    make, arguments = LEARN[name]
    result = golden_cases.gradients(
        make(),
        lambda output, losses: ops.sum(ops.sin(ops.cast(output, "float32"))),
        {**arguments, "training": True},
        wrt=("query",),
    )
    for path, gradient in {**result.inputs, **result.variables}.items():
        assert np.all(np.isfinite(gradient)), path
        assert np.any(gradient) or name == "a cap that leaves nothing", path


def test_settings_and_saving(tmp_path):
    own = layers.LocalHeads(1, (4,), logit_soft_cap=7)
    options = {"logit_soft_cap": 1.5, "qk_norm": True}
    attention = layers.MixedAttention([own, layers.FullHeads(1)], DIM, **options)
    assert [g.logit_soft_cap for g in attention.head_groups] == [7, 1.5]
    x = helpers.normal(BATCH, LENGTH, 8)
    helpers.assert_survives_saving(attention, tmp_path, x, use_causal_mask=True)
