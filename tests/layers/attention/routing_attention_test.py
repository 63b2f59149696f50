"""Tests of the drop-in layer."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers

BATCH, LENGTH, DIM = 2, 12, 10
SETTINGS = {
    "num_heads": 4,
    "key_dim": 6,
    "num_clusters": 3,
    "attention_window": 5,
    "kernel_initializer": "zeros",
}


@pytest.mark.parametrize("share_query_key", [False, True])
def test_is_mixed_attention_of_routed_and_local_heads(share_query_key):
    sizes, relative = {"value_dim": 5, "output_dim": 9}, {"max_relative_position": 2}
    own = {"share_query_key": share_query_key, **relative}
    blocks = {"num_local_heads": 3, "local_block_size": 4}
    attention = layers.RoutingAttention(**SETTINGS, **blocks, **sizes, **own)
    helpers.randomized(attention, (BATCH, LENGTH, DIM))
    groups = layers.RoutedHeads(1, 3, 5, **own), layers.LocalHeads(3, (4,), **relative)
    mixed = helpers.attention(*groups, key_dim=6, dim=DIM, **sizes)
    mixed.set_weights(attention.get_weights())
    x = helpers.normal(BATCH, LENGTH, DIM)
    outputs = [
        golden_cases.run(layer, x, use_causal_mask=True)[0]
        for layer in (attention, mixed)
    ]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize(
    "num_local_heads, local_block_size, kinds",
    [(0, None, ["RoutedHeads"]), (4, 7, ["LocalHeads"]), (1, None, None)],
)
def test_kinds_of_its_heads(num_local_heads, local_block_size, kinds):
    attention = layers.RoutingAttention(
        **SETTINGS, num_local_heads=num_local_heads, local_block_size=local_block_size
    )
    names = [type(group).__name__ for group in attention.head_groups]
    assert names == (kinds or ["RoutedHeads", "LocalHeads"])
    assert attention.num_heads == 4
    if kinds is None:  # Blocks have the size of the window.
        assert attention.head_groups[1].block_shape == (5,)


CLUSTERING = {"decay": 0.9, "revive_after": 7, "clusters_per_query": 5}
CLUSTERING |= {"centroid_initialization": "tokens", "anchor_weight": 0.25}
OF_ROUTED = {"routing": "expert_choice", "routing_scope": "prefix"}
OF_ROUTED |= {"prefix_block_size": 3, "share_query_key": False}


@pytest.mark.parametrize(
    "options, clustering",
    [
        (OF_ROUTED, {}),
        ({}, CLUSTERING),
        ({"key_shift": 1, "dropout": 0.1, "max_relative_position": 2}, {}),
        ({"exploring_queries": 3, "attention_implementation": "auto"}, {}),
        ({"logit_soft_cap": 1.5, "qk_norm": True}, {}),
        ({"rotary_positions": True, "dtype": "bfloat16"}, {}),
    ],
)
def test_hands_settings_to_its_heads_and_keeps_them(options, clustering):
    own = {"shared_head_projection": True, "use_bias": True, "kernel_regularizer": "l2"}
    attention = layers.RoutingAttention(
        **{**SETTINGS, "num_clusters": 7, **options, **own},
        num_local_heads=1,
        clustering=clustering,
    )
    copy = layers.RoutingAttention.from_config(attention.get_config())
    helpers.assert_keeps_settings(copy)
    assert copy.shared_head_projection and copy.use_bias
    assert isinstance(copy.kernel_regularizer, keras.regularizers.L2)
    routed, local = copy.head_groups
    for name, value in {**options, **clustering}.items():
        for group in (routed, local):
            found = getattr(group, name, None)
            found = group.compute_dtype if name == "dtype" else found
            only_routed = name in ("exploring_queries", *OF_ROUTED, *clustering)
            assert found == value or (group is local and only_routed)
    for name in set(clustering) - {"clusters_per_query"}:
        assert getattr(routed.kmeans, name) == clustering[name]
    with pytest.raises(ValueError, match="`routing_scope`.*routing_scope='past'"):
        routed.routing_scope = "past"


def test_refuses_other_settings_of_the_clustering():
    with pytest.raises(ValueError, match="`clustering`.*Received: .*'num_clusters'"):
        layers.RoutingAttention(4, 8, 3, 5, clustering={"num_clusters": 3})


def test_sizes_of_clusters_must_be_given():
    with pytest.raises(ValueError, match="`num_clusters`.*num_clusters=None"):
        layers.RoutingAttention(4, 16)
