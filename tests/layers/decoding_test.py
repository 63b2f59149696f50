"""Attention token by token, with a cache, equals attention in one pass."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.layers.helpers import normal

HEADS, DIM, KEY_DIM, LENGTH = 2, 8, 6, 29
RELATIVE = {"max_relative_position": 5, "embeddings_initializer": "zeros"}

routed = functools.partial(
    layers.RoutedHeads, HEADS, 3, routing="expert_choice", **RELATIVE
)
strided = functools.partial(layers.ClusterStridedHeads, HEADS, 3, **RELATIVE)
# With whom a query is a member decides its output: no two scores are near a tie here.
CLUSTERED = {
    "token_choice": functools.partial(routed, routing="token_choice"),
    "expert_choice": routed,
    "cluster_strided": strided,
    "hashed": functools.partial(layers.HashedHeads, HEADS, 4, **RELATIVE),
    "random": functools.partial(layers.RandomHeads, HEADS, 3, **RELATIVE),
}
OTHERS = {
    "local": functools.partial(
        layers.LocalHeads, HEADS, (4,), flange_blocks=2, **RELATIVE
    ),
    "local_one_block": functools.partial(layers.LocalHeads, HEADS, (100,), **RELATIVE),
    "full": functools.partial(layers.FullHeads, HEADS, **RELATIVE),
    "strided": functools.partial(layers.StridedHeads, HEADS, (5,), **RELATIVE),
    "fixed": functools.partial(layers.FixedHeads, HEADS, 5, 2),
    "fixed_separate": functools.partial(layers.FixedHeads, HEADS, 5, 2, "separate"),
}
CASES = {
    **{f"{kind}_5": functools.partial(make, 5) for kind, make in CLUSTERED.items()},
    **{
        f"{kind}_5_apart": functools.partial(CLUSTERED[kind], 5, share_query_key=False)
        for kind in ("token_choice", "expert_choice", "cluster_strided", "hashed")
    },
    "token_choice_1": functools.partial(CLUSTERED["token_choice"], 1),
    "token_choice_100": functools.partial(CLUSTERED["token_choice"], 100),
    "expert_choice_1": functools.partial(routed, 1),
    "expert_choice_100": functools.partial(routed, 100),
    **OTHERS,
}
CASES |= {
    f"{case}_shifted": functools.partial(make, key_shift=1)
    for case, make in CASES.items()
}
# What a query can see is bounded: so is what they remember.
BOUNDED = ("token_choice_5", "expert_choice_5", "hashed_5", "local")
BOUNDED_SHIFTED = (
    "token_choice_5_apart_shifted",
    "expert_choice_5_shifted",
    "local_shifted",
)


# XLA takes long to compile the loops; the tests of `generate` have it.
compiled = functools.partial(
    helpers.compiled, jit_compile=keras.backend.backend() == "jax"
)


def attention(*groups, **options):
    layer = layers.MixedAttention(
        groups, KEY_DIM, kernel_initializer="zeros", **options
    )
    layer.build((None, None, DIM))
    helpers.randomize(layer)
    return layer


def mask():
    return helpers.mask_with_a_hole(LENGTH, LENGTH, LENGTH - 4)


def whole(layer, x, **options):
    with layers.use_routing_scope(layer, "prefix"):
        return layer(x, use_causal_mask=True, **options)


def by_steps(layer, x, start, query_mask=None, token_bias=None, max_length=LENGTH):
    """Attends with the first tokens at once, and with the others one by one."""
    cache = layer.make_cache(x.shape[0], max_length)
    outputs = []
    options = {"query_mask": query_mask, "token_bias": token_bias}
    for first, last in ((0, start), (start, x.shape[1])):
        if last > first:
            part = {
                name: None if value is None else value[:, first:last]
                for name, value in options.items()
            }
            index = first if first == 0 and start else ops.cast(first, "int32")
            output, cache = layer(
                x[:, first:last], cache=cache, cache_index=index, **part
            )
            outputs.append(output)
    return ops.concatenate(outputs, axis=1), cache


# These differ from others in a size or a projection alone, and take long to trace.
SLOW = {
    "token_choice_100",
    "expert_choice_1",
    "expert_choice_100",
    "cluster_strided_5",
    "token_choice_5_apart",
    "random_5",
    "full",
    *(case for case in CASES if case.endswith("_shifted")),
} - {
    # With shifted keys each kind of memory once.
    "token_choice_1_shifted",
    "token_choice_5_apart_shifted",
    "expert_choice_5_shifted",
    "cluster_strided_5_shifted",
    "hashed_5_shifted",
    "random_5_shifted",
    "local_shifted",
    "strided_shifted",
    "fixed_separate_shifted",
    "full_shifted",
}


def slow_ones_marked(cases):
    return [
        pytest.param(case, marks=pytest.mark.slow if case in SLOW else ())
        for case in cases
    ]


@pytest.mark.parametrize("case", slow_ones_marked(CASES))
def test_steps_equal_the_whole(case):
    layer, x = attention(CASES[case]()), normal(2, LENGTH, DIM)
    bias = normal(2, LENGTH, seed=2)

    def both_ways(x, real, bias):
        return (
            whole(layer, x),
            by_steps(layer, x, 0)[0],
            whole(layer, x, query_mask=real, token_bias=bias),
            # In the first row padding is the last token of the start.
            by_steps(layer, x, 8, real, bias)[0],
        )

    whole_output, steps, padded, padded_steps = compiled(both_ways)(x, mask(), bias)
    golden_cases.assert_close(steps, whole_output, 1e-5)
    golden_cases.assert_close(padded_steps[mask()], padded[mask()], 1e-5)
    # A token that sees itself alone, or nothing, does not mind.
    sees_others = case not in ("token_choice_1", "expert_choice_1_shifted")
    assert np.any(padded != whole_output) or not sees_others
    if case.endswith("_shifted"):
        assert np.all(whole_output[:, 0] == 0.0)


@pytest.mark.parametrize("case", ["expert_choice_5", "cluster_strided_5"])
def test_rounding_does_not_choose_among_equal_tokens(case):
    layer = attention(CASES[case]())
    kinds = np.random.default_rng(0).integers(3, size=(2, LENGTH))
    x = normal(3, DIM)[kinds]
    rounded = x * (1 + 1e-7 * normal(*x.shape, seed=1))
    expected = whole(layer, x)
    golden_cases.assert_close(whole(layer, rounded), expected, 1e-5)
    golden_cases.assert_close(by_steps(layer, rounded, 8)[0], expected, 1e-5)


@pytest.mark.parametrize(
    "case",
    [
        *slow_ones_marked([*BOUNDED, "cluster_strided_5", "random_5", "full"]),
        "hashed_5_apart",
        *BOUNDED_SHIFTED,
        "cluster_strided_5_shifted",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                "token_choice_5_apart",
                "expert_choice_5_apart",
                "cluster_strided_5_apart",
                "token_choice_5_shifted",
                "hashed_5_shifted",
                "random_5_shifted",
                "full_shifted",
                "strided_shifted",
                "expert_choice_5_apart_shifted",
                "cluster_strided_5_apart_shifted",
                "hashed_5_apart_shifted",
            )
        ),
    ],
)
def test_the_newest_token_may_come_again(case):
    layer, x = attention(CASES[case]()), normal(2, LENGTH, DIM)

    def with_others_before(x):
        _, cache = by_steps(layer, x[:, :13], 7)
        # Others, of which one is padding, and then the token itself.
        for other, real in ((2, True), (5, False), (13, True)):
            output, cache = layer(
                x[:, other : other + 1],
                query_mask=np.full((2, 1), real),
                cache=cache,
                cache_index=np.int32(13),
            )
        last, _ = layer(x[:, 14:15], cache=cache, cache_index=np.int32(14))
        # After a start in one pass too; and the token behind it.
        _, started = layer(x[:, :14], cache=layer.make_cache(2, LENGTH), cache_index=0)
        again, started = layer(x[:, 13:14], cache=started, cache_index=np.int32(13))
        behind, _ = layer(x[:, 14:15], cache=started, cache_index=np.int32(14))
        return whole(layer, x[:, :15]), [output, again], [last, behind]

    expected, newest, behind = compiled(with_others_before)(x)
    for output in newest:
        golden_cases.assert_close(output[:, 0], expected[:, 13], 1e-5)
    for output in behind:
        golden_cases.assert_close(output[:, 0], expected[:, 14], 1e-5)


@pytest.mark.parametrize("case", (*BOUNDED, "token_choice_5_apart", *BOUNDED_SHIFTED))
def test_bounded_memories_cost_the_same_for_any_context(case):
    layer = attention(CASES[case]())
    sizes = [
        [tuple(x.shape) for x in keras.tree.flatten(layer.make_cache(2, length))]
        for length in (1000, 64_000)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "case, max_length",
    [
        *((case, max_length) for case in BOUNDED for max_length in (3, 13)),
        *((case, 3) for case in BOUNDED_SHIFTED),
    ],
)
def test_bounded_memories_go_on_behind_the_length_they_were_made_for(case, max_length):
    layer, x = attention(CASES[case]()), normal(1, LENGTH, DIM)

    def both(x):
        return whole(layer, x), by_steps(layer, x, 0, max_length=max_length)[0]

    expected, steps = compiled(both)(x)
    golden_cases.assert_close(steps, expected, 1e-5)


GROUPS = {
    "blocks": lambda: [layers.LocalHeads(HEADS, (2, 3), **RELATIVE)],
    "wide": lambda: [layers.LocalHeads(HEADS, (2, 3), flange_blocks=(1, 0))],
    "mixed": lambda: [
        layers.LocalHeads(HEADS, (2, 3), flange_blocks=(0, 1)),
        routed(5),
        layers.StridedHeads(HEADS, (2, 3)),
    ],
    "shifted": lambda: [
        layers.LocalHeads(HEADS, (2, 3), flange_blocks=(0, 1), key_shift=1),
        routed(5, routing=None, share_query_key=False, key_shift=1),
        layers.StridedHeads(HEADS, (2, 3), key_shift=1),
    ],
}


@pytest.mark.parametrize("groups", GROUPS)
def test_steps_on_two_axes_follow_the_blocked_order(groups):
    layer = layers.MixedAttention(GROUPS[groups](), KEY_DIM, kernel_initializer="zeros")
    layer.build((None, None, None, DIM))
    helpers.randomize(layer)
    image = normal(2, 4, 9, DIM)
    order = layers.blocks.BlockedOrder((4, 9), (2, 3))

    def both(image):
        sequence = order.arrange(ops.reshape(image, (2, 36, DIM)), axis=1)
        steps, _ = by_steps(layer, sequence, 0, max_length=(4, 9))
        real = order.restore(ops.arange(36) < 14, axis=0)
        real = ops.broadcast_to(ops.reshape(real, (1, 4, 9)), (2, 4, 9))
        _, cache = layer(
            image,
            query_mask=real,
            cache=layer.make_cache(2, (4, 9)),
            cache_index=0,
        )
        rest, _ = layer(sequence[:, 14:], cache=cache, cache_index=np.int32(14))
        output = order.arrange(ops.reshape(whole(layer, image), (2, 36, DIM)), axis=1)
        return output, steps, rest

    expected, steps, rest = compiled(both)(image)
    golden_cases.assert_close(steps, expected, 1e-5)
    golden_cases.assert_close(rest, expected[:, 14:], 1e-5)


MEMORIES = {
    **{kind: functools.partial(make, 5) for kind, make in CLUSTERED.items()},
    "expert_choice_apart": functools.partial(routed, 5, share_query_key=False),
    **{kind: OTHERS[kind] for kind in ("local", "local_one_block", "full", "strided")},
}
del MEMORIES["token_choice"]


@pytest.mark.parametrize("kind", MEMORIES)
def test_steps_of_attention_to_a_memory(kind):
    layer = attention(MEMORIES[kind]())
    x, memory = normal(2, LENGTH, DIM), normal(2, 17, DIM, seed=1)
    real, bias = helpers.tail_mask(17, 17, 12), normal(2, 17, seed=2)

    def both(x, query_mask, memory, real, bias):
        about = {"value_mask": real, "token_bias": bias}
        cache = layer.make_cache(2, LENGTH, value=memory, **about)
        first, cache = layer(
            x[:, :1], value=memory, query_mask=query_mask[:, :1], cache=cache
        )
        _, cache = layer(x[:, 3:4], cache=cache, cache_index=np.int32(1))
        rest, _ = layer(
            x[:, 1:], query_mask=query_mask[:, 1:], cache=cache, cache_index=np.int32(1)
        )
        expected = layer(x, value=memory, query_mask=query_mask, **about)
        return expected, ops.concatenate([first, rest], axis=1)

    expected, steps = compiled(both)(x, mask(), memory, real, bias)
    golden_cases.assert_close(steps[mask()], expected[mask()], 1e-5)


def test_fixed_heads_attend_to_a_memory_of_their_length():
    layer = attention(layers.FixedHeads(HEADS, 5, 2))
    x, memory = normal(2, 12, DIM), normal(2, 12, DIM, seed=1)
    steps, _ = layer(x, cache=layer.make_cache(2, 12, value=memory))
    golden_cases.assert_close(
        steps, golden_cases.to_numpy(layer(x, value=memory)), 1e-5
    )


def test_scores_keep_their_precision():
    """In half precision too: Keras would cast what is given to a layer."""
    layer = attention(routed(5, dtype="mixed_bfloat16"), dtype="mixed_bfloat16")
    cache = layer.make_cache(1, LENGTH)
    x = normal(1, LENGTH, DIM)
    _, cache = layer(x[:, :9], cache=cache, cache_index=0)
    _, cache = layer(x[:, 9:10], cache=cache, cache_index=9)
    (group,) = cache["tokens"]
    assert keras.backend.standardize_dtype(group["key_scores"].dtype) == "float32"
    assert keras.backend.standardize_dtype(group["rows"].dtype) == "bfloat16"
    scores = ops.convert_to_numpy(group["key_scores"])
    rounded = ops.convert_to_numpy(ops.cast(ops.cast(scores, "bfloat16"), "float32"))
    assert np.any(scores != rounded)


def test_a_block_hands_its_caches_on():
    block = layers.TransformerBlock(
        layers.MixedAttention([routed(5)], KEY_DIM),
        layers.FeedForward(16),
        layers.MixedAttention([layers.FullHeads(HEADS)], KEY_DIM),
        norm_position="pre",
    )
    x, memory = normal(2, LENGTH, DIM), normal(2, 7, DIM, seed=1)
    real = helpers.tail_mask(7, 7, 5)
    with layers.use_routing_scope(block, "prefix"):
        expected = golden_cases.to_numpy(block(x, memory=memory, memory_mask=real))
    cache = block.make_cache(2, LENGTH, memory, real)
    first, cache = block(x[:, :20], cache=cache, cache_index=0)
    rest, cache = block(x[:, 20:], cache=cache, cache_index=20)
    steps = golden_cases.to_numpy(ops.concatenate([first, rest], axis=1))
    golden_cases.assert_close(steps, expected, 1e-5)


FLAWED = {
    "hashed": {"buckets_filled_up": True},
    "random": {"members_of_whole_sequence": True},
    "cluster_strided": {"members_of_whole_sequence": True},
}


@pytest.mark.parametrize("kind", FLAWED)
def test_heads_that_look_ahead_have_no_cache(kind):
    layer = attention(CLUSTERED[kind](5, compatibility=FLAWED[kind]))
    with pytest.raises(ValueError, match="no later token decides .*Received: "):
        layer.make_cache(1, LENGTH)


def test_queries_that_compete_have_no_cache():
    layer = attention(routed(5, compatibility={"queries_compete": True}))
    with pytest.raises(ValueError, match="on their own. Received: .*queries_compete"):
        layer.make_cache(1, LENGTH, value=normal(1, 7, DIM))


@pytest.mark.parametrize("case", (*BOUNDED, *BOUNDED_SHIFTED))
def test_a_start_forgets_what_was_before(case):
    layer, x = attention(CASES[case]()), normal(1, LENGTH, DIM)

    def both(x):
        _, old = by_steps(layer, x, 9)
        outputs = []
        for cache in (old, layer.make_cache(1, LENGTH)):
            first, cache = layer(x[:, 3:4], cache=cache, cache_index=0)
            outputs += [first, layer(x[:, 4:9], cache=cache, cache_index=1)[0]]
        return outputs

    first, rest, expected_first, expected_rest = compiled(both)(x)
    golden_cases.assert_close(first, expected_first, 1e-6)
    golden_cases.assert_close(rest, expected_rest, 1e-6)


def test_a_memory_starts_anew_too():
    layer, x = attention(routed(5)), normal(1, 6, DIM)
    old = layer.make_cache(1, 6, value=normal(1, 9, DIM, seed=1))
    first, cache = layer(x, cache=old)
    again, _ = layer(x, cache=cache, cache_index=0)
    golden_cases.assert_close(golden_cases.to_numpy(again), first, 1e-6)


@pytest.mark.parametrize("case", ["full", "token_choice_5_apart_shifted"])
def test_the_mask_of_the_keys_counts_with_a_cache(case):
    """Also where the query of a key is padding."""
    layer, x = attention(CASES[case]()), normal(2, LENGTH, DIM)
    masks = {"value_mask": mask(), "query_mask": helpers.tail_mask(LENGTH, 20, LENGTH)}
    masks["query_mask"][:, [2, 5, 13]] = False

    def both(x, masks):
        cache, outputs = layer.make_cache(2, LENGTH), []
        for start, end in ((0, 9), (9, LENGTH)):
            output, cache = layer(
                x[:, start:end],
                cache=cache,
                cache_index=start,
                **{name: each[:, start:end] for name, each in masks.items()},
            )
            outputs.append(output)
        return whole(layer, x, **masks), ops.concatenate(outputs, axis=1)

    expected, steps = compiled(both)(x, masks)
    shown = masks["query_mask"] & masks["value_mask"]
    golden_cases.assert_close(steps[shown], expected[shown], 1e-5)


@pytest.mark.parametrize("key_shift", [0, 1])
def test_steps_in_half_precision(key_shift):
    """Of groups whose own precision is another one."""
    groups = [OTHERS["local"](key_shift=key_shift), routed(5, key_shift=key_shift)]
    if key_shift:
        groups.append(CASES["token_choice_5_apart_shifted"]())
    layer = attention(*groups, dtype="mixed_bfloat16")
    x, cache = normal(1, 3, DIM), layer.make_cache(1, LENGTH)
    for index in range(3):
        output, after = layer(x[:, :1], cache=cache, cache_index=np.int64(index))
        for old, new in zip(*map(keras.tree.flatten, (cache, after)), strict=True):
            assert old.dtype == new.dtype and tuple(old.shape) == tuple(new.shape)
        cache = after
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"


def test_no_losses_are_left():
    layer, x = attention(routed(5)), normal(1, 3, DIM)
    cache = layer.make_cache(1, LENGTH)
    _, cache = layer(x, cache=cache, cache_index=0)
    assert layer.losses == []
    layer(x[:, :1], cache=cache, cache_index=3)
    assert layer.losses == []
    layer(x, use_causal_mask=True)
    assert len(layer.losses) == 1


def test_a_cache_may_be_made_before_the_weights():
    layer = layers.MixedAttention([routed(5), OTHERS["local"]()], KEY_DIM)
    cache = layer.make_cache(2, LENGTH)
    output, _ = layer(normal(2, 3, DIM), cache=cache, cache_index=0)
    assert output.shape == (2, 3, DIM)
    layer = layers.MixedAttention([routed(5)], KEY_DIM)
    with pytest.raises(ValueError, match=r"must be built .*shape=\(1, 7, 8\)"):
        layer.make_cache(2, LENGTH, value=normal(1, 7, DIM))


def test_refused():
    layer, x = attention(routed(5)), normal(1, 1, DIM)
    with pytest.raises(ValueError, match="positive integer. Received: max_length=0"):
        layer.make_cache(1, 0)
    with pytest.raises(ValueError, match=r"axis of positions .*max_length=4 with"):
        attention(layers.LocalHeads(HEADS, (2, 3))).make_cache(1, 4)
    cache = layer.make_cache(1, LENGTH)
    with pytest.raises(ValueError, match="None while training .*training=True"):
        layer(x, cache=cache, cache_index=0, training=True)
    with pytest.raises(ValueError, match="return_attention_scores=True"):
        layer(x, cache=cache, cache_index=0, return_attention_scores=True)
    with pytest.raises(ValueError, match=r"shape=\(2, 1, 8\) and a cache for 1. Pass"):
        layer(normal(2, 1, DIM), cache=cache, cache_index=0)
    image = normal(1, 2, 2, DIM)
    with pytest.raises(ValueError, match=r"one by one, .*\(1, 2, 2, 8\) with .*=4"):
        layer(image, cache=cache, cache_index=4)
    with pytest.raises(ValueError, match="depth that the layer was built with, 8"):
        layer.make_cache(1, LENGTH, value=normal(1, 7, DIM + 1))
    block = layers.TransformerBlock(layer, None, use_causal_mask=False)
    with pytest.raises(ValueError, match="Received: use_causal_mask=False"):
        block.make_cache(1, LENGTH)
    block = layers.TransformerBlock(layer, None)
    with pytest.raises(ValueError, match=r"`memory` must be given .*\(1, 7, 8\)"):
        block.make_cache(1, LENGTH, memory=normal(1, 7, DIM))
    for kind in ("full", "random_5"):
        bounded = attention(CASES[kind]())
        for index, length in ((4, 1), (np.int32(3), 2), (0, 5), (None, 5), (-1, 1)):
            with pytest.raises(ValueError, match="Received: cache_index=.* room for 4"):
                bounded(
                    normal(1, length, DIM),
                    cache=bounded.make_cache(1, 4),
                    cache_index=index,
                )
    with pytest.raises(ValueError, match=r"must hold the memory .*shape=\(1, 7, 8\)"):
        layer(x, value=normal(1, 7, DIM), cache=cache, cache_index=0)
