"""Attention token by token, with a cache, equals attention in one pass."""

import functools
import unittest.mock

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from routing_tf.layers.support.positions import Positions
from routing_tf.models.release import heads as release_heads
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.layers.helpers import normal
from tests.zoo import cases

HEADS, DIM, KEY_DIM, LENGTH = kinds.HEADS, 8, 6, 23
NORMALISED = {"qk_norm": True, "logit_soft_cap": 1.5}
# With whom a query is a member decides its output: no two scores are near a tie here.
CASES = {
    **kinds.CAUSAL,
    **{
        f"{kind}_{window}": functools.partial(
            kinds.CAUSAL[kind], attention_window=window
        )
        for kind in ("token_choice", "threshold", "prefix_shifted")
        for window in (1, 100)
    },
    "rotary": functools.partial(kinds.routed, rotary_positions=True),
    "whole_clusters": functools.partial(
        kinds.APART["multipole_apart"], keeps_all=True, key_shift=1
    ),
    "budget": functools.partial(
        kinds.APART["multipole_apart"],
        attention_window=5,
        members_per_cluster=4,
        choice="centroid",
    ),
    "far": functools.partial(
        kinds.APART["multipole_apart"], rotary_positions=True, far_distance=7
    ),
    "rotary_indexed_shifted": functools.partial(
        kinds.CAUSAL["indexed"], rotary_positions=True, key_shift=1, qk_norm=True
    ),
    "rotary_local_shifted": functools.partial(
        layers.LocalHeads, HEADS, (4,), rotary_positions=True, key_shift=1, **NORMALISED
    ),
    **{
        f"normalised_{kind}": functools.partial(kinds.CAUSAL[kind], **NORMALISED)
        for kind in ("sliding_strided", "two_clusters_apart_shifted", "rounds")
    },
    "entmax_full": functools.partial(
        zoo.EntmaxFullHeads, HEADS, entmax_alpha="learned"
    ),
    "entmax_apart": functools.partial(
        *(zoo.EntmaxRoutedHeads, HEADS),
        **{"share_query_key": False, **kinds.SIZES, **kinds.RELATIVE},
    ),
}


# What is called once is quicker without a graph; the tests of `generate` have one.
called_once = functools.partial(helpers.compiled, jit_compile=None)
attention = functools.partial(helpers.attention, key_dim=KEY_DIM)
WHOLE = {"use_causal_mask": True, "routing_scope": "prefix"}


# One for each cache; the others differ in what is put into it.
FEW = ("token_choice_apart_shifted", "threshold_apart_shifted", "prefix_shifted")
FEW += ("hashed_apart", "rotary_local_shifted", "linear_shifted", "global", "budget")
FEW += ("native_sparse", "luna", "sinkhorn", "indexed")
# With shifted keys a cache holds what it holds without, and one key more.
STEPPED = [case for case in CASES if case in FEW or f"{case}_shifted" not in CASES]


@pytest.mark.parametrize("case", kinds.some(STEPPED, FEW))
def test_steps_equal_the_whole(case):
    # Bounded memories go on behind the length that they were made for.
    expected, unmasked = helpers.assert_steps_equal_the_whole(
        attention(CASES[case]()),
        DIM,
        max_length=3 if case in kinds.BOUNDED else None,
        has_bias=case not in cases.WITHOUT_BIAS,
    )
    # A token that sees itself alone, or nothing, does not mind.
    alone = ("token_choice_1", "threshold_1", "prefix_shifted_1")
    assert case in alone or np.any(unmasked != expected)
    if "_shifted" in case and not case.startswith("learned"):
        assert np.all(expected[:, 0] == 0.0)


@pytest.mark.parametrize("case", kinds.some(("prefix", "cluster_strided"), ["prefix"]))
def test_rounding_does_not_choose_among_equal_tokens(case):
    layer = attention(CASES[case]())
    few = np.random.default_rng(0).integers(3, size=(2, LENGTH))
    x = normal(3, DIM)[few]
    rounded = x * (1 + 1e-7 * normal(*x.shape, seed=1))
    outputs = [golden_cases.run(layer, each, **WHOLE)[0] for each in (x, rounded)]
    golden_cases.assert_close(*outputs, 1e-5)
    helpers.assert_pieces_equal_the_whole(layer, rounded, 20, whole=WHOLE)


