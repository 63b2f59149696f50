"""Padding of another sequence has no influence, in any group and form of call."""

import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.layers.support.lengths_test import some_thorough

BATCH, LENGTH, MEMORY, MORE, DIM = 2, 20, 17, 12, 8
EXPERT = {"routing": "expert_choice"}
GROUPS = {
    "full": lambda: layers.FullHeads(2, max_relative_position=3),
    "local": lambda: layers.LocalHeads(2, (6,), max_relative_position=3),
    "local, far": lambda: layers.LocalHeads(2, (4,), flange_blocks=2),
    "local, alone": lambda: layers.LocalHeads(2, (3,), flange_blocks=0),
    "local, one block": lambda: layers.LocalHeads(2, (64,)),
    "strided": lambda: layers.StridedHeads(2, (3,), max_relative_position=3),
    "best blocks": lambda: layers.BlockTopKHeads(2, 4, 2),
    "linear": lambda: layers.FeatureMapHeads(2),
    "performer": lambda: layers.FeatureMapHeads(2, "positive", num_features=5),
    "compressed": lambda: layers.CompressedHeads(2, "mean", ratio=2),
    "convolved": lambda: layers.CompressedHeads(2, ratio=3),
    "luna": lambda: layers.LunaHeads(2, 3),
    "clustered queries": lambda: layers.ClusteredQueryHeads(2, 3, 4),
    "induced": lambda: layers.InducedHeads(2, 3),
    "linformer": lambda: layers.LinformerHeads(2, MEMORY + MORE, 3),
    "hashed": lambda: layers.HashedHeads(2, 4, 5),
    "reformer": lambda: layers.HashedHeads(
        2, 4, 5, hash="rotation", attends_to_self=False
    ),
    "routed": lambda: layers.RoutedHeads(2, 3, 8, share_query_key=False),
    "routed, shared": lambda: layers.RoutedHeads(2, 3, 8, **EXPERT),
    "random": lambda: layers.RandomHeads(2, 3, 8),
    "cluster-strided": lambda: layers.ClusterStridedHeads(2, 3, 5),
}


@pytest.fixture(params=some_thorough(GROUPS, ("local", "routed", "random")))
def attention(request):
    attention = layers.MixedAttention(
        [GROUPS[request.param]()], key_dim=4, kernel_initializer="zeros"
    )
    attention.build((None, None, DIM), (None, None, DIM))
    helpers.randomize(attention)
    return attention


def memories():
    """A memory with real tokens alone, then with padding, and the masks of both."""
    memory = helpers.normal(BATCH, MEMORY, DIM, seed=1)
    mask = np.ones((BATCH, MEMORY), "bool")
    mask[1, -4:] = False
    noise = helpers.normal(BATCH, MORE, DIM, seed=2)
    padded = np.concatenate([memory, noise], axis=1)
    return (memory, mask), (padded, np.pad(mask, [(0, 0), (0, MORE)]))


def test_padding_of_a_memory_has_no_influence(attention):
    x = helpers.normal(BATCH, LENGTH, DIM)
    outputs = [attention(x, memory, value_mask=mask) for memory, mask in memories()]
    outputs.append(attention(x, memories()[0][0][:, :-4]))
    short, padded, alone = golden_cases.to_numpy(outputs)
    np.testing.assert_allclose(padded, short, rtol=1e-5, atol=1e-5)
    # The second row without any padding.
    np.testing.assert_allclose(alone[1], short[1], rtol=1e-5, atol=1e-5)
    assert np.abs(alone[0] - short[0]).max() > 1e-4  # tokens that are real matter


@helpers.further_on_jax
def test_padding_of_a_cached_memory_has_no_influence(attention):
    if isinstance(attention.head_groups[0], layers.ClusteredQueryHeads):
        pytest.skip("These heads have no cache")
    x = helpers.normal(BATCH, LENGTH, DIM)
    memory, mask = memories()[1]
    outputs = [golden_cases.to_numpy(attention(x, memory, value_mask=mask))[:, 4:7]]
    for memory, mask in memories():
        cache = attention.make_cache(BATCH, LENGTH, value=memory, value_mask=mask)
        steps = []
        for index in (4, 5, 6):
            token = x[:, index : index + 1]
            y, cache = attention(token, cache=cache, cache_index=np.int32(index))
            steps.append(golden_cases.to_numpy(y))
        outputs.append(np.concatenate(steps, axis=1))
    for output in outputs[1:]:
        np.testing.assert_allclose(output, outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [MEMORY, MEMORY - 4])
def test_padding_counts_for_nothing_where_lengths_are_equal(length):
    """A memory as long as the query has its blocks, and so has each row without it."""
    attention = layers.MixedAttention([GROUPS["local"]()], key_dim=4)
    attention.build((None, None, DIM), (None, None, DIM))
    x = helpers.normal(BATCH, length, DIM)
    outputs = [
        attention(x, memory, value_mask=mask, self_attention=False)
        for memory, mask in memories()
    ]
    rows = [
        attention(x[row:], memories()[0][0][row:, :end], self_attention=False)
        for row, end in ((0, MEMORY), (1, MEMORY - 4))
    ]
    short, padded, first, second = golden_cases.to_numpy([*outputs, *rows])
    np.testing.assert_allclose(padded, short, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(padded[0], first[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(padded[1], second[0], rtol=1e-5, atol=1e-5)
