"""Tests of local heads; `oracle_test` has their rule."""

import numpy as np
import pytest

from routing_tf.layers import LocalHeads
from routing_tf.layers.support.positions import Positions
from routing_tf.models.release import heads as release_heads
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns

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


@pytest.mark.parametrize("causal", [False, True])
def test_compatibility_with_the_release(causal):
    """One row's padding serves for all; who sees nothing attends to all slots."""
    group = built_group(
        (4,),
        kind=release_heads.ExactLocalHeads,
        cache_padding_bias=True,
    )
    query, key, value = tokens(12)
    real = helpers.tail_mask(12, 9, 12)
    real[0, :8] = False

    output, _ = golden_cases.run(
        group, query, key, value, value_mask=real, use_causal_mask=causal
    )

    sees, _ = patterns.local(12, 12, 4, 4, 1, causal)
    mask = real[:1, None, None] & sees
    expected, _ = helpers.dense_attention(query, key, value, mask)
    # A window has two blocks, or three without the causal mask, and holds zeros outside
    # of the sequence. Those of the first block, and causally of the second, are masked.
    slots = 8 if causal else 12
    expected[:, :, :4] = value[:, :, : 4 if causal else 8].sum(2, keepdims=True) / slots
    if causal:
        expected[:, :, 4:8] = value[:, :, :8].sum(axis=2, keepdims=True) / slots
    golden_cases.assert_close(output, expected, 1e-5)


def test_hides_later_tokens_with_large_logits_in_half_precision():
    group = LocalHeads(1, block_shape=(4,), dtype="mixed_float16")
    query, key, value = np.zeros((3, 1, 1, 4, 2), "float32")
    query[..., 0, 0] = key[..., 3, 0] = 200.0
    value[..., 3, :] = 1.0
    group.build(query.shape, key.shape, value.shape)
    output, _ = golden_cases.run(group, query, key, value, use_causal_mask=True)
    np.testing.assert_array_equal(output[..., 0, :], 0.0)


def test_refuses_another_number_of_blocks_at_equal_lengths():
    with pytest.raises(ValueError, match="length 12 in blocks of 4, value length 12"):
        built_group((4,), memory_block_shape=(8,))(*tokens(12))


def test_refuses_other_blocks_of_the_memory_under_a_causal_mask():
    # Both cut 5 tokens into two blocks.
    group = built_group((3,), 5, memory_block_shape=(4,))
    with pytest.raises(ValueError, match=r"`memory_block_shape` .*=\(4,\) with .*3"):
        group(*tokens(5), use_causal_mask=True)
    group(*tokens(5))
    # Blocks longer than the sequence are cut to it.
    group = built_group((8,), 5, memory_block_shape=(6,))
    group(*tokens(5), use_causal_mask=True)


def test_refuses_another_number_of_blocks():
    message = r"(?s)same number of blocks.*length 12 in blocks of 4.*length 6.*of 4"
    with pytest.raises(ValueError, match=message):
        built_group((4,), memory_block_shape=(4,))(*tokens(12, 6))


def test_refuses_causal_mask_over_two_lengths():
    with pytest.raises(ValueError, match="use_causal_mask.*lengths 12 and 6"):
        built_group((4,))(*tokens(12, 6), use_causal_mask=True)


def test_a_flange_of_one_entry():
    outputs = [
        golden_cases.run(built_group((4,), flange_blocks=flange), *tokens(12))[0]
        for flange in (2, (2,))
    ]
    np.testing.assert_array_equal(*outputs)


def test_refuses_another_grid():
    group, arrays = built_group((2, 2)), tokens(12)
    message = r"block_shape=\(2, 2\) with positions on 1 axes"
    with pytest.raises(ValueError, match=message):
        group(*arrays)
    with pytest.raises(ValueError, match=r"\(1, 3\) and \(3, 1\) blocks"):
        group(
            *arrays,
            positions=Positions((2, 6), (2, 2)),
            memory_positions=Positions((6, 2), (2, 2)),
        )


@pytest.mark.parametrize("memory_block", [(2,), (2, 3)])
def test_refuses_other_blocks_of_the_memory_on_two_axes(memory_block):
    message = r"`memory_block_shape`.*with block_shape=\(2, 2\)"
    with pytest.raises(ValueError, match=message):
        LocalHeads(HEADS, (2, 2), memory_block_shape=memory_block)
    LocalHeads(HEADS, (2, 2), memory_block_shape=[2, 2])


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
    options = {"use_causal_mask": True}
    if len(grid) > 1:
        order = Positions(tuple(np.multiply(grid, shape).tolist()), shape)
        options |= {"positions": order, "memory_positions": order}
    output, _ = golden_cases.run(group, query, query, value, **options)

    np.testing.assert_array_equal(output[:, 0] > 0, expected)
    np.testing.assert_array_equal(output[:, 0, 7] > 0, step)


def test_dilation_needs_one_sequence_on_one_axis():
    with pytest.raises(ValueError, match=r"`dilation` .*=3 with block_shape=\(2, 2\)"):
        LocalHeads(HEADS, (2, 2), dilation=3)
    with pytest.raises(ValueError, match="`dilation` .* is_cross_attention=True"):
        built_group((2,), dilation=3)(*tokens(12, 6), is_cross_attention=True)


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


def test_keeps_its_dilation():
    helpers.assert_keeps_settings(LocalHeads(HEADS, (2,), dilation=3))
