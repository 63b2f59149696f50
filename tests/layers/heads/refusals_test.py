"""What heads refuse together; `tests/layers/refusals_test` has each wrong argument."""

import functools

import numpy as np
import pytest

from routing_tf import layers
from routing_tf.layers.support.positions import Positions
from tests.layers import helpers
from tests.layers import kinds

HEADS, DIM = 2, 6
local = functools.partial(layers.LocalHeads, HEADS)
hashed = functools.partial(layers.HashedHeads, HEADS, num_buckets=4, attention_window=4)
several = functools.partial(
    layers.RoutedHeads, HEADS, 3, attention_window=6, clusters_per_query=2
)
MADE = [
    (local, {"block_shape": (2, 2), "dilation": 3}, "`dilation` .*=3 with block_shape"),
    *(
        (
            local,
            {"block_shape": (2, 2), "memory_block_shape": memory},
            r"`memory_block_shape`.*with block_shape=\(2, 2\)",
        )
        for memory in ((2,), (2, 3))
    ),
    (
        functools.partial(layers.FixedHeads, 3),
        {"arrangement": "separate"},
        "`num_heads`.*even.*Received: num_heads=3",
    ),
    (
        functools.partial(layers.SlidingHeads, HEADS),
        {"radius": 0, "is_strided": True},
        "`radius`.*`is_strided=True`.*radius=0",
    ),
    (hashed, {"num_buckets": 5, "hash": "rotation"}, "`num_buckets` must be even.*=5."),
    *(
        (hashed, {"attends_to_self": False, **options}, "`attends_to_self=False` needs")
        for options in ({"share_query_key": False}, {"key_shift": 1})
    ),
    *(
        (hashed, {"entmax_alpha": 1.5, **options}, "`entmax_alpha` must be None with")
        for options in ({"num_rounds": 2}, {"attends_to_self": False})
    ),
    (
        functools.partial(layers.MixedAttention, [layers.LunaHeads(HEADS)], DIM),
        {"qk_norm": True},
        "`qk_norm` must be False for LunaHeads",
    ),
    *(
        (several, options, f"`clusters_per_query`.*{received}")
        for options, received in (
            ({"routing": "expert_choice"}, "routing='expert_choice'"),
            ({"entmax_alpha": 1.5}, "entmax_alpha=1.5"),
            ({"attention_window": 5}, "attention_window=5"),
            ({"clusters_per_query": 6}, "num_clusters=3"),
            ({"clusters_per_query": 0}, "clusters_per_query=0"),
        )
    ),
]


@pytest.mark.parametrize("make, options, message", MADE)
def test_refuses_arguments_that_do_not_fit(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


CROSS, CAUSAL = {"is_cross_attention": True}, {"use_causal_mask": True}
SOUND = "use_causal_mask={}, is_cross_attention={}"
blocks = functools.partial(local, block_shape=(4,))
CALLED = [
    (
        blocks,
        {"memory_block_shape": (8,)},
        (12, 12),
        {},
        "length 12 in blocks of 4, value length 12",
    ),
    (
        local,
        {"block_shape": (3,), "memory_block_shape": (4,)},
        (5, 5),
        CAUSAL,
        r"`memory_block_shape` .*=\(4,\) with .*3",
    ),
    (
        blocks,
        {"memory_block_shape": (4,)},
        (12, 6),
        {},
        "(?s)same number of blocks.*length 12 in blocks of 4.*length 6.*of 4",
    ),
    (local, {"block_shape": (2, 2)}, (12, 12), {}, "with positions on 1 axes"),
    (
        local,
        {"block_shape": (2, 2)},
        (12, 12),
        {
            "positions": Positions((2, 6), (2, 2)),
            "memory_positions": Positions((6, 2), (2, 2)),
        },
        r"\(1, 3\) and \(3, 1\) blocks",
    ),
    (
        local,
        {"block_shape": 2, "dilation": 3},
        (12, 6),
        CROSS,
        "`dilation` .* is_cross",
    ),
    *(
        (kinds.fixed, {}, (12, 9), options, "(?s)same length.*lengths 12 and 9")
        for options in ({}, CAUSAL)
    ),
    (hashed, {"num_rounds": 2}, (12, 12), CROSS, "`num_rounds` must be 1 .*rounds=2"),
    (
        hashed,
        {"num_rounds": 2, "share_query_key": False},
        (12, 12),
        {},
        "`share_query_key` must be True without",
    ),
    *(
        (
            kinds.routed,
            {"routing": routing, "share_query_key": False},
            (12, 12),
            options,
            f'`routing="{routing}"`(?=.*"expert_choice").*Received: {received}',
        )
        for routing in ("token_choice", "expert_threshold")
        for options, received in (
            ({}, SOUND.format(False, False)),
            (CROSS, SOUND.format(False, True)),
            (CROSS | CAUSAL, SOUND.format(True, True)),
        )
    ),
    (
        kinds.routed,
        {},
        (12, 12),
        CROSS | CAUSAL,
        f"`routing=None` .*Received: {SOUND.format(True, True)}",
    ),
]


@pytest.mark.parametrize("make, options, lengths, call, message", CALLED)
def test_refuses_calls_that_do_not_fit(make, options, lengths, call, message):
    group = make(**options)
    query, key, value = (
        helpers.normal(1, HEADS, lengths[n > 0], DIM, seed=n) for n in range(3)
    )
    with pytest.raises(ValueError, match=message):
        group(query, key, value, **call)


def test_refuses_an_unknown_scope_of_a_call():
    attention = layers.MixedAttention([kinds.routed()], 4)
    with pytest.raises(ValueError, match="`routing_scope`.*routing_scope='last'"):
        attention(np.ones((1, 9, 5), "float32"), routing_scope="last")


def test_refuses_a_cache_of_rounds_in_another_sequence():
    attention = layers.MixedAttention([hashed(num_rounds=2)], 4)
    attention.build((None, None, 6))
    with pytest.raises(ValueError, match="`num_rounds` must be 1"):
        attention.make_cache(1, 4, value=np.ones((1, 5, 6), "float32"))


def test_blocks_longer_than_the_sequence_are_cut_to_it():
    x = helpers.normal(1, HEADS, 5, DIM)
    group = local((8,), memory_block_shape=(6,))
    assert group(x, x, x, use_causal_mask=True).shape == x.shape
