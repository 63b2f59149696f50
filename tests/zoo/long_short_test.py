"""Tests of long-short attention; `every_head_test` has what all kinds share."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import HEADS
from tests.zoo.dense_blocks import assert_follows
from tests.zoo.dense_blocks import at_distance
from tests.zoo.dense_blocks import attend_to_each
from tests.zoo.dense_blocks import softmax
from tests.zoo.dense_blocks import values

NORMS = ("window_key", "window_value", "landmark_key", "landmark_value")


def normalized(group, name, x):
    """Normalizes `[heads, dim]`."""
    scale, offset = values(group.norms[name].gamma, group.norms[name].beta)
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * scale + offset


def landmarks_of(group, key, value, bias):
    """Returns the landmarks of the real tokens of a segment `[heads, tokens, dim]`."""
    weights = values(group.projection)
    weights = weights.reshape(len(weights), HEADS, -1)
    scores = softmax(np.einsum("hld,dhr->hrl", key, weights) + bias)
    return [
        (
            normalized(group, "landmark_key", (scores[:, r, None] @ key)[:, 0]),
            normalized(group, "landmark_value", (scores[:, r, None] @ value)[:, 0]),
        )
        for r in range(scores.shape[1])
    ]


def expected_output(group, query, key, value, real, bias, causal):
    """For each query the keys that it sees, one after the other."""
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    length = query.shape[2]
    segment = group.segment_length or length
    for b, i in np.ndindex(len(query), length):
        seen = []
        for start in range(0, length, segment):
            own = np.arange(start, min(start + segment, length))
            own = own[real[b, own]]
            if len(own) and not (causal and start + segment > i + 1):
                arrays = key[b][:, own], value[b][:, own], bias[b, own]
                for k, v in landmarks_of(group, *arrays):
                    seen.append((k, v, 0.0))
        for j in np.flatnonzero(real[b]):
            if abs(i - j) < group.attention_window and not (causal and j > i):
                k = normalized(group, "window_key", key[b, :, j])
                v = normalized(group, "window_value", value[b, :, j])
                seen.append((*at_distance(group, k, v, j - i), bias[b, j]))
        output[b, :, i] = attend_to_each(query[b, :, i], seen)
    return output


@pytest.mark.parametrize(
    "window, segment, landmarks, length, causal",
    [
        (5, 4, 2, 23, True),
        (1, 3, 1, 8, True),
        (40, 30, 3, 9, True),
        (4, 4, 2, 14, False),
        (3, None, 3, 11, False),
    ],
)
def test_equals_the_formula(window, segment, landmarks, length, causal):
    options = {"max_relative_position": 3}
    group = zoo.LongShortHeads(HEADS, window, segment, landmarks, **options)
    about = {"has_bias": True, "causal": causal}
    output = assert_follows(expected_output, group, length, **about)
    if causal:
        assert np.all(output[1, :, : length // 3] == 0.0)


def attention_of_peer(heads, dim, window, segment, landmarks, kernels, norms):
    """Makes an attention layer with the weights of another implementation."""
    group = zoo.LongShortHeads(heads, window, segment, landmarks)
    attention = helpers.attention(group, key_dim=dim // heads, dim=dim)
    helpers.assign(attention, **{f"{x}_kernel": w.T for x, w in kernels.items()})
    for name in NORMS:
        gamma, beta = (x.reshape(heads, -1) for x in norms[name.split("_")[0]])
        helpers.assign(group.norms[name], gamma=gamma, beta=beta)
    return attention


@pytest.mark.parametrize("name", ["full", "causal"])
def test_equals_another_implementation(name):
    """Of the package long-short-transformer, in one window; see `tools/peers`."""
    golden = golden_cases.load("peers/long_short.npz").group(name)
    length, dim = golden["input"].shape[1:]
    reads = golden["to_dynamic_proj.weight"].T
    theirs = {"query": "q", "key": "kv", "value": "kv", "output": "out"}
    kernels = {ours: golden[f"to_{x}.weight"] for ours, x in theirs.items()}
    norms = {
        ours: [golden[f"{theirs}_norm.{part}"] for part in ("weight", "bias")]
        for ours, theirs in (("window", "local"), ("landmark", "global"))
    }
    causal = name == "causal"
    sizes = length, 4 if causal else None, reads.shape[1]
    attention = attention_of_peer(1, dim, *sizes, kernels, norms)
    attention.head_groups[0].projection.assign(reads)

    output, _ = golden_cases.run(attention, golden["input"], use_causal_mask=causal)

    expected = golden["output"] - golden["to_out.bias"]
    golden_cases.assert_close(output, expected, 1e-5)


def test_equals_the_code_of_the_paper():
    """NVIDIA/transformer-ls, of queries from the fifth on; see `tools/peers`.

    It shows no query the segment that it ends.
    """
    golden, segment = golden_cases.load("peers/long_short.npz").group("paper"), 4
    key_dim, heads, landmarks = golden["reads"].shape
    theirs = {"query": "query", "key": "key", "value": "val", "output": "out"}
    kernels = {ours: golden[f"proj_{x}.weight"] for ours, x in theirs.items()}
    norms = {
        ours: [golden[f"dual_ln_{theirs}.{part}"] for part in ("weight", "bias")]
        for ours, theirs in (("window", "win"), ("landmark", "dproj"))
    }
    sizes = 5, segment, landmarks
    attention = attention_of_peer(heads, heads * key_dim, *sizes, kernels, norms)
    attention.head_groups[0].projection.assign(golden["reads"].reshape(key_dim, -1))

    output, _ = golden_cases.run(attention, golden["input"], use_causal_mask=True)

    expected = golden["output"]
    ours = output[:, 4:]
    ends = np.arange(4, output.shape[1]) % segment == segment - 1
    golden_cases.assert_close(ours[:, ~ends], expected[:, ~ends], 1e-5)
    assert golden_cases.relative_error(ours[:, ends], expected[:, ends]) > 0.01
