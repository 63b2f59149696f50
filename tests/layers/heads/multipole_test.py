"""Multipole heads against their definition; tables of cases have the rest."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf.layers.support.masks import Segments
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.layers import multipole_oracle

LENGTH, DIM = 50, 6
SIZES = {"num_clusters": 5, "attention_window": 8, "clusters_per_query": 2}
NEAR = {"num_recent": 6, "num_sinks": 2}
#: All pairs of a window are near.
ALIGNED = {"num_recent": 20, "block_length": 16}
ROTARY = {"rotary_positions": True, "rotary_wavelength": 50}
CASES = {
    "plain": {},
    "aligned": ALIGNED,
    "aligned_at_once": {"num_recent": 16, "block_length": 16},
    "single": {"block_length": 1},
    "none_near": {"num_recent": 0, "num_sinks": 0},
    "blocks_near": {"num_recent": 0, "block_length": 16},
    "shifted": {"key_shift": 1},
    "shifted_aligned": {"key_shift": 1, **ALIGNED},
    "dropped": {"summaries": False},
    "capped": {"logit_soft_cap": 1.5},
    "layer": {"normalization": "layer", "qk_norm": True},
    "qk_norm": {"qk_norm": True, **ROTARY},
    "far": {"far_distance": 10, **ROTARY},
    "sink_logits": {"sink_logits": True},
    "budget": {"clusters_per_query": 4, "members_per_cluster": 6},
    "centroid": {"choice": "centroid"},
    "all_near": {"num_recent": 100, "block_length": 7},
    "whole": {"keeps_all": True, "logit_soft_cap": 1.5},
    "all_whole": {"clusters_per_query": 5, "keeps_all": True, "logit_soft_cap": 1.5},
    "all_read": {"clusters_per_query": 5, "attention_window": 5 * LENGTH},
}
FEW = ("plain", "aligned", "shifted", "far", "sink_logits", "budget")


def with_options(first, *further):
    """Returns parameters, of which JAX has the first one; compiling takes long."""
    further = [pytest.param(x, marks=helpers.FURTHER_ON_JAX) for x in further]
    return pytest.mark.parametrize("options", [first, *further])


def made(num_heads=2, num_key_heads=2, **options):
    group = layers.MultipoleHeads(num_heads, **{**SIZES, **NEAR, **options})
    group.num_key_value_heads = num_key_heads
    return helpers.built(group, DIM)


def inputs(num_heads=2, num_key_heads=2):
    heads = num_heads, num_key_heads, num_key_heads
    return [helpers.normal(2, h, LENGTH, DIM, seed=i) for i, h in enumerate(heads)]


def assert_as_defined(
    group, arrays, mask=None, bias=None, ids=None, causal=True, cross=False
):
    about = {"token_bias": bias, "value_mask": mask, "segments": ids}
    about = {name: x for name, x in about.items() if x is not None}
    form = {"use_causal_mask": causal, "is_cross_attention": cross}

    def attend(arrays, about):
        if "segments" in about:
            about = {**about, "segments": Segments.of_ids(about["segments"])}
        own = {} if cross else {"query_mask": about.get("value_mask")}
        return group(*arrays, **about, **own, **form)

    found = helpers.compiled(attend, jit_compile=None)(arrays, about)
    if ids is not None:
        # An id that comes again is another document.
        ids = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)
    expected, _ = multipole_oracle.attend(
        group, *arrays, mask, bias, ids, causal=causal, cross=cross
    )
    if mask is not None and not cross:
        expected = np.where(mask[:, None, :, None], expected, 0)
    golden_cases.assert_close(found, expected, 2e-5)


@pytest.mark.parametrize("case", kinds.some(CASES, FEW))
def test_definition(case):
    assert_as_defined(made(**CASES[case]), inputs())


@with_options({}, {"key_shift": 1}, ALIGNED)
def test_padding_and_biases(options):
    """Documents start at their first real token."""
    mask = helpers.tail_mask(LENGTH, LENGTH, 40)
    mask[0, :9] = mask[0, 20] = False
    bias = helpers.normal(2, LENGTH, seed=5)
    assert_as_defined(made(4, **options), inputs(4), mask, bias)


@with_options({"key_shift": 1, "num_recent": 3, **ROTARY}, {"logit_soft_cap": 1.5})
def test_packed_documents(options):
    ids = np.repeat([[1, 2, 3, 1, 4, 4]], [13, 20, 2, 1, 4, 10], axis=1)
    ids = np.concatenate([ids, np.repeat([[5, 6]], [45, 5], axis=1)])
    mask = np.ones(ids.shape, bool)
    mask[0, [13, 14, 22, 41]] = False
    assert_as_defined(
        made(4, **options), inputs(4), mask, helpers.normal(2, LENGTH), ids
    )


@with_options({}, {"num_sinks": 0, "num_recent": 21})
def test_both_sides(options):
    """Without a causal mask, pairs on both sides are near; documents stay apart."""
    assert_as_defined(made(4, **options), inputs(4), causal=False)
    ids = np.repeat([[1, 2, 3], [4, 4, 5]], [25, 20, 5], axis=1)
    mask = np.ones(ids.shape, bool)
    mask[0, 25:28] = False
    bias = helpers.normal(2, LENGTH)
    assert_as_defined(made(2, **options), inputs(), mask, bias, ids, causal=False)


@with_options(
    {}, {"num_sinks": 0, "logit_soft_cap": 1.5}, {"choice": "centroid", "num_sinks": 0}
)
def test_another_sequence(options):
    query, key, value = inputs(4)
    mask = helpers.mask_with_a_hole(LENGTH, LENGTH, 30)
    arrays, bias = [query[:, :, :9], key, value], helpers.normal(2, LENGTH)
    assert_as_defined(made(4, **options), arrays, mask, bias, causal=False, cross=True)


@helpers.further_on_jax
@pytest.mark.parametrize("keeps_all", kinds.some((False, True), [False]))
def test_a_cache_forgets_documents(keeps_all):
    """Also where many tokens follow before any pair stops being near."""
    options = {**SIZES, **NEAR, "keeps_all": keeps_all}
    attention = helpers.attention(layers.MultipoleHeads(2, **options), key_dim=DIM)
    x = helpers.normal(1, LENGTH, 8)
    cache, outputs = attention.make_cache(1, LENGTH), []
    for first, last, number in ((0, 20, 1), (20, 22, 2), (22, LENGTH, None)):
        ids = None if number is None else np.full((1, last - first), number)
        output, cache = attention(
            x[:, first:last], cache=cache, cache_index=first, segment_ids=ids
        )
        outputs.append(golden_cases.to_numpy(output))
    expected = golden_cases.to_numpy(attention(x[:, 20:], use_causal_mask=True))
    golden_cases.assert_close(np.concatenate(outputs[1:], axis=1), expected, 2e-5)


@pytest.mark.parametrize("summaries", [True, False])
def test_a_match_that_is_not_read_teaches(summaries):
    """Through the mean of its cluster, a key has a gradient."""
    group = made(num_clusters=2, clusters_per_query=1, summaries=summaries)
    direction = np.eye(DIM, dtype="float32")[0]
    group.kmeans.centroids.assign(np.stack([[direction, -direction]] * 2))
    query, key, value = inputs()
    # Keys of odd places are in the cluster that queries do not read.
    is_read = np.arange(LENGTH)[:, None] % 2 == 0
    key = key + np.where(is_read, 5 * direction, -5 * direction)

    def last_outputs(key):
        output = group(query + 9 * direction, key, value, use_causal_mask=True)
        return keras.ops.sum(output[:, :, -1])

    differentiate = helpers.compiled(golden_cases.gradient(last_outputs), None)
    gradient = differentiate(key.astype("float32"))
    assert np.all(np.any(gradient[:, :, ::2], axis=(2, 3)))
    assert np.any(gradient[:, :, 3:40:2]) == summaries


def test_large_logits_have_gradients():
    """Slots that hold no read have weights that overflow, and count for nothing."""
    group, (query, key, value) = made(num_recent=0), inputs()

    def sum_of_outputs(key):
        return keras.ops.sum(group(100 * query, key, value, use_causal_mask=True))

    differentiate = helpers.compiled(golden_cases.gradient(sum_of_outputs), None)
    gradient = differentiate(key.astype("float32"))
    assert np.isfinite(golden_cases.to_numpy(gradient)).all()


def test_padding_before_a_document_moves_its_gradients():
    group, number = made(**ALIGNED), 7
    arrays = dict(zip(("query", "key", "value"), inputs()))

    def gradients(**given):
        return golden_cases.gradients(
            group,
            lambda output, _: keras.ops.sum(keras.ops.sin(output)),
            {**given, "use_causal_mask": True},
            wrt=tuple(arrays),
            variables={},
        ).inputs

    before = [(0, 0), (0, 0), (number, 0), (0, 0)]
    padded = {name: np.pad(x, before) for name, x in arrays.items()}
    mask = np.broadcast_to(np.arange(number + LENGTH) >= number, (2, number + LENGTH))
    found = gradients(**padded, query_mask=mask, value_mask=mask)
    for name, gradient in gradients(**arrays).items():
        golden_cases.assert_close(found[name], np.pad(gradient, before), 1e-5)


@pytest.mark.parametrize(
    "case",
    [
        "all_read",
        pytest.param("all_near", marks=helpers.FURTHER_ON_JAX),
        pytest.param("all_whole", marks=helpers.FURTHER_ON_JAX),
    ],
)
def test_equals_full_attention_where_it_should(case):
    """In gradients, too."""
    arrays = dict(zip(("query", "key", "value"), inputs()))
    cap = CASES[case].get("logit_soft_cap")
    groups = layers.FullHeads(2, logit_soft_cap=cap), made(**CASES[case])
    expected, found = (
        golden_cases.gradients(
            group,
            lambda output, _: keras.ops.sum(keras.ops.sin(output)),
            {**arrays, "use_causal_mask": True},
            wrt=("query", "key", "value"),
            variables={},
        )
        for group in groups
    )
    golden_cases.assert_close(found.outputs, expected.outputs, 1e-5)
    for name, gradient in expected.inputs.items():
        golden_cases.assert_close(found.inputs[name], gradient, 1e-5)
