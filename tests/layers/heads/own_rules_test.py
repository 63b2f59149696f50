"""Tests of what one kind of heads has alone; `oracle_test` has their rules."""

import functools

import numpy as np
import pytest

from routing_tf.layers import HashedHeads
from routing_tf.layers import LocalHeads
from routing_tf.layers import RandomHeads
from routing_tf.layers.support.positions import Positions
from routing_tf.models.release import heads as release_heads
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns

BATCH, HEADS, LENGTH, DIM = 2, 2, 12, 6
tokens = functools.partial(helpers.streams, LENGTH)


def test_hides_later_tokens_with_large_logits_in_half_precision():
    group = LocalHeads(1, block_shape=(4,), dtype="mixed_float16")
    query, key, value = np.zeros((3, 1, 1, 4, 2), "float32")
    query[..., 0, 0] = key[..., 3, 0] = 200.0
    value[..., 3, :] = 1.0
    group.build(query.shape, key.shape, value.shape)
    output, _ = golden_cases.run(group, query, key, value, use_causal_mask=True)
    np.testing.assert_array_equal(output[..., 0, :], 0.0)


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
    lengths = tuple(g * size for g, size in zip(grid, shape, strict=True))
    own = Positions(lengths, shape)
    places = {"positions": own, "memory_positions": own} if len(grid) > 1 else {}
    output, _ = golden_cases.run(
        group, query, query, value, use_causal_mask=True, **places
    )

    np.testing.assert_array_equal(output[:, 0] > 0, expected)
    np.testing.assert_array_equal(output[:, 0, 7] > 0, step)


def test_dilation_deals_out_one_mask_for_all():
    """The mask and the bias of one row stand for all rows."""
    group = helpers.built(LocalHeads(HEADS, (2,), dilation=3))
    options = {
        "value_mask": helpers.mask_with_a_hole(12, 9),
        "token_bias": helpers.normal(1, 12, seed=3),
    }
    output, _ = golden_cases.run(group, *tokens(), **options)
    options = {name: np.repeat(x, BATCH, axis=0) for name, x in options.items()}
    expected, _ = golden_cases.run(group, *tokens(), **options)
    np.testing.assert_array_equal(output, expected)


def test_strided_heads_see_padding_as_in_the_release():
    """A block whose first token is zero in the first row blanks its queries."""
    group = helpers.built(release_heads.ExactStridedHeads(HEADS, (4,)))
    query, key, value = tokens()
    value[0, 0, 4] = 0.0
    value[1, :, 8] = 0.0  # not the first row
    value[0, :, 9] = 0.0  # not at the start of a block
    sees, _ = patterns.strided(group, 12, 12, causal=True)

    about = {"value_mask": helpers.tail_mask(12, 9, 5), "use_causal_mask": True}
    about["token_bias"] = helpers.normal(BATCH, 12, seed=3)
    output, _ = golden_cases.run(group, query, key, value, **about)

    expected, _ = helpers.dense_attention(query, key, value, sees)
    expected[:, :, 4:8] = value.reshape(BATCH, HEADS, 3, 4, DIM).mean(axis=2)
    golden_cases.assert_close(output, expected, 1e-5)


@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_bucket_numbers_equal_the_release(size):
    case = golden_cases.load("pieces/hash_items_fn.npz")
    group = HashedHeads(2, num_buckets=size, attention_window=4)
    group.build(*[(2, 2, 10, 6)] * 3)
    group.projections.assign(case[f"var/hash_{size}/projection_tensors"])
    buckets = golden_cases.to_numpy(group.buckets(case["in/items"]))
    np.testing.assert_array_equal(buckets, case[f"out/bucket_size_{size}"])


def test_projections_are_orthogonal_and_never_move():
    group = HashedHeads(HEADS, 17, attention_window=5, dtype="mixed_bfloat16")
    helpers.built(group, is_random=False)
    before = golden_cases.to_numpy(group.projections)
    assert group.num_bits == 4 and before.shape == (HEADS, 4, DIM)
    products = before @ np.swapaxes(before, 1, 2)
    np.testing.assert_allclose(products, [np.eye(4)] * HEADS, atol=1e-5)
    assert np.abs(before[0] - before[1]).max() > 0.1
    assert group.trainable_weights == []
    assert group.projections.dtype == "float32"

    query, _, value = tokens()
    _, losses = golden_cases.run(group, query, None, value, training=True)

    np.testing.assert_array_equal(golden_cases.to_numpy(group.projections), before)
    assert losses == []


def test_random_scores_depend_on_the_seed_and_not_on_the_length():
    group, other = (RandomHeads(HEADS, 3, 5, seed=seed) for seed in (3, 4))
    short, long = group.random_scores(7), group.random_scores(50)
    assert np.any(other.random_scores(7) != short)
    assert long.shape == (1, HEADS, 50, 3) and long.dtype == "float32"
    np.testing.assert_array_equal(short, long[:, :, :7])
    # All drawn apart, and over the whole range.
    assert len(np.unique(long)) == long.size
    assert long.min() < 0.05 and long.max() > 0.95