rectangles = functools.partial(layers.LocalHeads, HEADS, (2, 3))
strides = functools.partial(layers.StridedHeads, HEADS, (2, 3))
GROUPS = {
    "blocks": lambda: [rectangles(), kinds.experts()],
    "mixed": lambda: [rectangles(flange_blocks=(0, 1)), strides()],
    "axial": lambda: [
        rectangles(),
        zoo.AxialHeads(HEADS, 0, **kinds.RELATIVE),
        zoo.AxialHeads(HEADS, 1, key_shift=1, **kinds.RELATIVE),
        zoo.AxialHeads(HEADS),
    ],
    "chosen": lambda: [rectangles(), CASES["best_blocks"](), cases.native_sparse()],
    "shifted": lambda: [
        rectangles(flange_blocks=(0, 1), key_shift=1),
        CASES["token_choice_apart_shifted"](),
        strides(key_shift=1),
    ],
}


@pytest.mark.parametrize("groups", kinds.some(GROUPS, ["mixed"]))
def test_steps_on_two_axes_follow_the_blocked_order(groups):
    layer = attention(*GROUPS[groups](), axes=2, use_gate=True)
    image = normal(2, 4, 6, DIM)
    order = Positions((4, 6), (2, 3))
    # Native sparse heads refuse a bias.
    decoder = helpers.Decoder(layer, has_bias=groups != "chosen")

    def in_order(image):
        sequence = np.reshape(image, (2, 24, DIM))
        return golden_cases.to_numpy(order.arrange(sequence, axis=1))

    every, bias = np.ones((2, 4, 6), "bool"), np.zeros((2, 4, 6), "float32")
    tokens = in_order(image), every.reshape(2, 24), bias.reshape(2, 24)
    expected = in_order(decoder.whole(image, every, bias))
    steps, _ = decoder.steps(tokens, layer.make_cache(2, (4, 6)), 0, 24)
    golden_cases.assert_close(steps, expected, 1e-5)
    real = golden_cases.to_numpy(order.restore(np.arange(24) < 14, axis=0))
    real = np.broadcast_to(real.reshape(1, 4, 6), (2, 4, 6))
    _, cache = decoder.start(image, real, bias, layer.make_cache(2, (4, 6)))
    rest, _ = decoder.steps(tokens, cache, 14, 24, 5)
    golden_cases.assert_close(rest, expected[:, 14:], 1e-5)


def assert_follows(call, cache, fed):
    """Fails unless a call refuses all known indices but that of the next token."""
    for index in (fed - 3, np.array(fed - 1), np.int64(fed + 1)):
        for each in (index, ops.convert_to_tensor(index)):
            with pytest.raises(ValueError, match=f"cache_index={index} .* {fed}[.,]"):
                call(cache, each)
    call(cache, np.array(fed))


@helpers.further_on_jax
@pytest.mark.parametrize("case", ["token_choice", "full_shifted", "linear", "local"])
def test_a_step_follows_what_the_cache_was_fed(case):
    layer, x = attention(CASES[case]()), normal(2, LENGTH, DIM)

    def step(cache, index, **masks):
        return layer(x[:, :1], cache=cache, cache_index=index, **masks)

    empty = layer.make_cache(2, LENGTH)
    _, cache = layer(x[:, :12], cache=empty)
    assert_follows(step, cache, 12)
    assert_follows(step, step(cache, 12)[1], 13)
    # Padding may be room, of steps too; the longest row counts.
    masks = {"query_mask": helpers.tail_mask(12, 5, 8)}
    _, cache = layer(x[:, :12], cache=empty, **masks)
    _, after = step(cache, 12, query_mask=np.zeros((2, 1), "bool"))
    for index in (8, 10, 13):
        step(after, index)
    for index in (7, 14):
        with pytest.raises(ValueError, match="`cache_index`.* 13, .* 8 "):
            step(after, index)
    # A tensor of 0 starts anew, as an integer does.
    expected, _ = step(empty, 0)
    for start in (np.array(0), ops.convert_to_tensor(0)):
        outputs = golden_cases.to_numpy([step(cache, start)[0], expected])
        golden_cases.assert_close(*outputs, 1e-6)


