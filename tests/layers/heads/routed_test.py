"""Tests of routed heads; `oracle_test` has their rule."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf.layers import RoutedHeads
from routing_tf.models.release import heads as release_heads
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns

BATCH, HEADS, LENGTH, DIM, CLUSTERS = 2, 2, 12, 6, 3


def built_group(kind=RoutedHeads, **options):
    defaults = {"attention_window": 5, "decay": 0.9, "routing": "expert_choice"}
    options = {**defaults, **options}
    group = kind(HEADS, CLUSTERS, embeddings_initializer="zeros", **options)
    group.build(*[(BATCH, HEADS, LENGTH, DIM)] * 3)
    helpers.randomize(group)
    return group


def tokens(length=LENGTH, memory_length=LENGTH):
    lengths = (length, memory_length, memory_length)
    return [
        helpers.normal(BATCH, HEADS, size, DIM, seed=seed)
        for seed, size in enumerate(lengths)
    ]


def expert_choice(
    group,
    query,
    key,
    value,
    query_real,
    real,
    choosable=None,
):
    """For each centroid dense attention among its best tokens; then the mean.

    `choosable` holds masks of the queries and of the keys that may be members; None
    for those that are real. Also returns in how many clusters each query was.
    """
    query, key = helpers.normalize(query), helpers.normalize(key)
    queries, keys = choosable or (query_real, real)
    (centroids,) = golden_cases.to_numpy([group.kmeans.centroids])
    tables = helpers.relative_tables(group)
    window = group.attention_window
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    counts = np.zeros(query.shape[:3])
    for b in range(BATCH):
        for h in range(HEADS):
            for centroid in centroids[h]:
                rows = patterns.best(query[b, h] @ centroid, queries[b], window)
                columns = patterns.best(key[b, h] @ centroid, keys[b], window)
                # Which of the slots of a cluster are padding; the release may take
                # them from the first batch row.
                shared = getattr(group, "cache_padding_bias", False)
                lender = 0 if shared else b
                lent = patterns.best(key[lender, h] @ centroid, keys[lender], window)
                sees = np.zeros((query.shape[2], key.shape[2]), "bool")
                ranks = np.zeros(sees.shape, "int32")
                for i, row in enumerate(rows):
                    for j, column in enumerate(columns):
                        sees[row, column] = real[lender, lent[j]]
                        ranks[row, column] = j - i
                attended, _ = helpers.dense_attention(
                    query[b, h], key[b, h], value[b, h], sees, 0.0, tables, ranks
                )
                output[b, h] += attended
                counts[b, h, rows] += 1
    return output / helpers.mean_divisor(group, counts[..., None]), counts


@pytest.mark.parametrize("memory_length", [7, 20])
def test_queries_may_compete_for_a_memory_as_in_the_release(memory_length):
    group = built_group(release_heads.TrainedRoutedHeads, attention_window=8)
    query, key, value = tokens(memory_length=memory_length)
    query_real = helpers.tail_mask(LENGTH, 12, 9)
    real = helpers.tail_mask(memory_length, memory_length, 6)

    output, _ = golden_cases.run(
        group,
        query,
        key,
        value,
        query_mask=query_real,
        value_mask=real,
        is_cross_attention=True,
    )

    expected, _ = expert_choice(group, query, key, value, query_real, real)
    everywhere = np.broadcast_to(query_real[:, None], (BATCH, HEADS, LENGTH))
    golden_cases.assert_close(output[everywhere], expected[everywhere], 1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_at_the_last_token_both_scopes_are_the_same(shared):
    query, key, value = tokens()
    real = helpers.mask_with_a_hole(LENGTH, LENGTH, LENGTH)
    outputs = []
    for scope in ("full", "prefix"):
        group = built_group(
            # With separate keys the full scope counts from the front of two lists.
            max_relative_position=2 if shared else None,
            share_query_key=shared,
            routing_scope=scope,
            prefix_block_size=7,
        )
        output, _ = golden_cases.run(
            group,
            query,
            None if shared else key,
            value,
            query_mask=real,
            value_mask=real,
            use_causal_mask=True,
        )
        outputs.append(output)
    full, prefix = outputs
    golden_cases.assert_close(prefix[:, :, -1], full[:, :, -1], 1e-5)
    assert np.any(full[:, :, -1] != 0.0)
    assert golden_cases.relative_error(prefix, full) > 0.1


def test_without_a_causal_mask_the_scope_is_the_whole_sequence():
    query, _, value = tokens()
    outputs = [
        golden_cases.run(built_group(routing_scope=scope), query, None, value)[0]
        for scope in ("full", "prefix")
    ]
    np.testing.assert_array_equal(*outputs)


def scoped(routing_scope="full"):
    options = {"routing": "expert_choice", "routing_scope": routing_scope}
    return layers.RoutingAttention(2, 4, 2, 3, **options)


def scoped_model(routing_scope, remat):
    inputs = keras.Input((9, 5))
    x = scoped(routing_scope)(inputs, use_causal_mask=True)
    block = layers.TransformerBlock(scoped(routing_scope), None, remat=remat)
    return keras.Model(inputs, block(x))


@pytest.mark.parametrize("remat", [False, True])
def test_models_and_blocks_hand_the_scope_of_a_call_on(remat):
    """In training too, where gradients may compute all of it again."""
    results = []
    for own, called in (("prefix", None), ("full", "prefix"), ("full", None)):
        model = scoped_model(own, remat)
        helpers.randomize(model)
        results.append(
            golden_cases.gradients(
                model,
                lambda y, losses: keras.ops.sum(y**3),
                {
                    "inputs": helpers.normal(2, 9, 5),
                    "training": True,
                    **({"routing_scope": called} if called else {}),
                },
                wrt=("inputs",),
            )
        )
    expected, named, other = results
    golden_cases.assert_close(named.outputs, expected.outputs, 1e-5)
    golden_cases.assert_close(named.inputs["inputs"], expected.inputs["inputs"], 1e-5)
    error = golden_cases.relative_error(
        other.inputs["inputs"], expected.inputs["inputs"]
    )
    assert error > 1e-2


def test_refuses_an_unknown_scope_of_a_call():
    with pytest.raises(ValueError, match="`routing_scope`.*routing_scope='last'"):
        scoped()(helpers.normal(2, 9, 5), routing_scope="last")


@pytest.mark.parametrize("routing", ["token_choice", "expert_threshold"])
@pytest.mark.parametrize(
    "options, received",
    [
        ({}, "use_causal_mask=False, is_cross_attention=False"),
        (
            {"is_cross_attention": True},
            "use_causal_mask=False, is_cross_attention=True",
        ),
        (
            {"use_causal_mask": True, "is_cross_attention": True},
            "use_causal_mask=True, is_cross_attention=True",
        ),
    ],
)
def test_tokens_that_choose_refuse_other_than_causal_self_attention(
    options, received, routing
):
    group = built_group(routing=routing)
    with pytest.raises(ValueError) as error:
        group(*tokens(), **options)
    assert f'`routing="{routing}"`' in str(error.value)
    assert f"Received: {received}" in str(error.value)
    assert "`use_causal_mask=True`" in str(error.value)
    assert '`routing="expert_choice"`' in str(error.value)


def test_the_sound_routing_is_the_default():
    """Token choice in causal self-attention, else expert choice."""
    query, key, value = tokens()
    for options, sound in (
        ({"use_causal_mask": True}, "token_choice"),
        ({}, "expert_choice"),
        ({"is_cross_attention": True}, "expert_choice"),
    ):
        outputs = []
        for routing in ({}, {"routing": None}, {"routing": sound}):
            group = RoutedHeads(HEADS, CLUSTERS, 5, share_query_key=False, **routing)
            group.build(*[query.shape] * 3)
            helpers.randomize(group)
            outputs.append(golden_cases.run(group, query, key, value, **options)[0])
            assert group.get_config()["routing"] == routing.get("routing")
        np.testing.assert_array_equal(outputs[0], outputs[1])
        np.testing.assert_array_equal(outputs[0], outputs[2])


def test_no_routing_is_sound_under_a_causal_mask_over_another_sequence():
    group = built_group(routing=None)
    received = "use_causal_mask=True, is_cross_attention=True"
    with pytest.raises(ValueError, match=f"`routing=None` .*Received: {received}"):
        group(*tokens(), use_causal_mask=True, is_cross_attention=True)


@pytest.mark.parametrize("of_first_row", [False, True])
def test_padding_may_be_routed_as_in_the_release(of_first_row):
    group = built_group(release_heads.ExactRoutedHeads, cache_padding_bias=of_first_row)
    query, key, value = tokens()
    real = helpers.tail_mask(LENGTH, 6, 9)

    output, _ = golden_cases.run(group, query, None, value, value_mask=real)

    expected, counts = expert_choice(
        group, query, query, value, real, real, choosable=[np.ones_like(real)] * 2
    )
    golden_cases.assert_close(output, expected, 1e-5)
    padding = np.broadcast_to(~real[:, None], counts.shape)
    assert np.any(counts[padding] > 0)


def test_zero_rows_are_padding_for_the_release():
    group = built_group(release_heads.ExactRoutedHeads, share_query_key=False)
    query, key, value = tokens()
    for x, rows in ((query, [0, 5]), (key, [3]), (value, [2, 11])):
        x[:, :, rows] = 0.0
    before = golden_cases.to_numpy(group.kmeans.counts)

    output, _ = golden_cases.run(group, query, key, value, training=True)

    # The averages count the tokens that are not zero, queries first and then keys.
    after = golden_cases.to_numpy(group.kmeans.counts).sum()
    step = 0.9 * (0.9 * before.sum() + 0.1 * 4 * 10) + 0.1 * 4 * 11
    golden_cases.assert_close(after, step, 1e-6)
    # Only a zero value hides a key.
    group = built_group(share_query_key=False)
    real = np.any(value[:, 0] != 0, axis=-1)
    choosable = [np.ones_like(real)] * 2
    expected, counts = expert_choice(
        group, query, key, value, real, real, choosable=choosable
    )
    member = counts > 0
    expected *= (counts / (counts + 0.01))[..., None]
    golden_cases.assert_close(output[member], expected[member], 1e-5)


@pytest.mark.parametrize(
    "shared, routing, cluster_of",
    [
        (False, "expert_choice", "query"),
        (True, "expert_choice", "query"),
        (False, "token_choice", "query"),
        (False, "token_choice", "key"),
        (True, "token_choice", "query"),
    ],
)
def test_trains_on_normalized_real_tokens(shared, routing, cluster_of):
    """The commitment loss and the moving averages, from their formulas.

    Where queries have no cluster of their own, the keys alone move centroids.
    """
    group = built_group(
        share_query_key=shared,
        commitment_weight=0.5,
        routing=routing,
        query_cluster=cluster_of,
    )
    query, key, value = tokens()
    real = helpers.tail_mask(LENGTH, 11, 4)
    kmeans = group.kmeans
    centroids, counts = golden_cases.to_numpy([kmeans.centroids, kmeans.counts])

    _, losses = golden_cases.run(
        group,
        query,
        None if shared else key,
        value,
        query_mask=real,
        value_mask=real,
        use_causal_mask=routing == "token_choice",
        training=True,
    )

    loss = 0.0
    streams = [query] if shared else [query, key]
    for stream in streams[-1:] if cluster_of == "key" else streams:
        stream = helpers.normalize(stream)
        nearest = np.argmax(np.einsum("bhld,hkd->bhlk", stream, centroids), axis=-1)
        squares = [
            (stream[b, h, i] - centroids[h, nearest[b, h, i]]) ** 2
            for b, i in np.argwhere(real)
            for h in range(HEADS)
        ]
        loss += 0.5 * np.mean(squares)
        counts = 0.9 * counts
        for b, i in np.argwhere(real):
            for h in range(HEADS):
                counts[h, nearest[b, h, i]] += 0.1
    golden_cases.assert_close(sum(losses), loss, 1e-5)
    golden_cases.assert_close(*golden_cases.to_numpy([kmeans.counts, counts]), 1e-5)


def test_refuses_causal_mask_over_two_lengths():
    with pytest.raises(ValueError, match="use_causal_mask.*lengths 12 and 7"):
        built_group()(*tokens(memory_length=7), use_causal_mask=True)


def test_several_clusters_need_token_choice_and_shares_of_the_window():
    options = {"attention_window": 6, "clusters_per_query": 2}
    group = RoutedHeads(HEADS, CLUSTERS, **options)
    helpers.assert_keeps_settings(group)
    for more, received in (
        ({"routing": "expert_choice"}, "routing='expert_choice'"),
        ({"entmax_alpha": 1.5}, "entmax_alpha=1.5"),
        ({"attention_window": 5}, "attention_window=5"),
        ({"clusters_per_query": 6}, "num_clusters=3"),
        ({"clusters_per_query": 0}, "clusters_per_query=0"),
    ):
        with pytest.raises(ValueError, match=f"`clusters_per_query`.*{received}"):
            RoutedHeads(HEADS, CLUSTERS, **{**options, **more})


def test_a_match_behind_the_border_of_a_cluster_is_seen_by_the_next_best():
    """A query beside a border reads what lies on the other side of it, too."""
    centroids = np.array([[[1.0, 0, -1, 0], [-1, 0, 1, 0], [0, 1, 0, -1]]])
    key, far = np.array([1.0, 0.9, -1, -0.9]), np.array([-1.0, -0.9, 1, 0.9])
    query = np.array([0.9, 1.0, -0.9, -1])
    tokens = np.stack([far, key, query])[None, None].astype("float32")
    value = np.array([[7.0], [3.0], [5.0]])[None, None].astype("float32")
    found = []
    for number in (1, 2):
        group = RoutedHeads(1, 3, attention_window=4, clusters_per_query=number)
        group.build(tokens.shape, tokens.shape, value.shape)
        group.kmeans.centroids.assign(centroids)
        output = group(tokens, None, value, use_causal_mask=True)
        found.append(keras.ops.convert_to_numpy(output)[0, 0, :, 0])
    np.testing.assert_allclose(found[0], [7, 3, 5])  # each in a cluster of its own
    unit = helpers.normalize(tokens)[0, 0]
    weights = np.exp(unit[1:] @ unit[2])
    expected = weights @ [3, 5] / weights.sum()
    np.testing.assert_allclose(found[1], [7, 3, expected], rtol=1e-5)
