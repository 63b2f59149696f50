"""Tests of local heads; `oracle_test` has their rule."""

import numpy as np
import pytest

from routing_tf.layers import LocalHeads
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, DIM = 2, 2, 6


def built_group(block, length=12, kind=LocalHeads, **options):
    group = kind(HEADS, block, embeddings_initializer="zeros", **options)
    group.build(*[(BATCH, HEADS, length, DIM)] * 3)
    helpers.randomize(group)
    return group


def tokens(length, memory_length=None):
    lengths = (length, memory_length or length, memory_length or length)
    return [
        helpers.normal(BATCH, HEADS, size, DIM, seed=seed)
        for seed, size in enumerate(lengths)
    ]


def test_hides_later_tokens_with_large_logits_in_half_precision():
    group = LocalHeads(1, block_shape=(4,), dtype="mixed_float16")
    query, key, value = np.zeros((3, 1, 1, 4, 2), "float32")
    query[..., 0, 0] = key[..., 3, 0] = 200.0
    value[..., 3, :] = 1.0
    group.build(query.shape, key.shape, value.shape)
    output, _ = golden_cases.run(group, query, key, value, use_causal_mask=True)
    np.testing.assert_array_equal(output[..., 0, :], 0.0)


def test_a_flange_of_one_entry():
    outputs = [
        golden_cases.run(built_group((4,), flange_blocks=flange), *tokens(12))[0]
        for flange in (2, (2,))
    ]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("name", ["1d", "2d"])
def test_causal_windows_equal_release(name):
    """Who sees whom, from the release's windows and the bias over them."""
    case = golden_cases.load("pieces/block_layout.npz")
    positions = case[f"out/blocks_{name}"]
    grid, shape = positions.shape[1:-2], tuple(case.config[f"query_shape_{name}"])
    positions = positions.reshape(BATCH, -1, 2)
    length, blocks = positions.shape[1], np.prod(grid)
    windows = case[f"out/memory_blocks_{name}_masked"].reshape(BATCH, blocks, -1, 2)
    holds = np.all(windows[..., None, :] == positions[:, None, None], axis=-1)

    def seen(bias, holds):
        return np.any((bias[0, 0] == 0)[:, :, None] & holds[..., None, :, :], axis=-2)

    expected = seen(case[f"out/causal_bias_{name}"], holds)
    size = expected.shape[2]
    expected = expected.reshape(BATCH, length, length)
    step = seen(
        case[f"out/causal_bias_{name}_decode_step_7"], holds[:, 7 // size]
    ).reshape(BATCH, length)

    flange = case.config[f"flange_{name}"]
    flange = [tokens // block for tokens, block in zip(flange, shape, strict=True)]
    group = LocalHeads(1, shape, flange_blocks=flange)
    query = np.zeros((BATCH, 1, length, 2), "float32")
    value = np.broadcast_to(np.eye(length, dtype="float32"), (BATCH, 1, length, length))
    group.build(query.shape, query.shape, value.shape)
    grids = {"grid": grid, "memory_grid": grid} if len(grid) > 1 else {}
    output, _ = golden_cases.run(
        group, query, query, value, use_causal_mask=True, **grids
    )

    np.testing.assert_array_equal(output[:, 0] > 0, expected)
    np.testing.assert_array_equal(output[:, 0, 7] > 0, step)


def test_dilation_deals_out_one_mask_for_all():
    """The mask and the bias of one row stand for all rows."""
    group = built_group((2,), dilation=3)
    options = {
        "value_mask": helpers.mask_with_a_hole(12, 9),
        "token_bias": helpers.normal(1, 12, seed=3),
    }
    output, _ = golden_cases.run(group, *tokens(12), **options)
    options = {name: np.repeat(x, BATCH, axis=0) for name, x in options.items()}
    expected, _ = golden_cases.run(group, *tokens(12), **options)
    np.testing.assert_array_equal(output, expected)
