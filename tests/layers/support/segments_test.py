"""Packed documents: no token sees another segment."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf.layers.support.segments import Segments
from routing_tf.layers.support.segments import next_positions
from routing_tf.models.release import heads as release_heads
from tests import golden_cases
from tests.layers import helpers
from tests.layers.helpers import normal
from tests.layers.support.lengths_test import some_thorough

THOROUGH = pytest.mark.thorough
HEADS, DIM, KEY_DIM, BATCH = 2, 8, 6, 2
RELATIVE = {"max_relative_position": 5, "embeddings_initializer": "zeros"}
# Three documents, the last of which has the id of the first, and padding.
LENGTHS, IDS = (7, 12, 9), (5, 2, 5)
BORDERS = np.cumsum((0, *LENGTHS))
ROW = np.repeat((*IDS, 0), (*LENGTHS, 3)).astype("int32")
SEGMENT_IDS = np.stack([ROW] * BATCH)
LENGTH = len(ROW)
MIDDLE = slice(*BORDERS[1:3])

routed = functools.partial(layers.RoutedHeads, HEADS, 3, 5, **RELATIVE)
expert = functools.partial(routed, routing="expert_choice")
prefix = functools.partial(expert, routing_scope="prefix", prefix_block_size=6)
hashed = functools.partial(layers.HashedHeads, HEADS, 4, 5, **RELATIVE)
strided = functools.partial(layers.ClusterStridedHeads, HEADS, 3, 5, **RELATIVE)
APART = {"share_query_key": False}
REFORMER = {"hash": "rotation", "normalization": "unit_keys", "attends_to_self": False}
# Those whose outputs are the same as for each document alone.
BOTH = {
    "full": functools.partial(layers.FullHeads, HEADS, **RELATIVE),
    "rotary": functools.partial(
        layers.FullHeads, HEADS, rotary_positions=True, **RELATIVE
    ),
    "sliding": functools.partial(layers.SlidingHeads, HEADS, 4, **RELATIVE),
    "sliding, strided": functools.partial(layers.SlidingHeads, HEADS, 4, True),
    "strided": functools.partial(layers.StridedHeads, HEADS, (4,), **RELATIVE),
    "hashed": hashed,
    "random": functools.partial(layers.RandomHeads, HEADS, 3, 5, **RELATIVE),
    "random, apart": functools.partial(layers.RandomHeads, HEADS, 3, 5, **APART),
}
CAUSAL = {
    **BOTH,
    "token choice": routed,
    "token choice, apart": functools.partial(routed, **APART),
    "two clusters": functools.partial(
        layers.RoutedHeads, HEADS, 3, 6, clusters_per_query=2, **RELATIVE
    ),
    "threshold": functools.partial(routed, routing="expert_threshold"),
    "threshold, apart": functools.partial(routed, routing="expert_threshold", **APART),
    "prefix": prefix,
    "prefix, apart": functools.partial(prefix, **APART),
    "cluster-strided": functools.partial(strided, prefix_block_size=6),
    "hashed, apart": functools.partial(hashed, **APART),
    "rounds": functools.partial(hashed, num_rounds=3),
    "rounds, apart": functools.partial(hashed, num_rounds=3, **APART),
}
CAUSAL |= {
    f"{name}, shifted": functools.partial(make, key_shift=1)
    for name, make in CAUSAL.items()
}
CAUSAL["reformer"] = functools.partial(hashed, num_rounds=2, **REFORMER)
# Whether a token is a member depends on later ones, in its segment alone.
LEAKY = "expert choice, leaky"
CAUSAL[LEAKY] = expert
NOT_CAUSAL = {
    **BOTH,
    "expert choice": routed,
    "expert choice, apart": functools.partial(routed, **APART),
    "cluster-strided": strided,
    "cluster-strided, apart": functools.partial(strided, **APART),
    "hashed, apart": functools.partial(hashed, **APART),
}
# Their blocks lie at the positions of the row, wherever a document starts.
IN_BLOCKS = {
    "local": functools.partial(layers.LocalHeads, HEADS, (4,), **RELATIVE),
    "dilated": functools.partial(
        layers.LocalHeads, HEADS, (2,), dilation=3, **RELATIVE
    ),
    "fixed": functools.partial(layers.FixedHeads, HEADS, 4, 2),
    "fixed, distinct": functools.partial(
        layers.FixedHeads, HEADS, 4, 2, distinct_summaries=True
    ),
}


# Those of them that are compared on every run.
FEW = (
    *("full", "rotary", "sliding", "strided", "random", "prefix", "expert choice"),
    *("token choice", "token choice, shifted", "two clusters", "hashed, apart"),
)


def cases(causal, not_causal, few=None):
    return [
        pytest.param(
            make,
            is_causal,
            id=f"{name}{', causal' * is_causal}",
            marks=() if few is None or name in few else THOROUGH,
        )
        for kinds, is_causal in ((causal, True), (not_causal, False))
        for name, make in kinds.items()
    ]


def built(make_group, memory=False):
    attention = layers.MixedAttention(
        [make_group()], KEY_DIM, kernel_initializer="zeros"
    )
    attention.build(*[(None, None, DIM)] * (1 + memory))
    helpers.randomize(attention)
    return attention


def called(attention, *inputs, **options):
    return golden_cases.run(attention, *inputs, **options)[0]


@pytest.mark.parametrize("make, causal", cases(CAUSAL, NOT_CAUSAL, FEW))
def test_a_document_is_as_it_is_alone(make, causal):
    attention, x = built(make), normal(BATCH, LENGTH, DIM)
    packed = called(attention, x, segment_ids=SEGMENT_IDS, use_causal_mask=causal)
    # The first one is told from the last, whose id is the same, if the last is right.
    for document in (MIDDLE, slice(*BORDERS[2:])):
        alone = called(attention, x[:, document], use_causal_mask=causal)
        np.testing.assert_allclose(packed[:, document], alone, rtol=1e-4, atol=2e-5)
    assert not packed[:, BORDERS[-1] :].any()  # padding


@pytest.mark.parametrize("make, causal", cases(IN_BLOCKS, IN_BLOCKS))
def test_no_document_moves_another_one(make, causal):
    attention, x = built(make), normal(BATCH, LENGTH, DIM)
    changed = normal(BATCH, LENGTH, DIM, seed=9)
    changed[:, MIDDLE] = x[:, MIDDLE]
    options = {"use_causal_mask": causal}
    without, before, after = (
        called(attention, changed, **options),
        *(
            called(attention, y, segment_ids=SEGMENT_IDS, **options)
            for y in (x, changed)
        ),
    )
    np.testing.assert_array_equal(after[:, MIDDLE], before[:, MIDDLE])
    assert np.abs(after - before).max() > 0.1
    assert np.abs(without - after)[:, MIDDLE].max() > 0.1


# One of each kind of code.
CROSSINGS = (
    *("full, shifted", "sliding, strided", "dilated", "token choice, apart, shifted"),
    *("threshold, shifted", "prefix, apart", "hashed", "rounds"),
)
exploring = functools.partial(routed, exploring_queries=LENGTH)
DIFFERENTIATED = cases(
    {
        **{name: (CAUSAL | IN_BLOCKS)[name] for name in CROSSINGS},
        "exploring, shifted": functools.partial(exploring, key_shift=1),
    },
    {
        "expert choice, apart": NOT_CAUSAL["expert choice, apart"],
        "exploring": exploring,
    },
)


@pytest.mark.parametrize("make, causal", DIFFERENTIATED)
def test_no_gradient_crosses_a_border(make, causal):
    attention = built(make)
    result = golden_cases.gradients(
        attention,
        lambda outputs, losses: ops.sum(outputs[:, MIDDLE] ** 2),
        {
            "query": normal(BATCH, LENGTH, DIM),
            "segment_ids": SEGMENT_IDS,
            "use_causal_mask": causal,
            "training": True,
        },
        wrt=("query",),
    )
    gradient = result.inputs["query"]
    assert np.abs(gradient[:, MIDDLE]).max() > 1e-3
    gradient[:, MIDDLE] = 0.0
    assert not gradient.any()


@pytest.mark.parametrize("causal", [True, False])
def test_exploring_queries_see_their_own_segment(causal):
    options = {"use_causal_mask": causal, "training": True}
    x = normal(BATCH, LENGTH, DIM)
    packed = called(built(exploring), x, segment_ids=SEGMENT_IDS, **options)
    alone = called(built(exploring), x[:, MIDDLE], **options)
    np.testing.assert_allclose(packed[:, MIDDLE], alone, rtol=1e-4, atol=2e-5)


def test_padding_has_no_influence():
    x, noise = normal(BATCH, LENGTH, DIM), normal(BATCH, LENGTH, DIM, seed=3)
    noisy = np.where(SEGMENT_IDS[..., None] == 0, noise, x)
    found = []
    for each in (x, noisy):
        attention = built(routed)
        options = {"use_causal_mask": True, "training": True}
        output = called(attention, each, segment_ids=SEGMENT_IDS, **options)
        found.append([output, *golden_cases.to_numpy(attention.non_trainable_weights)])
    for before, after in zip(*found, strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_mask_says_what_padding_is():
    """The id 0 is a segment like others then, and no output is zero."""
    attention, x = built(CAUSAL["full"]), normal(BATCH, LENGTH, DIM)
    options = {"use_causal_mask": True, "query_mask": np.ones((BATCH, LENGTH), "bool")}
    packed = called(attention, x, segment_ids=SEGMENT_IDS, **options)
    last = slice(BORDERS[-1], None)
    alone = called(attention, x[:, last], use_causal_mask=True)
    np.testing.assert_allclose(packed[:, last], alone, rtol=1e-5, atol=1e-5)


def test_centroids_move_by_the_tokens_of_all_segments():
    x, states = normal(BATCH, LENGTH, DIM), []
    for ids in (SEGMENT_IDS, np.minimum(SEGMENT_IDS, 1)):
        attention = built(routed)
        called(attention, x, segment_ids=ids, use_causal_mask=True, training=True)
        states.append(golden_cases.to_numpy(attention.head_groups[0].kmeans.centroids))
    np.testing.assert_array_equal(*states)


# The memory has the documents in another order, lacks one and has one more.
MEMORY_IDS = np.repeat((2, 8, 5), (9, 4, 6))
MEMORY_IDS = np.stack([np.pad(MEMORY_IDS, (0, 2))] * BATCH).astype("int32")
PAIRS = {
    "full": functools.partial(layers.FullHeads, HEADS),
    "expert choice": functools.partial(routed, **APART),
    "expert choice, shared": routed,
    "cluster-strided": strided,
    "hashed": hashed,
    "random": functools.partial(layers.RandomHeads, HEADS, 3, 5, **RELATIVE),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_documents_are_paired_by_their_ids(kind):
    attention = built(PAIRS[kind], memory=True)
    x, memory = normal(BATCH, LENGTH, DIM), normal(BATCH, 21, DIM, seed=1)
    packed = called(attention, x, memory, segment_ids=(SEGMENT_IDS, MEMORY_IDS))
    for own, other in ((slice(0, 7), slice(13, 19)), (MIDDLE, slice(0, 9))):
        alone = called(attention, x[:, own], memory[:, other])
        np.testing.assert_allclose(packed[:, own], alone, rtol=1e-4, atol=2e-5)
    # There is one segment with this id, and it belongs to the first one here.
    assert not packed[:, BORDERS[2] :].any()


def test_a_block_hands_the_ids_of_both_sequences_on():
    make = functools.partial(layers.MixedAttention, key_dim=KEY_DIM)
    block = layers.TransformerBlock(
        make([routed()]), None, make([layers.FullHeads(HEADS)]), norm_position="pre"
    )
    x, memory = normal(BATCH, LENGTH, DIM), normal(BATCH, 21, DIM, seed=1)
    ids = {"segment_ids": SEGMENT_IDS, "memory_segment_ids": MEMORY_IDS}
    packed = golden_cases.to_numpy(block(x, memory, **ids))
    alone = golden_cases.to_numpy(block(x[:, MIDDLE], memory[:, :9]))
    np.testing.assert_allclose(packed[:, MIDDLE], alone, rtol=1e-4, atol=2e-5)
    for name in ids:
        with pytest.raises(ValueError, match="`memory_segment_ids` must both be given"):
            block(x, memory, **{name: ids[name]})


COMPILED = {"token choice": True, "prefix": True, "expert choice": False}


@pytest.mark.parametrize("name", COMPILED)
def test_what_is_compiled_by_xla_computes_the_same(name):
    causal = COMPILED[name]
    attention = built((CAUSAL if causal else NOT_CAUSAL)[name])
    x = normal(BATCH, LENGTH, DIM)

    def call(x, ids):
        return attention(x, segment_ids=ids, use_causal_mask=causal)

    expected = golden_cases.to_numpy(call(x, SEGMENT_IDS))
    found = helpers.compiled(call)(x, SEGMENT_IDS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("kind", ["local", "strided"])
def test_no_memory_moves_another_document(kind):
    make = (IN_BLOCKS | BOTH)[kind]
    attention = built(functools.partial(make, max_relative_position=None), memory=True)
    x, memory = normal(BATCH, LENGTH, DIM), normal(BATCH, 21, DIM, seed=1)
    ids = SEGMENT_IDS[:, :21]
    changed = np.where((ids == 2)[..., None], memory, -memory)
    options = {"segment_ids": (SEGMENT_IDS, ids)}
    before, after = (called(attention, x, m, **options) for m in (memory, changed))
    np.testing.assert_array_equal(after[:, MIDDLE], before[:, MIDDLE])
    assert np.abs(after - before).max() > 0.1


def test_segments_of_two_sequences():
    """Of several runs with one id the first ones belong together, and so on."""
    first = np.array([[7, 7, 3, 7, 9, 3, 3]])
    second = np.array([[3, 7, 3, 3, 7, 7, 4]])
    segments = Segments.of_ids(first, second)
    query, value = golden_cases.to_numpy([segments.query, segments.value])
    sees = query[0, 0, :, None] == value[0, 0]
    expected = np.zeros((7, 7), "bool")
    for rows, columns in (
        ((0, 2), (1, 2)),
        ((2, 3), (0, 1)),
        ((3, 4), (4, 6)),
        ((5, 7), (2, 4)),
    ):
        expected[slice(*rows), slice(*columns)] = True
    np.testing.assert_array_equal(sees, expected)
    ends = golden_cases.to_numpy(next_positions(segments.query_starts))
    assert ends.tolist() == [[[2, 2, 3, 4, 5, 7, 7]]]


STEPS = {name: make for name, make in (CAUSAL | IN_BLOCKS).items() if name != LEAKY}
EACH_CACHE = (
    *("full, shifted", "local", "token choice, shifted", "threshold", "prefix"),
    *("cluster-strided", "random", "reformer"),
)


@pytest.mark.parametrize("name", some_thorough(STEPS, EACH_CACHE))
@pytest.mark.parametrize("start", [10, pytest.param(0, marks=THOROUGH)])
def test_steps_equal_the_whole_row(name, start):
    """From an empty cache, and behind a first part that ends within a document."""
    attention = built(STEPS[name])

    def both(x, ids):
        whole = attention(x, segment_ids=ids, use_causal_mask=True)
        cache = attention.make_cache(BATCH, LENGTH)
        if start:
            first = {"segment_ids": ids[:, :start], "cache_index": 0}
            _, cache = attention(x[:, :start], cache=cache, **first)
        rest = {"segment_ids": ids[:, start:], "cache_index": start}
        steps, _ = attention(x[:, start:], cache=cache, **rest)
        return whole[:, start:], steps

    x, real = normal(BATCH, LENGTH, DIM), SEGMENT_IDS[0, start:] > 0
    whole, steps = helpers.compiled(both, jit_compile=None)(x, SEGMENT_IDS)
    wanted = whole[:, real]
    np.testing.assert_allclose(steps[:, real], wanted, rtol=1e-4, atol=5e-5)


def test_a_segment_may_start_in_one_row_alone():
    attention, x = built(routed), normal(BATCH, 12, DIM)
    ids = np.array([[1] * 12, [1] * 8 + [2] * 4], "int32")
    whole = called(attention, x, segment_ids=ids, use_causal_mask=True)
    cache = attention.make_cache(BATCH, 12)
    for t in range(12):
        step, cache = attention(
            x[:, t : t + 1], segment_ids=ids[:, t : t + 1], cache=cache, cache_index=t
        )
        step = golden_cases.to_numpy(step)[:, 0]
        np.testing.assert_allclose(step, whole[:, t], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("name", ["local", "token choice, shifted"])
def test_tokens_in_the_place_of_padding_are_in_the_segment_before_it(name, start):
    """And those behind padding, here in the second row, are in one of their own."""
    attention, x = built(CAUSAL.get(name) or IN_BLOCKS[name]), normal(BATCH, 14, DIM)
    ids = np.array([[3] * 14, [3] * 5 + [0] * 5 + [3] * 4], "int32")
    whole = called(attention, x, segment_ids=ids, use_causal_mask=True)
    cache, steps = attention.make_cache(BATCH, 14), []
    for first, end, padding in ((0, start, 0), (start, 7, 5), (7, 10, 4), (10, 14, 0)):
        if first == end:
            continue
        room = [(0, 0), (0, padding)]
        output, cache = attention(
            np.pad(x[:, first:end], [*room, (0, 0)]),
            segment_ids=np.pad(ids[:, first:end], room),
            cache=cache,
            cache_index=first,
        )
        steps.append(golden_cases.to_numpy(output)[:, : end - first])
    steps = np.concatenate(steps, axis=1)
    np.testing.assert_allclose(steps[ids > 0], whole[ids > 0], rtol=1e-4, atol=5e-5)


def test_other_heads_refuse_them_by_name():
    x = normal(1, 8, DIM)
    for group, name, causal in (
        (layers.SynthesizerHeads(2, max_length=8), "SynthesizerHeads", True),
        (layers.FeatureMapHeads(2), "FeatureMapHeads", True),
        (hashed(hash="rotation"), "HashedHeads", False),
        (release_heads.ExactLocalHeads(2, (4,)), "LocalHeads", True),
    ):
        attention = layers.MixedAttention([group], key_dim=4)
        with pytest.raises(ValueError, match=f"`segment_ids` cannot be used.*{name}"):
            attention(x, segment_ids=np.ones((1, 8), "int32"), use_causal_mask=causal)


@pytest.mark.parametrize(
    "ids, message",
    [
        (np.ones((1, 8)), "`segment_ids` must be tensors of integers.*dtype=float"),
        (np.ones((1, 8), "bool"), "`segment_ids` must be tensors of integers.*bool"),
        (np.ones((1, 7), "int32"), r"`segment_ids` must have an entry.*\(1, 7\)"),
        (np.ones((8,), "int32"), r"`segment_ids` must have an entry.*\(8,\)"),
        ((np.ones((1, 8), "int32"),) * 2, "must be one tensor in self-attention"),
    ],
)
def test_refuses_what_are_no_ids_of_the_tokens(ids, message):
    attention = layers.MixedAttention([layers.FullHeads(2)], key_dim=4)
    with pytest.raises(ValueError, match=message):
        attention(normal(1, 8, DIM), segment_ids=ids)


def test_refuses_calls_without_an_order_of_documents():
    x, ids = normal(1, 8, DIM), np.ones((1, 8), "int32")
    attention = layers.MixedAttention([layers.FullHeads(2)], key_dim=4)
    with pytest.raises(ValueError, match="a pair .of query and of value.*one tensor"):
        attention(x, normal(1, 5, DIM), segment_ids=ids)
    cache = attention.make_cache(1, 8, value=normal(1, 5, DIM))
    with pytest.raises(ValueError, match="cannot be used with a cache for attention"):
        attention(x, segment_ids=ids, cache=cache)
    attention = layers.MixedAttention([layers.FullHeads(2)], key_dim=4)
    with pytest.raises(ValueError, match="need positions on one axis.*2 axes"):
        attention(normal(1, 2, 4, DIM), segment_ids=ids)


@pytest.mark.parametrize("length", [LENGTH, None])
def test_ids_are_inputs_of_models(length, tmp_path):
    """Of any length, too, and of models that are saved and loaded."""
    if length is None and keras.backend.backend() != "tensorflow":
        pytest.skip("JAX always knows the length")
    attention = layers.RoutingAttention(4, 6, 3, 5, num_local_heads=2)
    x, ids = keras.Input((length, DIM)), keras.Input((length,), dtype="int32")
    output = attention(x, segment_ids=ids, use_causal_mask=True)
    assert output.shape == (None, length, DIM)
    model = keras.Model([x, ids], output)
    path = tmp_path / "model.keras"
    model.save(path)
    inputs = normal(BATCH, LENGTH, DIM), SEGMENT_IDS
    expected = called(attention, inputs[0], segment_ids=ids_of(1), use_causal_mask=True)
    for each in (model, keras.saving.load_model(path)):
        found = each.predict(inputs, verbose=0)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


def ids_of(batch):
    """One row of ids may serve all sequences."""
    return SEGMENT_IDS[:batch]


OF_ANY_LENGTH = [
    pytest.param(
        *case.values,
        id=case.id,
        marks=() if case.id in ("prefix, causal", "expert choice") else THOROUGH,
    )
    for case in cases(CAUSAL | IN_BLOCKS, NOT_CAUSAL)
    if "random" not in case.id and "shifted" not in case.id
]


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="JAX always knows the length"
)
@pytest.mark.parametrize("make, causal", OF_ANY_LENGTH)
def test_lengths_may_be_unknown(make, causal):
    import tensorflow as tf

    attention = built(make)

    @tf.function(
        input_signature=[
            tf.TensorSpec((None, None, DIM)),
            tf.TensorSpec((None, None), tf.int32),
        ],
        autograph=False,
    )
    def call(x, ids):
        return attention(x, segment_ids=ids, use_causal_mask=causal)

    x = normal(BATCH, LENGTH, DIM)
    for length in (LENGTH, 17):
        inputs = x[:, :length], SEGMENT_IDS[:, :length]
        found = golden_cases.to_numpy(call(*inputs))
        expected = called(
            attention, inputs[0], segment_ids=inputs[1], use_causal_mask=causal
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=5e-5)


def test_ids_of_64_bits_may_differ_in_the_upper_ones():
    """As long as the backend has 64 bits; JAX cuts them off before the layer."""
    ids = np.array([[1, 1, 1 + 2**32]])
    expected = [[[0, 0, 0]]] if keras.backend.backend() == "jax" else [[[0, 0, 2]]]
    starts = Segments.of_ids(ops.convert_to_tensor(ids)).query_starts
    assert golden_cases.to_numpy(starts).tolist() == expected
