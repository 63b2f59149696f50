"""Tests of what holds for every kind of heads."""

import numpy as np
import pytest

from routing_tf import layers
from routing_tf.zoo.parts.chosen_blocks import ReadsFeatures
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

BATCH, HEADS, LENGTH, DIM = 2, 2, 14, 6


def built_group(kind, **options):
    return helpers.built(kinds.CAUSAL[kind](**options))


def tokens(group):
    query, key, value = helpers.streams(LENGTH)
    arrays = {"query": query, "key": key if group.needs_keys else None, "value": value}
    if isinstance(group, ReadsFeatures):
        arrays["features"] = helpers.normal(BATCH, LENGTH, DIM, seed=3)
    return arrays


FEW = ("token_choice_apart_shifted", "threshold_apart", "prefix", "hashed_apart")
# Their queries compete for places, which hidden ones leave to others.
COMPETING = ("prefix_apart", "cluster_strided_apart", "prefix_apart_shifted")


@pytest.mark.parametrize(
    "kind",
    kinds.some(
        [
            *kinds.CLUSTERED,
            *(x for x in kinds.CAUSAL if "_apart" in x and x not in COMPETING),
        ],
        FEW,
    ),
)
def test_a_query_without_a_place_gets_zero(kind):
    """Its key is seen all the same, if only the mask of the queries hides it."""
    group = built_group(kind)
    real = np.ones((BATCH, LENGTH), "bool")
    query_mask = real.copy()
    query_mask[:, [3, 9]] = False
    about = {**tokens(group), "value_mask": real, "use_causal_mask": True}
    outputs = [
        golden_cases.run(group, **about, query_mask=mask)[0]
        for mask in (real, query_mask)
    ]
    expected = np.where(query_mask[:, None, :, None], outputs[0], 0.0)
    np.testing.assert_array_equal(outputs[1], expected)


@pytest.mark.parametrize("setting", ["fixed", "trainable"])
def test_the_weight_of_the_token_bias_starts_at_one(setting):
    """The golden cases have what it does, and its gradient."""
    group = kinds.CAUSAL["local"](token_bias_weight=setting)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    (weight,) = [w for w in group.weights if w.name == "token_bias_weight"]
    assert weight.trainable == (setting == "trainable")
    assert golden_cases.to_numpy(weight) == 1.0


@pytest.mark.parametrize("kind", kinds.SHIFTED)
def test_shifted_keys_are_for_causal_self_attention(kind):
    group = kinds.SHIFTED[kind]()
    arrays = tokens(group)
    for causal, cross in ((False, False), (False, True), (True, True)):
        received = f"use_causal_mask={causal}, is_cross_attention={cross}"
        with pytest.raises(ValueError, match=f"`key_shift=1` .*Received: {received}"):
            group(**arrays, use_causal_mask=causal, is_cross_attention=cross)


def test_a_group_without_a_pattern_says_so():
    group = layers.HeadGroup(1)
    group.build(*[(1, 1, 4, 2)] * 3)
    with pytest.raises(NotImplementedError):
        group(*[np.ones((1, 1, 4, 2), "float32")] * 3)


@pytest.mark.parametrize("kind", ["token_choice", "random", "hashed"])
def test_refuses_to_normalize_over_one_number(kind):
    with pytest.raises(ValueError, match="`key_dim`.*key_dim=1"):
        kinds.CAUSAL[kind]().build(*[(BATCH, HEADS, LENGTH, 1)] * 3)


def test_a_bias_of_integers_is_no_other_bias():
    group = layers.FullHeads(1, token_bias_weight="fixed")
    group.build(*[(None, 1, None, 4)] * 3)
    group.bias_weight.assign(0.5)
    query, bias = helpers.normal(1, 1, 5, 4), np.arange(5)[None]
    outputs = [
        golden_cases.run(group, query, query, query, token_bias=bias.astype(kind))[0]
        for kind in ("int32", "float32")
    ]
    np.testing.assert_array_equal(*outputs)
