"""Tests of induced heads; `every_head_test` has what all kinds share."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo import dense_blocks

POINTS = 3


def expected_output(group, query, key, value, real, bias):
    """The equations of the paper, for one sequence after the other."""
    weights = dense_blocks.weights_of(group)
    norms = [
        [dense_blocks.values(w).reshape(-1) for w in norm.weights]
        for norm in group.norms
    ]
    output = np.zeros((*query.shape[:3], value.shape[-1]))

    def projected(name, x):
        return x @ weights[f"{name}_kernel"] + weights[f"{name}_bias"]

    def normalized(number, x):
        if not norms:
            return x
        x = x - x.mean(axis=-1, keepdims=True)
        scale, offset = norms[number]
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * scale + offset

    def in_heads(x):
        return x.reshape(len(x), group.num_heads, -1).transpose(1, 0, 2)

    for b in range(len(query)):
        if not real[b].any():
            continue
        found, _ = helpers.dense_attention(
            in_heads(weights["inducing_queries"]) / np.sqrt(query.shape[-1]),
            key[b],
            value[b],
            real[b],
            bias[b],
        )
        points = found.transpose(1, 0, 2).reshape(POINTS, -1)
        points = normalized(0, weights["inducing_points"] + points)
        points = normalized(1, points + np.maximum(projected("hidden", points), 0.0))
        keys, values = (in_heads(projected(name, points)) for name in ("key", "value"))
        output[b], _ = helpers.dense_attention(query[b], keys, values, True)
    return output


@pytest.mark.parametrize(
    "use_layer_norm, length, memory_length", [(True, 11, 11), (False, 5, 9)]
)
def test_equals_the_formula(use_layer_norm, length, memory_length):
    group = zoo.InducedHeads(dense_blocks.HEADS, POINTS, use_layer_norm)
    real = helpers.mask_with_a_hole(memory_length, memory_length - 2, 0)
    output = dense_blocks.assert_follows(
        expected_output, group, length, memory_length, real, has_bias=True
    )
    assert np.all(output[1] == 0.0)


@pytest.mark.parametrize("name", ["plain", "norm"])
def test_equals_the_code_of_the_paper(name):
    """juho-lee/set_transformer; see `tools/peers`.

    It divides logits by the square root of all numbers, not of those of a head.
    """
    golden = golden_cases.load("peers/induced.npz")
    weights, heads = golden.group(name), 3
    points, dim = weights["points"].shape
    key_dim, ratio = dim // heads, heads**-0.5
    group = zoo.InducedHeads(heads, points, name == "norm")
    attention = helpers.attention(group, key_dim=key_dim, dim=dim, use_bias=True)
    helpers.assign(attention, output_kernel=np.eye(dim), output_bias=np.zeros(dim))
    for ours, theirs, factor in (
        ("query", "mab1.fc_q", ratio),
        ("key", "mab0.fc_k", 1.0),
        ("value", "mab0.fc_v", 1.0),
    ):
        kernel, bias = (weights[f"{theirs}.{part}"].T for part in ("weight", "bias"))
        named = {f"{ours}_kernel": kernel * factor, f"{ours}_bias": bias * factor}
        helpers.assign(attention, **named)
    queries = weights["points"] @ weights["mab0.fc_q.weight"].T
    queries = queries + weights["mab0.fc_q.bias"]
    helpers.assign(group, inducing_queries=queries * ratio, inducing_points=queries)
    for ours, theirs in (
        ("hidden", "mab0.fc_o"),
        ("key", "mab1.fc_k"),
        ("value", "mab1.fc_v"),
    ):
        kernel, bias = (weights[f"{theirs}.{part}"].T for part in ("weight", "bias"))
        helpers.assign(group, **{f"{ours}_kernel": kernel, f"{ours}_bias": bias})
    for number, norm in enumerate(group.norms):
        norm.gamma.assign(weights[f"mab0.ln{number}.weight"].reshape(heads, -1))
        norm.beta.assign(weights[f"mab0.ln{number}.bias"].reshape(heads, -1))

    output, _ = golden_cases.run(attention, golden["input"])

    golden_cases.assert_close(output, weights["output"], 1e-5)
