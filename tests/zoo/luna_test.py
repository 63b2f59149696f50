"""Tests of Luna heads; `every_head_test` has what all kinds share."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import HEADS
from tests.zoo.dense_blocks import assert_follows
from tests.zoo.dense_blocks import softmax
from tests.zoo.dense_blocks import values

LENGTH, PACKED = 21, 3


def expected_output(group, query, key, value, real, bias, causal):
    packing = values(group.packing_queries).reshape(PACKED, HEADS, -1)
    packing = packing / np.sqrt(query.shape[-1])
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h, t in np.ndindex(query.shape[:3]):
        seen = np.flatnonzero(real[b])
        seen = seen[seen <= t] if causal else seen
        if not len(seen):
            continue
        logits = packing[:, h] @ key[b, h, seen].T + bias[b, seen]
        weights, divisor = softmax(logits), 1
        if causal:
            weights, divisor = np.log2(1 + 2**logits), len(seen)
        packed = weights @ key[b, h, seen] / divisor
        unpacking = softmax(packed @ query[b, h, t])
        output[b, h, t] = unpacking @ weights @ value[b, h, seen] / divisor
    return output


@pytest.mark.parametrize(
    "causal, chunk_length, memory_length",
    [(True, 1, LENGTH), (True, 8, LENGTH), (True, 128, LENGTH), (False, 8, 9)],
)
def test_equals_the_formula(causal, chunk_length, memory_length):
    group = zoo.LunaHeads(HEADS, PACKED, chunk_length=chunk_length)
    about = {"has_bias": True, "causal": causal}
    output = assert_follows(expected_output, group, LENGTH, memory_length, **about)
    if causal:
        assert np.all(output[1, :, :7] == 0.0)


@pytest.mark.parametrize("name, heads", [("causal", 3), ("full", 1)])
def test_equals_the_code_of_the_paper(name, heads):
    """XuezheMax/fairseq-apollo; see `tools/peers`."""
    golden = golden_cases.load("peers/luna.npz")
    packed, dim = golden["packing"].shape
    group = zoo.LunaHeads(heads, packed, chunk_length=4)
    attention = helpers.attention(group, key_dim=dim // heads, dim=dim, dtype="float64")
    kernels = {f"{part}_kernel": golden[part].T for part in ("query", "key", "value")}
    helpers.assign(attention, **kernels, output_kernel=np.eye(dim))
    group.packing_queries.assign(golden["packing"])
    output, _ = golden_cases.run(
        attention, golden["input"], use_causal_mask=name == "causal"
    )
    golden_cases.assert_close(output, golden[name], 1e-5)
