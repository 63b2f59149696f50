"""Tests of strided heads, against dense attention under the mask of the rule."""

import pytest

from routing_tf.layers import StridedHeads
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns

BATCH, HEADS, DIM = 2, 2, 6


def built_group(block_shape, length=12, **options):
    options = {"embeddings_initializer": "zeros", **options}
    group = StridedHeads(HEADS, block_shape, **options)
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
@pytest.mark.parametrize(
    "length, block, limit",
    [(12, 4, None), (12, 4, 1), (10, 3, 2), (11, 2, 3), (5, 8, None), (6, 1, 2)],
)
def test_equals_dense_attention(length, block, limit, causal):
    group = built_group((block,), length, max_relative_position=limit)
    query, key, value = tokens(length)
    real = helpers.tail_mask(length, length, 4)
    real[0, :2] = False
    bias = helpers.normal(BATCH, length, seed=3)
    sees, distances = patterns.strided(length, length, block, causal)

    output, _ = golden_cases.run(
        group,
        query,
        key,
        value,
        value_mask=real,
        token_bias=bias,
        use_causal_mask=causal,
    )

    expected, _ = helpers.dense_attention(
        query,
        key,
        value,
        real[:, None, None] & sees,
        bias[:, None, None],
        helpers.relative_tables(group),
        distances,
    )
    golden_cases.assert_close(output, expected, 1e-5)


@pytest.mark.parametrize("memory_length", [3, 14])
def test_attends_to_memory_of_another_length(memory_length):
    group = built_group((2, 2), max_relative_position=1)
    query, key, value = tokens(12, memory_length)
    real = helpers.tail_mask(memory_length, memory_length, 2)
    sees, distances = patterns.strided(12, memory_length, 4, causal=False)

    output, _ = golden_cases.run(group, query, key, value, value_mask=real)

    expected, _ = helpers.dense_attention(
        query,
        key,
        value,
        real[:, None, None] & sees,
        0.0,
        helpers.relative_tables(group),
        distances,
    )
    golden_cases.assert_close(output, expected, 1e-5)


@pytest.mark.parametrize("uniform", [False, True])
def test_padding_may_be_seen_as_in_the_release(uniform):
    """A block whose first token is zero in the first row blanks its queries."""
    flaws = {"strided_padding_is_seen": True, "uniform_when_all_masked": uniform}
    group = built_group((4,), compatibility=flaws)
    query, key, value = tokens(12)
    value[0, 0, 4] = 0.0
    value[1, :, 8] = 0.0  # not the first row
    value[0, :, 9] = 0.0  # not at the start of a block
    sees, _ = patterns.strided(12, 12, 4, causal=True)

    output, _ = golden_cases.run(
        group,
        query,
        key,
        value,
        value_mask=helpers.tail_mask(12, 9, 5),
        token_bias=helpers.normal(BATCH, 12, seed=3),
        use_causal_mask=True,
    )

    expected, _ = helpers.dense_attention(query, key, value, sees)
    mean = value.reshape(BATCH, HEADS, 3, 4, DIM).mean(axis=2)
    expected[:, :, 4:8] = mean if uniform else 0.0
    golden_cases.assert_close(output, expected, 1e-5)


@pytest.mark.parametrize(
    "name, received",
    [
        ("block_shape", 0),
        ("block_shape", None),
        ("block_shape", (4, True)),
        ("block_shape", (2, 2, 2)),
        ("num_heads", 0),
        ("dropout", 1.0),
        ("max_relative_position", 0),
    ],
)
def test_refuses_wrong_arguments(name, received):
    with pytest.raises(ValueError) as error:
        StridedHeads(**{"num_heads": HEADS, name: received})
    assert f"`{name}`" in str(error.value)
    assert f"Received: {name}={received!r}" in str(error.value)


def test_refuses_causal_mask_over_two_lengths():
    with pytest.raises(ValueError, match="use_causal_mask.*lengths 12 and 6"):
        built_group((4,))(*tokens(12, 6), use_causal_mask=True)
