"""Tests of Sinkhorn heads."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import HEADS
from tests.zoo.dense_blocks import assert_follows
from tests.zoo.dense_blocks import softmax


def sorting_matrix(group, query, key, parts, real, causal):
    """R of one head, by division of a matrix of exponentials."""
    size = len(parts)
    matrix = np.zeros((size, size))
    for i, j in np.ndindex(size, size):
        asks = [t for t in parts[i] if real[t]]
        if causal:
            asks = [t for t in range(parts[i][0] + 1) if real[t]]
        offers = [t for t in parts[j] if real[t]]
        hidden = (causal and j >= i) or not offers or not real[parts[i]].any()
        if not hidden:
            mean = np.mean(query[asks], axis=0) if asks else np.zeros(query.shape[1])
            score = mean @ np.mean(key[offers], axis=0)
            matrix[i, j] = np.exp(score / group.temperature)
    for _ in range(group.num_iterations):
        matrix = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1e-30)
        sums = matrix.sum(axis=0, keepdims=True)
        if causal:
            sums = np.cumsum(matrix, axis=0)
        matrix = matrix / np.maximum(sums, 1e-30)
    if causal:
        matrix = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1e-30)
    return matrix


def expected_output(group, query, key, value, real, causal):
    length, block = query.shape[2], group.block_length
    parts = [
        np.arange(start, min(start + block, length))
        for start in range(0, length, block)
    ]
    output = np.zeros(value.shape)
    for b, h in np.ndindex(query.shape[:2]):
        matrix = sorting_matrix(group, query[b, h], key[b, h], parts, real[b], causal)
        for i, part in enumerate(parts):
            mixed, arrays = [], (key[b, h], value[b, h])
            for slot in range(block):
                those = [j for j, p in enumerate(parts) if slot < len(p)]
                those = [j for j in those if real[b, parts[j][slot]]]
                weights = matrix[i, those]
                if weights.sum() > 0:
                    places = [parts[j][slot] for j in those]
                    weights = weights * matrix[i].sum() / weights.sum()
                    mixed.append([weights @ x[places] for x in arrays])
            for t in part:
                own = [s for s in part if real[b, s] and (s <= t or not causal)]
                pairs = mixed + [[x[s] for x in arrays] for s in own]
                if pairs:
                    keys, values = map(np.array, zip(*pairs))
                    output[b, h, t] = softmax(keys @ query[b, h, t]) @ values
    return output


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length, block", [(20, 4), (19, 4), (5, 8), (1, 1)])
def test_sees_its_own_and_a_sorted_block(length, block, causal):
    real = helpers.mask_with_a_hole(length, length, max(length - 6, 1))
    if length == 20:
        real[0, 8:12] = False
    group = zoo.SinkhornHeads(HEADS, block, num_iterations=3, temperature=0.6)
    assert_follows(expected_output, group, length, real=real, causal=causal)


def test_equals_sinkhorn_transformer():
    case = golden_cases.load("peers/sinkhorn_heads.npz")
    sizes = int(case["block_length"]), int(case["num_iterations"])
    group = zoo.SinkhornHeads(HEADS, *sizes, float(case["temperature"]))
    query, key = case["query"], case["key"]
    output, _ = golden_cases.run(group, query * query.shape[-1] ** -0.5, key, key)
    golden_cases.assert_close(output, case["output"], 1e-5)
