"""Padding has no influence, in any kind of heads and form of call."""

import numpy as np
import pytest

from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.zoo import cases

BATCH, LENGTH, MEMORY, MORE, DIM = 2, 14, 17, 12, 8
WAYS = [(kind, True) for kind in kinds.CAUSAL if kind not in kinds.SHIFTED]
WAYS += [(kind, True) for kind in kinds.SHIFTED if "_apart" in kind]
FEW = ("full", "local", "strided", "best_blocks", "performer", "prefix_apart_shifted")
FEW += ("token_choice_apart", "hashed", "threshold_apart", "native_sparse", "indexed")
FEW_WHOLE = ("random", "experts_apart", "linformer", "sinkhorn", "clustered_queries")
# Blocks of pairs are shares of the length. What both masks have is the same code.
WAYS += [
    (kind, False)
    for kind in kinds.WHOLE
    if kind in FEW_WHOLE or (kind not in kinds.CAUSAL and kind != "block_pair")
]


@pytest.mark.parametrize(
    "kind, causal",
    kinds.some(WAYS, [(x, True) for x in FEW] + [(x, False) for x in FEW_WHOLE]),
)
def test_padding_has_no_influence(kind, causal):
    """Not on outputs, losses or state: not its numbers, nor whether it is there."""
    make, length = (kinds.CAUSAL if causal else kinds.WHOLE)[kind], 9
    attention = helpers.attention(make())
    weights = attention.get_weights()
    x = helpers.normal(BATCH, LENGTH, DIM)
    real = helpers.tail_mask(LENGTH, length, 7)
    real[:, 3] = real[0, 0] = False
    bias = helpers.normal(BATCH, LENGTH, seed=5)
    results = []
    for used, noise in ((length, 0.0), (LENGTH, 50.0)):
        attention.set_weights(weights)
        options = {"token_bias": (bias + noise * ~real)[:, :used]}
        output, losses = golden_cases.run(
            attention,
            (x + noise * ~real[..., None])[:, :used],
            query_mask=real[:, :used],
            use_causal_mask=causal,
            training=True,
            **({} if kind in cases.WITHOUT_BIAS else options),
        )
        shown = output[:, :length][real[:, :length]]
        results.append([shown, *losses, *attention.get_weights()])
    for actual, expected in zip(*results, strict=True):
        golden_cases.assert_close(actual, expected, 1e-5)


def memories():
    """A memory with real tokens alone, then with padding, and the masks of both."""
    memory = helpers.normal(BATCH, MEMORY, DIM, seed=1)
    mask = np.ones((BATCH, MEMORY), "bool")
    mask[1, -4:] = False
    noise = helpers.normal(BATCH, MORE, DIM, seed=2)
    padded = np.concatenate([memory, noise], axis=1)
    return (memory, mask), (padded, np.pad(mask, [(0, 0), (0, MORE)]))


def attend(attention, x, memory, **options):
    return golden_cases.run(attention, x, memory, **options)[0]


@pytest.mark.parametrize("kind", kinds.some(kinds.MEMORIES, ("local", "experts_apart")))
def test_padding_of_a_memory_has_no_influence(kind):
    attention = helpers.attention(kinds.MEMORIES[kind](), memory_dim=DIM)
    x = helpers.normal(BATCH, LENGTH, DIM)
    short, padded = (attend(attention, x, m, value_mask=mask) for m, mask in memories())
    alone = attend(attention, x, memories()[0][0][:, :-4])
    np.testing.assert_allclose(padded, short, rtol=1e-5, atol=1e-5)
    # The second row without any padding.
    np.testing.assert_allclose(alone[1], short[1], rtol=1e-5, atol=1e-5)
    assert np.abs(alone[0] - short[0]).max() > 1e-4  # tokens that are real matter


@pytest.mark.parametrize("length", [MEMORY, MEMORY - 4])
def test_padding_counts_for_nothing_where_lengths_are_equal(length):
    """A memory as long as the query has its blocks, and so has each row without it."""
    attention = helpers.attention(kinds.MEMORIES["local"](), memory_dim=DIM)
    x, options = helpers.normal(BATCH, length, DIM), {"self_attention": False}
    short, padded = (
        attend(attention, x, memory, value_mask=mask, **options)
        for memory, mask in memories()
    )
    first, second = (
        attend(attention, x[row:], memories()[0][0][row:, :end], **options)
        for row, end in ((0, MEMORY), (1, MEMORY - 4))
    )
    np.testing.assert_allclose(padded, short, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(padded[0], first[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(padded[1], second[0], rtol=1e-5, atol=1e-5)
