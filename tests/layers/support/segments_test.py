"""Packed documents: no token sees another segment."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from routing_tf.layers.support.masks import Segments
from routing_tf.layers.support.masks import next_positions
from routing_tf.models.release import heads as release_heads
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.layers.helpers import normal
from tests.layers.support import lengths_test

HEADS, DIM, KEY_DIM, BATCH = kinds.HEADS, 8, 6, 2
# Three documents, the last of which has the id of the first, and padding.
SIZE, IDS = 7, (5, 2, 5)
ROW = np.repeat((*IDS, 0), (*[SIZE] * 3, 2)).astype("int32")
SEGMENT_IDS = np.stack([ROW] * BATCH)
LENGTH = len(ROW)
MIDDLE, LAST, PADDING = (slice(n * SIZE, (n + 1) * SIZE) for n in (1, 2, 3))
# Whether a token is a member depends on later ones, in its segment alone.
LEAKY = {"experts": kinds.experts}
# Their blocks lie at the positions of the row, wherever a document starts.
IN_BLOCKS = ("local", "dilated", "fixed", "fixed_distinct")
KINDS = [
    *("full", "rotary", "sliding", "sliding_strided", "strided", "reformer"),
    *("indexed", "indexed_copies"),
    *kinds.CLUSTERED,
    *kinds.APART,
]


def maker(kind, causal=True, **options):
    """Returns a function that makes heads, of clusters with small windows."""
    if kind == "rotary":
        make, options = kinds.POSITIONAL["full"], {"rotary_positions": True, **options}
    elif kind == "exploring":
        return functools.partial(kinds.routed, exploring_queries=LENGTH, **options)
    else:
        make = {**kinds.CAUSAL, **LEAKY}[kind] if causal else kinds.WHOLE[kind]
    if "attention_window" in make.keywords:
        options = {"attention_window": 2, **options}
    return functools.partial(make, **options)


def built(make_group, **options):
    return helpers.attention(make_group(), key_dim=KEY_DIM, **options)


def called(attention, *inputs, **options):
    return golden_cases.run(attention, *inputs, **options)[0]


WAYS = [(kind, True) for kind in KINDS]
# Keys are shifted in one of a few ways.
WAYS += [
    (f"{kind}_shifted", True)
    for kind in ("full", "strided", "token_choice", "token_choice_apart", "threshold")
    + ("prefix_apart", "hashed_apart", "indexed_copies")
]
WAYS += [(x, False) for x in KINDS if x in kinds.WHOLE and x != "reformer"]
WAYS += [("experts", True), ("experts", False), ("experts_apart", False)]
EXPLORING = [("exploring", True), ("exploring", False)]
FEW = [(kind, True) for kind in ("rotary", "strided", "prefix", "hashed_apart")]
FEW += [("token_choice_apart_shifted", True), ("full", False), ("experts", False)]
FEW += [("exploring", True)]


@pytest.mark.parametrize("kind, causal", kinds.some([*WAYS, *EXPLORING], FEW))
def test_a_document_is_as_it_is_alone(kind, causal):
    attention, x = built(maker(kind, causal)), normal(BATCH, LENGTH, DIM)
    attention.trainable = False  # no centroid moves
    options = {"use_causal_mask": causal, "training": kind == "exploring"}
    packed = called(attention, x, segment_ids=SEGMENT_IDS, **options)
    # The first one is told from the last, whose id is the same, if the last is right.
    for document in (MIDDLE, LAST):
        alone = called(attention, x[:, document], **options)
        np.testing.assert_allclose(packed[:, document], alone, rtol=1e-4, atol=2e-5)
    assert not packed[:, PADDING].any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_no_document_moves_another_one(kind, causal):
    attention, x = built(maker(kind)), normal(BATCH, LENGTH, DIM)
    changed = normal(BATCH, LENGTH, DIM, seed=9)
    changed[:, MIDDLE] = x[:, MIDDLE]
    options = {"use_causal_mask": causal}
    before, after = (
        called(attention, y, segment_ids=SEGMENT_IDS, **options) for y in (x, changed)
    )
    np.testing.assert_array_equal(after[:, MIDDLE], before[:, MIDDLE])
    assert np.abs(after - before).max() > 0.1


exploring = functools.partial(maker, "token_choice", exploring_queries=LENGTH)


# One of each kind of code.
@pytest.mark.parametrize(
    "make, causal",
    [
        *(
            pytest.param(maker(kind), True, id=kind)
            for kind in ("token_choice_apart_shifted", "prefix_apart", "rounds")
        ),
        pytest.param(exploring(key_shift=1), True, id="exploring"),
        pytest.param(maker("experts_apart", False), False, id="experts_apart"),
    ],
)
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


def large_ids(*ids, dtype="int64"):
    """Ids of documents, some of which are equal in their last 32 bits."""
    return np.repeat([ids], SIZE, axis=1).astype(dtype)


@pytest.mark.parametrize(
    "ids, dtype",
    [
        ((1, 2**32 + 1), "int64"),
        pytest.param((2**63 + 2, 2), "uint64", marks=pytest.mark.thorough),
        pytest.param((0, 2**32), "int64", marks=pytest.mark.thorough),
    ],
)
def test_large_ids_differ_or_are_refused(ids, dtype):
    if dtype == "uint64" and keras.backend.backend() == "torch":
        pytest.skip("no type of Keras there")
    attention, x = built(kinds.CAUSAL["token_choice"]), normal(1, 2 * SIZE, DIM)
    ids = large_ids(*ids, dtype=dtype)
    masks = {"query_mask": np.ones(ids.shape, "bool")}
    if keras.backend.backend() == "jax":
        with pytest.raises(ValueError, match="`segment_ids` .* 32 "):
            attention(x, segment_ids=ids, use_causal_mask=True)
        return
    small = large_ids(1, 2, dtype="uint8")
    expected = called(attention, x, segment_ids=small, use_causal_mask=True, **masks)
    packed = called(attention, x, segment_ids=ids, use_causal_mask=True, **masks)
    np.testing.assert_array_equal(packed, expected)
    for sizes in (SIZE, 1), (SIZE + 3, 2), (1, 2 * SIZE - 2):
        about = {"segment_ids": ids, **masks}
        whole = {"use_causal_mask": True}
        helpers.assert_pieces_equal_the_whole(
            attention, x, *sizes, whole=whole, **about
        )


def test_ids_of_steps_may_have_other_types():
    attention, x = built(kinds.CAUSAL["full"]), normal(1, 4, DIM)
    large = 3_000_000_000  # negative in 32 bits
    _, cache = attention(
        x[:, :2],
        segment_ids=np.full((1, 2), large, "uint32"),
        cache=attention.make_cache(1, 4),
    )
    for dtype in ("uint32",) if keras.backend.backend() == "jax" else ("int64",):
        ids = np.full((1, 2), large, dtype)
        rest, _ = attention(x[:, 2:], segment_ids=ids, cache=cache, cache_index=2)
        expected = called(attention, x, use_causal_mask=True)[:, 2:]
        np.testing.assert_allclose(golden_cases.to_numpy(rest), expected, atol=1e-5)


PAIRS = (("uint8", "int32", 1, 257), ("int8", "uint8", -1, 255))


@pytest.mark.parametrize("first, second, query_id, memory_id", PAIRS)
def test_ids_of_a_pair_may_have_other_types(first, second, query_id, memory_id):
    attention = built(kinds.WHOLE["full"])
    x, memory = normal(1, 4, DIM), normal(1, 6, DIM, seed=1)
    ids = np.full((1, 4), query_id, first), np.full((1, 6), memory_id, second)
    assert not called(attention, x, memory, segment_ids=ids).any()
    ids = np.full((1, 4), 1, first), np.full((1, 6), 1, second)
    np.testing.assert_allclose(
        called(attention, x, memory, segment_ids=ids),
        called(attention, x, memory),
        atol=1e-5,
    )


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="has no uint64")
def test_ids_of_a_pair_that_fit_into_no_type_are_refused():
    longest = "uint32" if keras.backend.backend() == "jax" else "uint64"
    ids = ops.ones((1, 4), "int32"), ops.ones((1, 6), longest)
    with pytest.raises(ValueError, match=f"`segment_ids`.*int32 .*{longest}"):
        Segments.of_ids(*ids)


def test_places_do_not_restart_by_ids_that_are_no_integers():
    ids = np.ones((1, 4), "float32")
    with pytest.raises(ValueError, match="`segment_ids`.*dtype=float32"):
        layers.TimingSignal(restart=True)(normal(1, 4, DIM), segment_ids=ids)


def test_a_mask_says_what_padding_is():
    """The id 0 is a segment like others then, and no output is zero."""
    attention, x = built(kinds.CAUSAL["full"]), normal(BATCH, LENGTH, DIM)
    options = {"use_causal_mask": True, "query_mask": np.ones((BATCH, LENGTH), "bool")}
    packed = called(attention, x, segment_ids=SEGMENT_IDS, **options)
    alone = called(attention, x[:, PADDING], use_causal_mask=True)
    np.testing.assert_allclose(packed[:, PADDING], alone, rtol=1e-5, atol=1e-5)


def test_centroids_move_by_the_tokens_of_all_segments_and_no_padding():
    x, states = normal(BATCH, LENGTH, DIM), []
    noisy = np.where(SEGMENT_IDS[..., None] == 0, normal(*x.shape, seed=3), x)
    for each, ids in ((x, SEGMENT_IDS), (noisy, np.minimum(SEGMENT_IDS, 1))):
        attention = built(kinds.routed)
        called(attention, each, segment_ids=ids, use_causal_mask=True, training=True)
        states.append(golden_cases.to_numpy(attention.non_trainable_weights))
    for first, second in zip(*states, strict=True):
        np.testing.assert_array_equal(first, second)


# The memory has the documents in another order, lacks one and has one more.
MEMORY_IDS = np.repeat((2, 8, 5), (6, 4, 6))
MEMORY_IDS = np.stack([np.pad(MEMORY_IDS, (0, 2))] * BATCH).astype("int32")
PAIRS = ("full", "experts_apart", "experts", "cluster_strided", "hashed", "random")


@pytest.mark.parametrize("kind", kinds.some(PAIRS, ("full", "experts_apart", "hashed")))
def test_documents_are_paired_by_their_ids(kind):
    make = functools.partial(kinds.MEMORIES[kind], max_relative_position=None)
    attention = built(make, memory_dim=DIM)
    x, memory = normal(BATCH, LENGTH, DIM), normal(BATCH, 18, DIM, seed=1)
    packed = called(attention, x, memory, segment_ids=(SEGMENT_IDS, MEMORY_IDS))
    for own, other in ((slice(0, SIZE), slice(10, 16)), (MIDDLE, slice(0, 6))):
        alone = called(attention, x[:, own], memory[:, other])
        np.testing.assert_allclose(packed[:, own], alone, rtol=1e-4, atol=2e-5)
    # There is one segment with this id, and it belongs to the first one here.
    assert not packed[:, 2 * SIZE :].any()


def test_a_block_hands_the_ids_of_both_sequences_on():
    make = functools.partial(layers.MixedAttention, key_dim=KEY_DIM)
    block = layers.TransformerBlock(
        make([kinds.routed()]), None, make([layers.FullHeads(HEADS)])
    )
    x, memory = normal(BATCH, LENGTH, DIM), normal(BATCH, 18, DIM, seed=1)
    ids = {"segment_ids": SEGMENT_IDS, "memory_segment_ids": MEMORY_IDS}
    block.build(x.shape, memory.shape)
    packed = called(block, x, memory, **ids)
    alone = called(block, x[:, MIDDLE], memory[:, :6])
    np.testing.assert_allclose(packed[:, MIDDLE], alone, rtol=1e-4, atol=2e-5)
    for name in ids:
        with pytest.raises(ValueError, match="`memory_segment_ids`.*segment_ids="):
            block(x, memory, **{name: ids[name]})


@helpers.only_on("tensorflow", "JAX compiles all these tests")
@pytest.mark.thorough
def test_what_is_compiled_by_xla_computes_the_same():
    attention = built(maker("token_choice"))
    x = normal(BATCH, LENGTH, DIM)

    def call(x, ids):
        return attention(x, segment_ids=ids, use_causal_mask=True)

    expected = golden_cases.to_numpy(call(x, SEGMENT_IDS))
    found = helpers.compiled(call)(x, SEGMENT_IDS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("kind", ["local", "strided"])
def test_no_memory_moves_another_document(kind):
    make = functools.partial(kinds.MEMORIES[kind], max_relative_position=None)
    attention = built(make, memory_dim=DIM)
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


EACH_CACHE = ("full_shifted", "local", "token_choice_shifted", "threshold", "prefix")
EACH_CACHE += ("random", "reformer")
STEPS = ("rotary", "sliding", "dilated", "fixed_distinct", "strided_shifted", "rounds")
STEPS += ("indexed", "indexed_copies_shifted", "cluster_strided", "multipole_apart")
STEPS += ("token_choice_apart_shifted", "threshold_apart", "prefix_apart_shifted")
STEPS += ("two_clusters_apart", "hashed_apart_shifted")


@pytest.mark.parametrize("kind", kinds.some((*STEPS, *EACH_CACHE), EACH_CACHE))
def test_steps_equal_the_whole_row(kind):
    """After a first part that ends within a document."""
    attention, x = built(maker(kind)), normal(BATCH, LENGTH, DIM)
    about = {"segment_ids": SEGMENT_IDS, "shown": SEGMENT_IDS > 0}
    helpers.assert_pieces_equal_the_whole(attention, x, 10, tolerance=2e-5, **about)


def test_a_segment_may_start_in_one_row_alone():
    ids = np.array([[1] * 9, [1] * 6 + [2] * 3], "int32")
    about = {"shown": ids > 0, "segment_ids": ids}
    x = normal(BATCH, 9, DIM)
    helpers.assert_pieces_equal_the_whole(built(kinds.routed), x, *[1] * 8, **about)


@pytest.mark.parametrize("kind, start", [("local", 0), ("token_choice_shifted", 3)])
def test_tokens_in_the_place_of_padding_are_in_the_segment_before_it(kind, start):
    """And those after padding, here in the second row, are in one of their own."""
    attention, x = built(kinds.CAUSAL[kind]), normal(BATCH, 14, DIM)
    ids = np.array([[3] * 14, [3] * 5 + [0] * 5 + [3] * 4], "int32")
    whole = called(attention, x, segment_ids=ids, use_causal_mask=True)
    pieces = ((0, start, 0), (start, 7, 5), (7, 10, 4), (10, 14, 0))

    def in_pieces(x, ids):
        cache, outputs = attention.make_cache(BATCH, 14), []
        for first, end, padding in pieces[start == 0 :]:
            room = [(0, 0), (0, padding)]
            output, cache = attention(
                ops.pad(x[:, first:end], [*room, (0, 0)]),
                segment_ids=ops.pad(ids[:, first:end], room),
                cache=cache,
                cache_index=first,
            )
            outputs.append(output[:, : end - first])
        return ops.concatenate(outputs, axis=1)

    steps = helpers.compiled(in_pieces, jit_compile=None)(x, ids)
    np.testing.assert_allclose(steps[ids > 0], whole[ids > 0], rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("kind, start", [("local", 0), ("token_choice_shifted", 4)])
def test_padding_with_the_id_of_a_document_does_not_end_it(kind, start):
    attention, x = built(kinds.CAUSAL[kind]), normal(BATCH, 9, DIM)
    ids = np.array([[0] * 9, [0] * 6 + [7] * 3], "int32")
    real = np.arange(9) * np.ones((BATCH, 1)) % 4 != (0 if start else 3)
    about = {"segment_ids": ids, "query_mask": real, "shown": real}
    helpers.assert_pieces_equal_the_whole(attention, x, *[start] * bool(start), **about)


def test_other_heads_refuse_them_by_name():
    x = normal(1, 8, DIM)
    for group, name, causal in (
        (zoo.SynthesizerHeads(2, max_length=8), "SynthesizerHeads", True),
        (zoo.FeatureMapHeads(2), "FeatureMapHeads", True),
        (kinds.reformer(hash="rotation"), "`ReformerHeads`", False),
        (zoo.ReformerHeads(2, 4, 5, num_rounds=2), "`ReformerHeads`", False),
        (release_heads.ExactLocalHeads(2, (4,)), "LocalHeads", True),
    ):
        attention = layers.MixedAttention([group], key_dim=4)
        with pytest.raises(
            ValueError, match=f"`segment_ids` .*{name}.*Received: segment_ids "
        ):
            attention(x, segment_ids=np.ones((1, 8), "int32"), use_causal_mask=causal)


@pytest.mark.parametrize(
    "ids, message",
    [
        (np.ones((1, 8)), "`segment_ids`.*dtype=float32"),
        (np.ones((1, 8), "bool"), "`segment_ids`.*dtype=bool"),
        (np.ones((1, 7), "int32"), r"`segment_ids`.*segment_ids\.shape=\(1, 7\)"),
        (np.ones((8,), "int32"), r"`segment_ids`.*segment_ids\.shape=\(8,\)"),
        (
            (np.ones((1, 8), "int32"),) * 2,
            "`segment_ids`.* 2 .*is_cross_attention=False",
        ),
    ],
)
def test_refuses_what_are_no_ids_of_the_tokens(ids, message):
    attention = layers.MixedAttention([layers.FullHeads(2)], key_dim=4)
    with pytest.raises(ValueError, match=message):
        attention(normal(1, 8, DIM), segment_ids=ids)


def test_refuses_calls_without_an_order_of_documents():
    x, ids = normal(1, 8, DIM), np.ones((1, 8), "int32")
    attention = layers.MixedAttention([layers.FullHeads(2)], key_dim=4)
    with pytest.raises(ValueError, match="`segment_ids`.*is_cross_attention=True"):
        attention(x, normal(1, 5, DIM), segment_ids=ids)
    cache = attention.make_cache(1, 8, value=normal(1, 5, DIM))
    with pytest.raises(ValueError, match="`segment_ids` [^=]*Received: segment_ids "):
        attention(x, segment_ids=ids, cache=cache)
    attention = layers.MixedAttention([layers.FullHeads(2)], key_dim=4)
    with pytest.raises(ValueError, match="`segment_ids`.* 2 .*`segment_ids`"):
        attention(normal(1, 2, 4, DIM), segment_ids=ids)


def test_ids_are_inputs_of_models(tmp_path):
    """Of any length, where it may be unknown, and of models that are loaded."""
    length = None if keras.backend.backend() == "tensorflow" else LENGTH
    attention = layers.RoutingAttention(4, 6, 3, 5, num_local_heads=2)
    x, ids = keras.Input((length, DIM)), keras.Input((length,), dtype="int32")
    output = attention(x, segment_ids=ids, use_causal_mask=True)
    assert output.shape == (None, length, DIM)
    model = keras.Model([x, ids], output)
    model.save(tmp_path / "model.keras")
    x, row = normal(BATCH, LENGTH, DIM), SEGMENT_IDS[:1]
    # One row of ids may serve all sequences.
    expected = called(attention, x, segment_ids=row, use_causal_mask=True)
    found = called(keras.saving.load_model(tmp_path / "model.keras"), [x, SEGMENT_IDS])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


@helpers.only_on("tensorflow", "JAX always knows the length")
@pytest.mark.parametrize(
    "kind, causal",
    kinds.some(
        [
            *((kind, True) for kind in ("full", "local", "prefix", "threshold")),
            *(("rounds", True), ("token_choice", True), ("experts", False)),
        ],
        [("token_choice", True)],
    ),
)
def test_lengths_may_be_unknown(kind, causal):
    attention, x = built(maker(kind, causal)), normal(BATCH, LENGTH, DIM)
    lengths_test.assert_one_graph_serves(
        lambda x, ids: attention(x, segment_ids=ids, use_causal_mask=causal),
        *([x[:, :length], SEGMENT_IDS[:, :length]] for length in (LENGTH, 17)),
    )


def test_ids_of_64_bits_may_differ_in_the_upper_ones():
    """As long as the backend has 64 bits; JAX cuts them off before the layer."""
    ids = np.array([[1, 1, 1 + 2**32]])
    expected = [[[0, 0, 0]]] if keras.backend.backend() == "jax" else [[[0, 0, 2]]]
    starts = Segments.of_ids(ops.convert_to_tensor(ids)).query_starts
    assert golden_cases.to_numpy(starts).tolist() == expected
