"""Tests of global tokens; `oracle_test` has their rule."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns

BATCH, HEADS, DIM = 2, 2, 6


@pytest.mark.parametrize("name", ["global", "window"])
def test_equals_longformer_of_transformers(name):
    case = golden_cases.load("peers/global_tokens.npz")
    positions = case["global_positions"] if name == "global" else ()
    heads = zoo.GlobalHeads(
        HEADS, [int(position) for position in positions], int(case["attention_window"])
    )
    dim = case["x"].shape[-1]
    attention = helpers.attention(heads, key_dim=DIM, dim=dim, use_bias=True)
    names = [f"{p}_{w}" for p in ("query", "key", "value") for w in ("kernel", "bias")]
    helpers.assign(attention, **{name: case[name] for name in names})
    helpers.assign(attention, output_kernel=np.eye(2 * DIM), output_bias=np.zeros(dim))

    output, _ = golden_cases.run(attention, case["x"], query_mask=case["mask"])

    real = case["mask"]
    golden_cases.assert_close(output[real], case[f"output_{name}"][real], 1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_learned_tokens_are_seen_by_all(causal):
    group = helpers.built(zoo.GlobalHeads(HEADS, (4,), 3, num_learned_tokens=2))
    query, key, value = helpers.streams(11)
    real, bias = helpers.mask_with_a_hole(11, 9, 11), helpers.normal(BATCH, 11, seed=3)
    options = {"value_mask": real, "token_bias": bias, "use_causal_mask": causal}

    output, _ = golden_cases.run(group, query, key, value, **options)

    sees, _ = patterns.global_tokens(group, 11, 11, causal)
    sees = np.broadcast_to(real[:, None, None] & sees, (BATCH, HEADS, 11, 11))
    dot_product = group.dot_product
    learned = golden_cases.to_numpy(
        [dot_product.learned_keys, dot_product.learned_values]
    )
    key, value = (
        np.concatenate([x, np.broadcast_to(own, (BATCH, *own.shape))], axis=2)
        for x, own in zip((key, value), learned, strict=True)
    )
    expected, _ = helpers.dense_attention(
        query,
        key,
        value,
        np.pad(sees, [(0, 0)] * 3 + [(0, 2)], constant_values=True),
        np.pad(bias, [(0, 0), (0, 2)])[:, None, None],
    )
    golden_cases.assert_close(output, expected, 1e-5)


def test_scores_of_learned_tokens_are_missing():
    group = zoo.GlobalHeads(HEADS, (), num_learned_tokens=1)
    x, layer = helpers.normal(1, 5, 8), helpers.attention(group)
    (_, scores), _ = golden_cases.run(layer, x, return_attention_scores=True)
    assert np.all(scores == 0.0)


def test_refuses_relative_positions_of_learned_tokens():
    with pytest.raises(ValueError, match=r"`max_relative_position` .*Received: .*=4"):
        zoo.GlobalHeads(2, num_learned_tokens=1, max_relative_position=4)