@helpers.further_on_jax
def test_steps_in_a_memory_and_in_blocks_follow_too():
    """Routed heads count the queries of clusters in another sequence."""
    x, memory = normal(1, 9, DIM), normal(1, 7, DIM, seed=1)
    reading = attention(kinds.experts())
    reading(x, value=memory)
    block = helpers.block(CASES["token_choice"](), cross_attention=reading)
    of_reading = reading.make_cache(1, LENGTH, value=memory)
    of_block = block.make_cache(1, LENGTH, memory=memory)
    for layer, cache in ((reading, of_reading), (block, of_block)):

        def step(cache, index, layer=layer):
            return layer(x[:, :1], cache=cache, cache_index=index)

        assert_follows(step, layer(x, cache=cache)[1], 9)


@helpers.further_on_jax
@pytest.mark.parametrize(
    "case", kinds.some(("best_blocks", "native_sparse", "linear", "luna"), ["linear"])
)
def test_a_first_step_on_two_axes_starts_anew(case):
    groups = rectangles(), CASES[case]()
    layer, x = attention(*groups, axes=2), normal(1, 6, DIM)
    _, cache = layer(x, cache=layer.make_cache(1, (2, 3)), cache_index=None)
    for index in (0, ops.convert_to_tensor(0)):
        first, after = layer(x[:, 3:4], cache=cache, cache_index=index)
        second, _ = layer(x[:, 4:5], cache=after, cache_index=1)
        both = keras.ops.concatenate([first, second], axis=1)
        whole, _ = layer(x[:, 3:5], cache=layer.make_cache(1, (2, 3)))
        golden_cases.assert_close(*golden_cases.to_numpy([both, whole]), 1e-5)


MEMORIES = [kind for kind in kinds.MEMORIES if kind != "clustered_queries"]
FEW_MEMORIES = ("experts_apart", "hashed", "local", "strided", "performer")


@pytest.mark.parametrize("kind", kinds.some(MEMORIES, FEW_MEMORIES))
def test_steps_of_attention_to_a_memory(kind):
    options = {"qk_norm": kind in ("experts_apart", "local")}
    layer = attention(kinds.MEMORIES[kind](), use_gate=True, **options)
    has_bias = kind not in cases.WITHOUT_BIAS
    helpers.assert_steps_read_a_memory(layer, DIM, has_bias)


def reading():
    return layers.MixedAttention([layers.FullHeads(HEADS)], KEY_DIM)


