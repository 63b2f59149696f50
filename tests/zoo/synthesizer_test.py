"""Tests of Synthesizer heads, against NumPy."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import assert_follows

HEADS, DIM, MAX_LENGTH = 2, 6, 16
FORMS = [("dense", None), ("dense", 3), ("random", None), ("random", 3)]
every_form = pytest.mark.parametrize("kind, rank", FORMS)


def built_group(kind, rank, **options):
    options = {"max_length": MAX_LENGTH, "rank": rank, **options}
    group = zoo.SynthesizerHeads(HEADS, kind, **options)
    group.build((None, HEADS, None, DIM), None, (None, HEADS, None, DIM))
    return group


def logits(group, query):
    """The logits of the paper, in float64, for all places there may be."""
    weights = [golden_cases.to_numpy(w).astype("float64") for w in group.weights]
    if group.kind == "random" and group.rank is None:
        return weights[0][None]
    if group.kind == "random":
        return np.einsum("hik,hjk->hij", *weights)[None]
    hidden = np.maximum(query * query.shape[-1] ** 0.5, 0.0)
    parts = [np.einsum("bhid,hdj->bhij", hidden, w) for w in weights]
    if group.rank is None:
        return parts[0]
    number = parts[1].shape[-1]
    places = np.arange(group.rank * number)
    return parts[0][..., places // number] * parts[1][..., places % number]


def expected_output(group, query, key, value, real, bias, causal):
    length, nothing = query.shape[2], np.zeros_like(query)
    own = logits(group, query)[..., :length, :length] + bias[:, None, None]
    sees = real[:, None, None] & (np.tri(length, dtype="bool") | (not causal))
    return helpers.dense_attention(nothing, nothing, value, sees, own)[0]


@every_form
@pytest.mark.parametrize("causal, length", [(False, 11), (True, 16)])
def test_equals_the_formula(kind, rank, causal, length):
    group = zoo.SynthesizerHeads(HEADS, kind, MAX_LENGTH, rank)
    assert_follows(expected_output, group, length, has_bias=True, causal=causal)


@every_form
def test_starts_with_logits_like_those_of_dot_products(kind, rank):
    group = built_group(kind, rank, max_length=200)
    query = helpers.normal(1, HEADS, 200, DIM) * DIM**-0.5
    assert 0.3 < logits(group, query).std() < 1.6


def test_learns_what_the_layer_is_told_to():
    arguments = {"kind": "random", "rank": None}
    assert len(built_group(**arguments).trainable_weights) == 1
    assert built_group(**arguments, trainable=False).trainable_weights == []


def test_refusals():
    group = built_group("dense", None)
    message = "`max_length`.*max_length=16 .* 17 "
    query, _, value = helpers.streams(17)
    with pytest.raises(ValueError, match=message):
        group(query, None, value)
    with pytest.raises(ValueError, match=message):
        group.make_cache(1, 17)
    with pytest.raises(ValueError, match="`value`.*is_cross_attention=True"):
        group(*helpers.streams(5), is_cross_attention=True)
