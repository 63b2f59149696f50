"""Causality to the last bit: no output depends on a later token.

A last bit that changes in one layer can change the cluster of a token in the next
one, so "almost equal" would be a leak. All comparisons are of one function at one
shape.
"""

import json
from functools import partial

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf.models.release import heads as release_heads
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

HEADS, DIM, KEY_DIM = kinds.HEADS, 8, 6
ON_JAX = helpers.ON_JAX
SLOW = pytest.mark.slow
IN_CLUSTERS = [
    kind
    for kind in kinds.CAUSAL
    if kind.startswith((*kinds.CLUSTERED, "reformer")) and "random_" not in kind
]
OTHERS = [kind for kind in kinds.CAUSAL if kind not in IN_CLUSTERS]


def with_clusters(kind, number, window, **options):
    """Returns a function that makes heads of a kind with other sizes of clusters."""
    clusters = "num_buckets" if kind in ("hashed", "rounds") else "num_clusters"
    options |= {clusters: number, "attention_window": window}
    return partial(kinds.CAUSAL[kind], **options)


def built_attention(make_group):
    return helpers.attention(make_group(), key_dim=KEY_DIM, dim=DIM)


def attend(layer, weights, query, real, memory=None):
    """Attends with other weights: to the query under a causal mask, or to a memory."""
    variables = list(zip(layer.weights, weights, strict=True))
    options = {"query_mask": real, "use_causal_mask": memory is None}
    with keras.StatelessScope(variables, collect_losses=True):
        return query + layer(query, memory, **options)


def forward(layer, jit_compile=ON_JAX):
    """Returns the compiled layer; its weights may change between the calls."""
    call = helpers.compiled(partial(attend, layer), jit_compile)
    return lambda *inputs: call(layer.get_weights(), *inputs)


def gradient(layer, jit_compile):
    """Returns the compiled gradient by the inputs, given one by the outputs."""

    def objective(query, weights, real, cotangent):
        return ops.sum(attend(layer, weights, query, real) * cotangent)

    call = helpers.compiled(golden_cases.gradient(objective), jit_compile)
    return lambda query, *rest: call(query, layer.get_weights(), *rest)


def sequence(batch, length, seed=0):
    """Returns random tokens; those of a second row come again, with equal scores."""
    tokens = helpers.normal(batch, length, DIM, seed=seed)
    tokens[1:] = tokens[1:, np.random.default_rng(seed).integers(5, size=length)]
    return tokens


