"""Tests of strided heads; `oracle_test` has their rule."""

from routing_tf.layers import StridedHeads
from routing_tf.models.release import heads as release_heads
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns

BATCH, HEADS, DIM = 2, 2, 6


def built_group(block_shape, length=12, kind=StridedHeads, **options):
    options = {"embeddings_initializer": "zeros", **options}
    group = kind(HEADS, block_shape, **options)
    group.build(*[(BATCH, HEADS, length, DIM)] * 3)
    helpers.randomize(group)
    return group


def tokens(length, memory_length=None):
    lengths = (length, memory_length or length, memory_length or length)
    return [
        helpers.normal(BATCH, HEADS, size, DIM, seed=seed)
        for seed, size in enumerate(lengths)
    ]


def test_padding_may_be_seen_as_in_the_release():
    """A block whose first token is zero in the first row blanks its queries."""
    group = built_group((4,), kind=release_heads.ExactStridedHeads)
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
    expected[:, :, 4:8] = mean
    golden_cases.assert_close(output, expected, 1e-5)
