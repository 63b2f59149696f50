"""What heads refuse together; `tests/layers/refusals_test` has each wrong argument."""

import functools

import numpy as np
import pytest

from routing_tf import layers
from routing_tf import zoo
from routing_tf.layers.support.positions import Positions
from tests.layers import helpers
from tests.layers import kinds

HEADS, DIM = 2, 6
local = functools.partial(layers.LocalHeads, HEADS)
hashed = functools.partial(layers.HashedHeads, HEADS, num_buckets=4, attention_window=4)
reformer = functools.partial(
    zoo.ReformerHeads, HEADS, num_buckets=4, attention_window=4
)
several = functools.partial(
    layers.RoutedHeads, HEADS, 3, attention_window=6, clusters_per_query=2
)
rectangles = functools.partial(local, (2, 2))
three = functools.partial(layers.FixedHeads, 3)
sliding = functools.partial(layers.SlidingHeads, HEADS, 0)
MADE = [
    (rectangles, {"dilation": 3}, r"`dilation`.*dilation=3 .*block_shape=\(2, 2\)"),
    *(
        (rectangles, {"memory_block_shape": memory}, r"`memory_block.*_shape=\(2, 2\)")
        for memory in ((2,), (2, 3))
    ),
    (three, {"arrangement": "separate"}, "`num_heads`.*num_heads=3"),
    (sliding, {"is_strided": True}, "`radius`.*`is_strided=True`.*radius=0"),
    (reformer, {"num_buckets": 5, "hash": "rotation"}, "`num_buckets`.*num_buckets=5"),
    *(
        (
            reformer,
            {"attends_to_self": False, **options},
            "`attends_to_self=False`.*Received: share_query_key=",
        )
        for options in ({"share_query_key": False}, {"key_shift": 1})
    ),
    # Those of classes of the zoo.
    (hashed, {"num_rounds": 2}, "HashedHeads.*'num_rounds'"),
    (several, {"threshold_decay": 0.9}, "RoutedHeads.*'threshold_decay'"),
    (local, {"block_shape": (4,), "entmax_alpha": 1.5}, "LocalHeads.*'entmax_alpha'"),
    (
        functools.partial(layers.MixedAttention, [zoo.LunaHeads(HEADS)], DIM),
        {"qk_norm": True},
        "`qk_norm`.*LunaHeads.*qk_norm=True",
    ),
    (
        functools.partial(zoo.EntmaxRoutedHeads, HEADS, 3, 6),
        {"clusters_per_query": 2},
        r"`clusters_per_query`.*clusters_per_query=2 .*entmax_alpha=1\.5",
    ),
    *(
        (several, options, f"`clusters_per_query`.*{received}")
        for options, received in (
            ({"routing": "expert_choice"}, "routing='expert_choice'"),
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
SEPARATE = kinds.SEPARATE
PLACES = {
    "positions": Positions((2, 6), (2, 2)),
    "memory_positions": Positions((6, 2), (2, 2)),
}


def blocks(shape, memory=None, **options):
    return local(shape, memory_block_shape=memory, **options)


# Heads, the length of the memory, and what else they are called with.
CALLED = [
    (lambda: blocks((4,), (8,)), 12, {}, "`query`.*`value`.* 12 .* 4, .* 12 .* 8"),
    (
        lambda: blocks((5,), (4,)),
        12,
        CAUSAL,
        r"`memory_block_shape`.*`block_shape`.*=\(4,\) .*=\(5,\)",
    ),
    (*(lambda: blocks((4,), (4,)), 6, {}), "`query`.*`value`.* 12 .* 4, .* 6 .* 4"),
    (lambda: blocks((2, 2)), 12, {}, r"`block_shape`.*block_shape=\(2, 2\) .* 1 "),
    (lambda: blocks((2, 2)), 12, PLACES, r"`query`.*`value`.*\(1, 3\) .*\(3, 1\)"),
    (lambda: blocks(2, dilation=3), 6, CROSS, "`dilation` .* is_cross"),
    *(
        (kinds.fixed, 9, options, r"`query`.*`value`.* 12 .* 9\.")
        for options in ({}, CAUSAL)
    ),
    (lambda: reformer(num_rounds=2), 12, CROSS, "`num_rounds`.*num_rounds=2"),
    (
        *(lambda: reformer(num_rounds=2, **SEPARATE), 12, {}),
        "`share_query_key`.*share_query_key=False",
    ),
    *(
        (
            *(functools.partial(make, **SEPARATE), 12, call),
            f'{written}(?=.*"expert_choice").*Received: {received}',
        )
        for make, written in (
            (
                functools.partial(kinds.routed, routing="token_choice"),
                '`routing="token_choice"`',
            ),
            (kinds.thresholds, "`ThresholdHeads`"),
        )
        for call, received in (
            ({}, SOUND.format(False, False)),
            (CROSS, SOUND.format(False, True)),
            (CROSS | CAUSAL, SOUND.format(True, True)),
        )
    ),
    (
        *(kinds.routed, 12, CROSS | CAUSAL),
        f"`routing=None` .*Received: {SOUND.format(True, True)}",
    ),
]


@pytest.mark.parametrize("make, memory_length, call, message", CALLED)
def test_refuses_calls_that_do_not_fit(make, memory_length, call, message):
    group = make()
    with pytest.raises(ValueError, match=message):
        group(*helpers.streams(12, memory_length), **call)


def test_refuses_an_unknown_scope_of_a_call():
    attention = layers.MixedAttention([kinds.routed()], 4)
    with pytest.raises(ValueError, match="`routing_scope`.*routing_scope='last'"):
        attention(np.ones((1, 9, 5), "float32"), routing_scope="last")


def test_refuses_a_cache_of_rounds_in_another_sequence():
    attention = layers.MixedAttention([reformer(num_rounds=2)], 4)
    attention.build((None, None, 6))
    with pytest.raises(ValueError, match="`num_rounds`.*num_rounds=2"):
        attention.make_cache(1, 4, value=np.ones((1, 5, 6), "float32"))


def test_blocks_longer_than_the_sequence_are_cut_to_it():
    x = helpers.normal(1, HEADS, 5, DIM)
    group = local((8,), memory_block_shape=(6,))
    assert group(x, x, x, use_causal_mask=True).shape == x.shape