BLOCKS = {
    "both": lambda: helpers.block(
        *(CASES["token_choice"](), CASES["local"]()),
        feed_forward=layers.FeedForward(16),
        cross_attention=reading(),
        norm_position="pre",
    ),
    "a memory alone": lambda: helpers.block(cross_attention=reading(), memory_dim=5),
    "experts": lambda: helpers.block(
        layers.FullHeads(HEADS), feed_forward=zoo.MixtureOfExperts(3, 5, 4, top_k=2)
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_hands_its_caches_on(name):
    block, x = BLOCKS[name](), normal(2, LENGTH, DIM)
    depth = 5 if name == "a memory alone" else DIM
    memory, real = normal(2, 7, depth, seed=1), helpers.tail_mask(7, 7, 5)
    about = {"memory": memory, "memory_mask": real} if block.cross_attention else {}

    def both(x, about):
        expected = block(x, routing_scope="prefix", **about)
        cache = block.make_cache(2, LENGTH, **about)
        _, cache = block(x[:, 3:], cache=cache, cache_index=0)  # is forgotten
        first, cache = block(x[:, :-3], cache=cache, cache_index=0)
        second, cache = block(x[:, -3:-2], cache=cache, cache_index=LENGTH - 3)
        last = ops.convert_to_tensor(LENGTH - 2, "int32")
        rest, _ = block(x[:, -2:], cache=cache, cache_index=last)
        return expected, ops.concatenate([first, second, rest], axis=1)

    golden_cases.assert_close(*called_once(both)(x, about), 1e-5)


EMPTIED = ("local", "sliding", "token_choice", "threshold", "hashed", "prefix", "row")


@pytest.mark.parametrize("kind", kinds.some((*EMPTIED, "linear"), ["local"]))
def test_a_start_may_be_one_token(kind):
    """And forgets what was before, as any."""
    layer, x = attention(CASES[kind]()), normal(1, LENGTH, DIM)

    def both(x):
        _, cache = layer(x[:, :9], cache=layer.make_cache(1, LENGTH), cache_index=0)
        first, cache = layer(x[:, 3:4], cache=cache, cache_index=0)
        rest, _ = layer(x[:, 4:9], cache=cache, cache_index=1)
        return layer(x[:, 3:9], **WHOLE), ops.concatenate([first, rest], axis=1)

    golden_cases.assert_close(*called_once(both)(x), 1e-5)


def test_a_start_scores_tokens_once():
    layer = attention(CASES["token_choice"]())
    (group,) = layer.head_groups
    call = called_once(
        lambda x: layer(x, cache=layer.make_cache(1, LENGTH), cache_index=0)
    )
    with unittest.mock.patch.object(group, "scores", wraps=group.scores) as scores:
        call(normal(1, 9, DIM))
    assert scores.call_count == 1


def test_a_first_step_starts_anew():
    """Also on two axes, and of attention to another sequence; losses are not left."""
    image = attention(rectangles(), CASES["token_choice"](), axes=2)
    memory = attention(kinds.fixed(), kinds.experts())
    for layer, options in (
        (image, {"max_length": (2, 3)}),
        (memory, {"max_length": 6, "value": normal(1, 6, DIM, seed=1)}),
    ):

        def both(x, layer=layer, options=options):
            cache = layer.make_cache(1, **options)
            first, cache = layer(x, cache=cache, cache_index=0)
            losses = list(layer.losses)
            again, _ = layer(x, cache=cache, cache_index=0)
            whole = first
            if "value" in options:
                whole = layer(x, value=options["value"])
            return losses, whole, first, again

        losses, whole, *others = called_once(both)(normal(1, 6, DIM))
        assert losses == []
        for output in others:
            golden_cases.assert_close(output, whole, 1e-5)


def test_a_stateless_call_takes_a_cache():
    """Keras hands arguments on as they are there; a usual call wraps a cache."""
    attention = layers.MixedAttention([layers.LocalHeads(2, (4,))], key_dim=4)
    block = layers.TransformerBlock(attention, None)
    block.build((1, 6, 8))
    for layer, options in ((attention, {"use_causal_mask": True}), (block, {})):
        weights = layer.trainable_variables, layer.non_trainable_variables

        def both(x, layer=layer, options=options, weights=weights):
            cache = {"cache": layer.make_cache(1, 6), "cache_index": 0}
            (output, _), _ = layer.stateless_call(*weights, x, **cache)
            return output, layer(x, **options)

        golden_cases.assert_close(*called_once(both)(normal(1, 6, 8)), 1e-5)


def test_a_cache_may_be_made_before_the_weights():
    layer = layers.MixedAttention([kinds.experts(), CASES["local"]()], KEY_DIM)
    cache = layer.make_cache(2, LENGTH)
    layer.build((None, None, DIM))
    step = called_once(lambda x, cache: layer(x, cache=cache, cache_index=0)[0])
    assert step(normal(2, 3, DIM), cache).shape == (2, 3, DIM)
    layer = layers.MixedAttention([kinds.experts()], KEY_DIM)
    with pytest.raises(ValueError, match=r"`value`.*value\.shape=\(1, 7, 8\)"):
        layer.make_cache(2, LENGTH, value=normal(1, 7, DIM))


@pytest.mark.parametrize(
    "case",
    ["full", pytest.param("token_choice_apart_shifted", marks=pytest.mark.thorough)],
)
def test_the_mask_of_the_keys_counts_with_a_cache(case):
    """Also where the query of a key is padding."""
    layer, x = attention(CASES[case]()), normal(2, LENGTH, DIM)
    masks = {
        "value_mask": helpers.mask_with_a_hole(LENGTH, LENGTH, LENGTH - 4),
        "query_mask": helpers.tail_mask(LENGTH, 20, LENGTH),
    }
    masks["query_mask"][:, [2, 5, 13]] = False
    shown = masks["query_mask"] & masks["value_mask"]
    helpers.assert_pieces_equal_the_whole(layer, x, 9, shown=shown, **masks)


@helpers.further_on_jax
@pytest.mark.parametrize("key_shift", [0, 1])
def test_steps_in_half_precision(key_shift):
    """Of groups whose own precision is another one."""
    groups = [CASES["local"](key_shift=key_shift), kinds.experts(key_shift=key_shift)]
    if key_shift:
        groups.append(CASES["token_choice_apart_shifted"]())
    layer = attention(*groups, dtype="mixed_bfloat16")
    x, cache = normal(1, 3, DIM), layer.make_cache(1, LENGTH)
    for index in range(3):
        output, after = layer(x[:, :1], cache=cache, cache_index=np.int64(index))
        specs = [
            keras.tree.map_structure(lambda x: (x.dtype, tuple(x.shape)), each)
            for each in (cache, after)
        ]
        assert specs[0] == specs[1]
        cache = after
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"


@pytest.mark.thorough
def test_chosen_blocks_in_half_precision():
    dtype = "mixed_bfloat16"
    groups = [CASES["best_blocks"](dtype=dtype), cases.native_sparse(dtype=dtype)]
    layer = attention(*groups, dtype=dtype)

    # So small that little changes where rounding chooses another block.
    x = 0.1 * normal(2, 24, DIM)
    helpers.assert_pieces_equal_the_whole(layer, x, 9, tolerance=0.05)


@pytest.mark.parametrize("kind", ["Hashed", "ClusterStrided", "Routed"])
def test_heads_that_look_ahead_have_no_cache(kind):
    layer = attention(getattr(release_heads, f"Trained{kind}Heads")(HEADS, 4, 5))
    memory = {"value": normal(1, 7, DIM)} if kind == "Routed" else {}
    with pytest.raises(ValueError, match=f"Received: .*Trained{kind}Heads"):
        layer.make_cache(1, LENGTH, **memory)


def test_refused():
    layer, x = attention(kinds.experts()), normal(1, 1, DIM)
    two_axes = attention(rectangles())
    block = layers.TransformerBlock(layer, None)
    without_a_mask = layers.TransformerBlock(layer, None, use_causal_mask=False)
    memory, deeper = normal(1, 7, DIM), normal(1, 7, DIM + 1)
    for make, length, options, message in (
        (layer, 0, {}, "`max_length`.*max_length=0"),
        (two_axes, 4, {}, r"`max_length`.*max_length=4 .*\(2, 3\)"),
        (layer, LENGTH, {"value": deeper}, r"`value`.* 8\..*value\.shape=\(1, 7, 9\)"),
        (without_a_mask, LENGTH, {}, "Received: use_causal_mask=False"),
        (block, LENGTH, {"memory": memory}, r"`memory`.*memory=\(1, 7, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            make.make_cache(1, length, **options)
    cache, image = layer.make_cache(1, LENGTH), normal(1, 2, 2, DIM)
    for tokens, options, message in (
        (x, {"training": True}, "`cache`.*training=True"),
        (keras.Input((1, DIM)), {}, "`cache`.*<KerasTensor"),
        (x, {"return_attention_scores": True}, "return_attention_scores=True"),
        (normal(2, 1, DIM), {}, r"`cache`.*query\.shape=\(2, 1, 8\) .* 1\."),
        (image, {"cache_index": 4}, r"`query`.*\.shape=\(1, 2, 2, 8\) .*cache_index=4"),
        (x, {"value": memory}, r"`cache`.*Received: value\.shape=\(1, 7, 8\)"),
        *(
            (x, {"cache_index": index}, rf"`cache_index`.*cache_index={received}")
            for index, received in (
                (1.0, r"1\.0"),
                (True, "True"),
                (ops.zeros(()), r".*float32.*\(\)"),
                (ops.zeros((1,), "int32"), r".*int32.*\(1,\)"),
            )
        ),
    ):
        with pytest.raises(ValueError, match=message):
            layer(tokens, cache=cache, **{"cache_index": 0, **options})
    for kind in ("full", "random", "random_logits"):
        bounded = attention(CASES[kind]())
        cache = bounded.make_cache(1, 4)
        for index, length in ((4, 1), (np.int32(3), 2), (0, 5), (None, 5), (-1, 1)):
            with pytest.raises(ValueError, match="`cache_index`.*=.* 4 "):
                bounded(normal(1, length, DIM), cache=cache, cache_index=index)
