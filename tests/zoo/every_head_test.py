"""Tests of what holds for all heads of the zoo; `tests/layers` has more of it."""

import keras
import numpy as np
import pytest
from keras import ops

from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.zoo import cases

BATCH, HEADS, LENGTH, DIM = 2, cases.HEADS, 13, 6
# With keys of their own, or values that are no sums of those of the tokens.
WITH_MORE = ("learned", "convolution", "max", "induced")
NORMALISED = ("convolution_and_window", "long_short", "long_short_of_the_whole")
# Rounding may choose other blocks or clusters.
CHOOSING = ("best_blocks", "native_sparse", "native_sparse_shared", "clustered_queries")
CHOOSING += ("mixed_blocks", "indexed", "indexed_copies")
# Their logits are weights, so nothing reads the projection of the queries; an indexer
# learns by a loss of its own.
NOT_BY_OUTPUTS = ("random_logits", "random_factors", "indexed", "indexed_copies")


def built_attention(kind, own=None, **options):
    group = cases.ALL[kind](**(own or {}), **options)
    return helpers.attention(group, key_dim=DIM, dim=DIM, **options)


def is_causal(kind):
    return kind not in cases.NOT_CAUSAL


@pytest.mark.parametrize(
    "kind", kinds.some(cases.ALL, ("long_short", "nystrom", "linformer", "convolution"))
)
def test_maps_show_who_is_seen(kind):
    x, relative = helpers.normal(BATCH, LENGTH, DIM), {}
    if "max_relative_position" in cases.ALL[kind].keywords:
        relative = {"max_relative_position": None}
    attention = built_attention(kind, relative)
    if kind.startswith("native_sparse"):
        with pytest.raises(ValueError, match="`return_attention_scores`"):
            attention(x, use_causal_mask=True, return_attention_scores=True)
        return
    (output, scores), _ = golden_cases.run(
        attention, x, use_causal_mask=is_causal(kind), return_attention_scores=True
    )
    later = np.broadcast_to(~np.tri(LENGTH, dtype="bool"), scores.shape)
    assert np.any(scores[later]) == (not is_causal(kind))
    sums = scores.sum(axis=-1)
    if kind in WITH_MORE:
        assert np.all(scores >= 0) and np.all(sums < 1 + 1e-5) and np.any(sums > 0.1)
    elif kind in NORMALISED:
        np.testing.assert_allclose(sums, 1.0, atol=1e-5)
    else:
        kernels = [attention.value_kernel, attention.output_kernel]
        value_kernel, output_kernel = golden_cases.to_numpy(kernels)
        values = (x @ value_kernel).reshape(BATCH, LENGTH, HEADS, DIM)
        seen = np.einsum("bhij,bjhd->bihd", scores, values)
        expected = seen.reshape(BATCH, LENGTH, -1) @ output_kernel
        golden_cases.assert_close(output, expected, 1e-4)


@pytest.mark.parametrize(
    "kind",
    kinds.some(
        [x for x in cases.ALL if x not in NOT_BY_OUTPUTS],
        ("luna", "induced", "native_sparse", "sinkhorn"),
    ),
)
def test_learns_all_weights(kind):
    """Beside a sequence of padding alone."""
    attention = built_attention(kind)
    result = golden_cases.gradients(
        attention,
        lambda output, losses: ops.sum(output**2),
        {
            "query": helpers.normal(BATCH, 14, DIM),
            "query_mask": helpers.tail_mask(14, 0, 13),
            "use_causal_mask": is_causal(kind),
        },
        wrt=("query",),
    )
    for gradient in (*result.variables.values(), *result.inputs.values()):
        assert np.all(np.isfinite(gradient)) and np.any(gradient)


@pytest.mark.parametrize(
    "kind", kinds.some([x for x in cases.ALL if x not in CHOOSING], ("luna", "induced"))
)
def test_half_precision(kind):
    dtype = "mixed_bfloat16" if kind == "luna" else "mixed_float16"
    half, exact = built_attention(kind, dtype=dtype), built_attention(kind)
    x = helpers.normal(BATCH, LENGTH, DIM) / 4
    output, expected = (
        golden_cases.run(a, x, use_causal_mask=is_causal(kind))[0]
        for a in (half, exact)
    )
    assert keras.backend.standardize_dtype(output.dtype) == half.compute_dtype
    golden_cases.assert_close(output, expected, 0.05)


@pytest.mark.parametrize("hidden", [-1e9, -np.inf])
@pytest.mark.parametrize("kind", ["linear", "luna", "long_short"])
def test_a_bias_hides_tokens(kind, hidden):
    """As long as others are visible; what is hidden has no influence."""
    attention, x = built_attention(kind), helpers.normal(BATCH, LENGTH, DIM)
    bias = np.zeros((BATCH, LENGTH), "float32")
    hides = (np.arange(LENGTH) % 5 == 3) | (np.arange(LENGTH) < 2)
    bias[:, hides] = hidden
    before, after = (
        golden_cases.run(attention, each, token_bias=bias, use_causal_mask=True)[0]
        for each in (x, x + hides[:, None].astype("float32"))
    )
    golden_cases.assert_close(after[:, ~hides], before[:, ~hides], 1e-5)


@pytest.mark.parametrize("kind", kinds.some(cases.NOT_CAUSAL, ("nystrom", "induced")))
def test_without_a_causal_form(kind):
    """Such heads refuse the mask; queries that see nothing get zero."""
    attention, x = built_attention(kind), helpers.normal(BATCH, LENGTH, DIM)
    rule, name = "`use_causal_mask`.*use_causal_mask=True", "Received: "
    if kind == "long_short_of_the_whole":
        rule = name = "`segment_length`.*segment_length=None"
    else:
        name += type(attention.head_groups[0]).__name__
    with pytest.raises(ValueError, match=rule):
        attention(x, use_causal_mask=True)
    with pytest.raises(ValueError, match=name):
        attention.make_cache(1, LENGTH)
    nothing = np.zeros((BATCH, LENGTH), "bool")
    output, _ = golden_cases.run(attention, x, value_mask=nothing)
    assert np.all(output == 0.0)


OF_ONE = [kind for kind in cases.ALL if kind not in (*cases.OF_TWO, "random_features")]


@pytest.mark.parametrize("kind", [*OF_ONE, *sorted(cases.WITHOUT_BIAS - set(OF_ONE))])
def test_refuses_other_sequences_and_biases(kind):
    attention, x = built_attention(kind), helpers.normal(BATCH, LENGTH, DIM)
    if kind in OF_ONE:
        rule = "is_cross_attention=True|`value`"
        options = {"use_causal_mask": kind.startswith("native_sparse")}
        with pytest.raises(ValueError, match=rule):
            attention(x, x[:, ::-1], self_attention=False, **options)
        if kind == "nystrom":
            with pytest.raises(ValueError, match=rule):
                attention.make_cache(1, 4, value=x)
    if kind in cases.WITHOUT_BIAS:
        options = {"use_causal_mask": is_causal(kind)}
        with pytest.raises(ValueError, match=r"`token_bias`.*token_bias\.shape="):
            attention(x, token_bias=helpers.normal(BATCH, LENGTH), **options)