def padding(batch, length):
    """One row has padding in the middle, the other one at the end."""
    return helpers.mask_with_a_hole(length, *[length, length - length // 5][:batch])


def assert_causal(call, query, real, last_positions, *memory):
    """Fails unless outputs up to a position keep all bits, whatever comes after it.

    What comes after it is once other tokens, and once padding.
    """
    before = call(query, real, *memory)
    assert np.all(np.isfinite(before))
    other = sequence(*query.shape[:2], seed=7)
    changes_later = False
    for last in last_positions:
        later = np.arange(query.shape[1]) > last
        for changed, mask in (
            (np.where(later[:, None], other, query), real),
            (query, real & ~later),
        ):
            after = call(changed, mask, *memory)
            np.testing.assert_array_equal(after[:, ~later], before[:, ~later])
            changes_later |= np.any(after[:, later] != before[:, later])
    # The first tokens may see nothing.
    assert changes_later and np.any(before[:, : last_positions[1] + 1] != 0.0)


def all_in_one_cluster(layer):
    """Equal scores for all clusters and tokens: the first cluster is the best."""
    for weight in layer.weights:
        if weight.name in ("centroids", "projections"):
            weight.assign(np.zeros(weight.shape))


def most_clusters_empty(layer):
    """Two clusters at opposite ends have the tokens, one at the origin none."""
    for weight in layer.weights:
        values = np.zeros(weight.shape)
        if weight.name == "centroids":
            values[:, 0] = helpers.normal(HEADS, KEY_DIM)
            values[:, 2] = -values[:, 0]
            weight.assign(values)
        elif weight.name == "projections":
            # Equal bits: the buckets whose bits differ are empty.
            weight.assign(values + helpers.normal(len(values), 1, KEY_DIM))


FEW = ("token_choice_apart_shifted", "threshold_apart", "prefix", "hashed_apart")
FEW += ("cluster_strided_shifted", "random", "multipole_apart_shifted")


WAYS = [
    pytest.param(*each.values, ON_JAX, marks=each.marks)
    for each in kinds.some(IN_CLUSTERS, FEW)
]
if not ON_JAX:  # which always compiles
    WAYS += [("token_choice", True), pytest.param("prefix", True, marks=SLOW)]


@pytest.mark.parametrize("kind, jit_compile", WAYS)
def test_later_tokens_change_no_bit_of_earlier_outputs(kind, jit_compile):
    layer = built_attention(kinds.CAUSAL[kind])
    call, positions = forward(layer, jit_compile), [int("shifted" in kind), 13, 39]
    for arrange in (helpers.randomize, all_in_one_cluster, most_clusters_empty):
        arrange(layer)
        assert_causal(call, sequence(2, 41), padding(2, 41), positions)
        positions = [13, 39]


@pytest.mark.parametrize(
    "kind", kinds.some(("token_choice", "hashed"), ["token_choice"])
)
def test_shapes_that_follow_the_data_are_causal(kind):
    """Windows so wide that the first members of a cluster stand in a block."""
    layer = built_attention(with_clusters(kind, 6, window=10, key_shift=1))
    call = forward(layer)
    for arrange in (helpers.randomize, all_in_one_cluster, most_clusters_empty):
        arrange(layer)
        assert_causal(call, sequence(2, 83), padding(2, 83), (1, 13, 39, 81))


FEW_OTHERS = ("local", "strided_shifted", "fixed", "sliding", "full", "performer")
FEW_OTHERS += ("global", "best_blocks", "native_sparse", "luna", "sinkhorn", "indexed")


@pytest.mark.parametrize("kind", kinds.some(OTHERS, FEW_OTHERS))
def test_heads_without_clusters_are_causal(kind):
    call = forward(built_attention(kinds.CAUSAL[kind]))
    shift = int("shifted" in kind)
    assert_causal(call, sequence(2, 41), padding(2, 41), (shift, 13, 39))


@pytest.mark.parametrize(
    "kind, clusters, window, length",
    [
        ("token_choice_apart_shifted", 2, 100, 301),
        ("random", 60, 3, 41),  # of which some stay empty
        pytest.param(
            # More blocks than are added up at once.
            *("multipole", 3, 4, 301),
            marks=pytest.mark.thorough,
        ),
        pytest.param("prefix", 2, 100, 301, marks=pytest.mark.thorough),
    ],
)
def test_windows_and_lengths_of_any_size_are_causal(kind, clusters, window, length):
    call = forward(built_attention(with_clusters(kind, clusters, window)))
    real = padding(1, length)
    assert_causal(call, sequence(1, length), real, (length // 3, length - 2))


FEW_WAYS = ("token_choice_apart_shifted", "threshold_shifted", "prefix", "hashed_apart")
FEW_WAYS += ("local_shifted", "full", "multipole_shifted")
# Each has a gradient that is stated, or operations of its own.
MORE_WAYS = ("token_choice", "convolution_and_window", "rounds", "reformer", "sliding")
MORE_WAYS += ("two_clusters_apart", "cluster_strided")
MORE_WAYS += ("threshold_apart", "random", "fixed", "strided", "best_blocks", "linear")
MORE_WAYS += ("indexed_copies", "global", "native_sparse", "synthesizer", "luna")
MORE_WAYS += ("sinkhorn", "long_short", "multipole_apart")


@pytest.mark.parametrize(
    "kind, jit_compile",
    [
        *(
            pytest.param(*each.values, ON_JAX or None, marks=each.marks)
            for each in kinds.some((*FEW_WAYS, *MORE_WAYS), FEW_WAYS)
        ),
        *([] if ON_JAX else [pytest.param("prefix", True, marks=SLOW)]),
    ],
)
def test_no_gradient_flows_to_later_tokens(kind, jit_compile):
    length = 29
    call = gradient(built_attention(kinds.CAUSAL[kind]), jit_compile)
    query, real = sequence(2, length), padding(2, length)
    cotangent = sequence(2, length, seed=5)
    # Of queries that see other clusters or no earlier token, the first may see nothing.
    for last in (17, 27):
        later = np.arange(length) > last
        by_query = call(query, real, np.where(later[:, None], 0, cotangent))
        assert np.all(np.isfinite(by_query))
        assert np.all(by_query[:, later] == 0.0)
        assert np.all(np.any(by_query[:, ~later] != 0.0, axis=(1, 2)))


CROSS = ("experts", "hashed", "cluster_strided", "random")


@pytest.mark.parametrize("kind", kinds.some(CROSS, CROSS[:2]))
def test_later_queries_change_no_bit_in_attention_to_a_memory(kind):
    call = forward(built_attention(kinds.MEMORIES[kind]))
    memory = sequence(2, 23, seed=3)
    assert_causal(call, sequence(2, 41), padding(2, 41), (0, 13, 39), memory)


@pytest.mark.parametrize("has_memory", [False, True])
@pytest.mark.parametrize(
    "kind", kinds.some(("Routed", "ClusterStrided", "Hashed"), ["Routed"])
)
def test_the_ways_of_the_release_are_not_causal(kind, has_memory):
    """The same check finds what they leak, and that queries compete for a memory."""
    make = getattr(release_heads, f"Trained{kind}Heads")
    options = {"routing": "expert_choice"} if kind == "Routed" else {}
    layer = built_attention(partial(make, HEADS, 4, 5, **options, **kinds.RELATIVE))
    memory = [sequence(2, 23, seed=3)] * has_memory
    call = forward(layer, ON_JAX or None)
    with pytest.raises(AssertionError, match=r"\d / \d+ \(.*%\)"):
        assert_causal(call, sequence(2, 41), padding(2, 41), (0, 13, 27, 39), *memory)


LEAKS = json.loads((golden_cases.FOLDER / "causal_leak.json").read_text())
experts = partial(release_heads.ExactRoutedHeads, routing="expert_choice")
MEASURED = {
    "local_only": partial(release_heads.ExactLocalHeads, 2, (16,)),
    "strided": partial(release_heads.ExactStridedHeads, 2, (16,)),
    "routing_shareqk_norel": partial(experts, 2, 4, 16),
    "routing_shareqk_rel": partial(experts, 2, 4, 16, max_relative_position=8),
    "routing_sepqk_norel": partial(experts, 2, 4, 16, **kinds.SEPARATE),
    "hash_shareqk": partial(release_heads.ExactHashedHeads, 2, 4, 16),
    "cluster_strided_plus_cluster": partial(
        release_heads.ExactClusterStridedHeads, 2, 4, 16, **kinds.SEPARATE
    ),
    "routing_window_eq_length_one_cluster": partial(experts, 2, 1, 64),
}
FEW_MEASURED = ("local_only", "routing_shareqk_norel")


@pytest.mark.parametrize("name", kinds.some(MEASURED, FEW_MEASURED))
def test_leaks_as_often_as_the_release(name):
    """In how many of 20 trials one other token changes earlier outputs.

    Where heads have no clusters, in none. Weights and texts are others than those of
    the release, so the numbers are about the same.
    """
    measured = LEAKS[f"{name}_eval"]
    position = measured["changed_position"]
    expected = measured["trials_with_any_change"]
    group = MEASURED[name](embeddings_initializer="zeros")
    attention, leaks = helpers.attention(group, key_dim=12, dim=24), 0
    for trial in range(measured["trials"]):
        helpers.randomize(attention, seed=trial)
        query = helpers.normal(1, 64, 24, seed=100 + trial)
        changed = query.copy()
        changed[:, position] = helpers.normal(24, seed=200 + trial)
        before, after = (
            golden_cases.run(attention, x, use_causal_mask=True)[0][:, :position]
            for x in (query, changed)
        )
        leaks += np.any(before != after)
    assert abs(leaks - expected) <= 4 and (leaks == 0) == (expected == 0)
