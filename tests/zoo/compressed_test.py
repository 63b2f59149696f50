"""Tests of compressed attention; `every_head_test` has what all kinds share."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import HEADS
from tests.zoo.dense_blocks import assert_follows
from tests.zoo.dense_blocks import at_distance
from tests.zoo.dense_blocks import attend_to_each
from tests.zoo.dense_blocks import values
from tests.zoo.dense_blocks import weights_of


def compressed(group, name, x, real):
    """Returns the vector of one block of one head `[tokens, dim]`, and of its head."""
    if group.compression != "convolution":
        pool = np.mean if group.compression == "mean" else np.max
        return pool(x[:, real], axis=1)
    weights = weights_of(group)
    kernel, bias = (weights[f"{name}_{part}"] for part in ("kernel", "bias"))
    result = bias.reshape(HEADS, -1).copy()
    for slot in np.flatnonzero(real):
        rows = kernel[slot].reshape(-1, HEADS, x.shape[-1])
        result += np.einsum("hd,dhe->he", x[:, slot], rows)
    return result


def expected_output(group, query, key, value, real, causal):
    """For each query the keys that it sees, one after the other."""
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    window = group.attention_window
    for b, i in np.ndindex(len(query), query.shape[2]):
        seen = []
        if window is None:
            null = values(group.null_key, group.null_value)
            seen.append((*(x[:, 0] for x in null), 0.0))
        for start in range(0, key.shape[2], group.ratio):
            block = slice(start, start + group.ratio)
            if real[b, block].any() and not (causal and start + group.ratio > i + 1):
                arrays = ("key", key), ("value", value)
                pair = (
                    compressed(group, name, x[b, :, block], real[b, block])
                    for name, x in arrays
                )
                seen.append((*pair, 0.0))
        for j in range(key.shape[2] if window else 0):
            if real[b, j] and abs(i - j) < window and not (causal and j > i):
                pair = at_distance(group, key[b, :, j], value[b, :, j], j - i)
                seen.append((*pair, 0.0))
        output[b, :, i] = attend_to_each(query[b, :, i], seen)
    return output


OF_ONE_SEQUENCE = (
    ("convolution", 3, None, 14, 14),
    ("convolution", 4, 5, 23, 23),
    ("mean", 2, 1, 9, 9),
    ("max", 3, 40, 10, 10),
)
OF_TWO = ("max", 30, None, 7, 11), ("convolution", 3, None, 5, 13)


@pytest.mark.parametrize(
    "compression, ratio, window, length, memory_length, causal",
    [
        *((*case, True) for case in OF_ONE_SEQUENCE),
        *((*case, False) for case in OF_ONE_SEQUENCE[1:3]),
        *((*case, False) for case in OF_TWO),
    ],
)
def test_equals_the_formula(compression, ratio, window, length, memory_length, causal):
    options = {"ratio": ratio, "attention_window": window}
    if window is not None:
        options["max_relative_position"] = 3
    group = zoo.CompressedHeads(HEADS, compression, **options)
    assert_follows(expected_output, group, length, memory_length, causal=causal)


@pytest.mark.parametrize("name", ["full", "causal"])
def test_equals_another_implementation(name):
    """Of the package memory-compressed-attention; see `tools/peers`."""
    golden = golden_cases.load("peers/compressed.npz")
    kernel = golden["compress_fn.conv.weight"]
    dim, key_dim, ratio = kernel.shape
    group = zoo.CompressedHeads(dim // key_dim, ratio=ratio)
    attention = helpers.attention(group, key_dim=key_dim, dim=dim)
    query, key, value = np.split(golden["to_qkv.weight"].T, 3, axis=1)
    # It divides by the square root of all numbers, not of those of a head.
    query = query * np.sqrt(key_dim / dim)
    kernels = {"query_kernel": query, "key_kernel": key, "value_kernel": value}
    helpers.assign(attention, **kernels, output_kernel=golden["to_out.weight"].T)
    for part in ("key", "value"):
        weights = {
            f"null_{part}": golden[f"null_{part[0]}"].reshape(-1, 1, key_dim),
            f"{part}_kernel": kernel.transpose(2, 1, 0),
            f"{part}_bias": golden["compress_fn.conv.bias"],
        }
        helpers.assign(group, **weights)

    output, _ = golden_cases.run(
        attention, golden["input"], use_causal_mask=name == "causal"
    )

    golden_cases.assert_close(output, golden[name] - golden["to_out.bias"], 1e-5)
