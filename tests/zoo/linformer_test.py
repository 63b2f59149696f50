"""Tests of Linformer heads; `every_head_test` has what they refuse."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import HEADS
from tests.zoo.dense_blocks import assert_follows

MIXTURES = 4


def expected_output(group, query, key, value, real):
    def mixed(x, weight):
        mix = golden_cases.to_numpy(weight)[..., : x.shape[2], :]
        mix = np.broadcast_to(mix, (HEADS, *mix.shape[-2:]))
        return np.einsum("bhnd,bn,hnk->bhkd", x, real, mix)

    keys = mixed(key, group.key_projection)
    values = mixed(value, group.value_projection)
    return helpers.dense_attention(query, keys, values, True)[0]


@pytest.mark.parametrize("sharing", [None, "heads", "all"])
@pytest.mark.parametrize("length, memory_length", [(11, 11), (5, 14)])
def test_equals_the_formula(sharing, length, memory_length):
    group = zoo.LinformerHeads(HEADS, 14, MIXTURES, sharing)
    assert_follows(expected_output, group, length, memory_length)
    assert len(group.weights) == (1 if sharing == "all" else 2)


@pytest.mark.parametrize("sharing", ["heads", "all"])
def test_equals_another_implementation(sharing):
    """Of the package linformer; see `tools/peers`."""
    weights = golden_cases.load("peers/linformer.npz").group(sharing)
    max_length, num_projected = weights["proj_k"].shape
    group = zoo.LinformerHeads(3, max_length, num_projected, sharing)
    attention = helpers.attention(group, dim=12)
    group.key_projection.assign(weights["proj_k"])
    if sharing == "heads":
        group.value_projection.assign(weights["proj_v"])
    helpers.assign(
        attention,
        query_kernel=weights["to_q.weight"].T,
        key_kernel=weights["to_k.weight"].T,
        value_kernel=weights[f"to_{'v' if sharing == 'heads' else 'k'}.weight"].T,
        output_kernel=weights["to_out.weight"].T,
    )
    for length in (9, 14):
        output, _ = golden_cases.run(attention, weights[f"{length}/input"])
        expected = weights[f"{length}/output"] - weights["to_out.bias"]
        golden_cases.assert_close(output, expected, 1e-5)


def test_mixtures_start_with_the_variance_of_the_paper():
    group = zoo.LinformerHeads(1, 400, 64)
    group.build(*[(None, 1, None, 4)] * 3)
    for weight in group.weights:
        deviation = golden_cases.to_numpy(weight).std()
        np.testing.assert_allclose(deviation, 64**-0.5, rtol=0.02)


def test_refuses_lengths_that_do_not_fit():
    group = zoo.LinformerHeads(HEADS, 14, MIXTURES)
    with pytest.raises(ValueError, match="`max_length`.*max_length=14"):
        group(*helpers.streams(15))
