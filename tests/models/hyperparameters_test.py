import dataclasses
import json
import re

import pytest

from routing_tf.models import Hyperparameters
from routing_tf.models import hyperparameters

IMAGE = {
    "image_height": 4,
    "image_width": 4,
    "num_channels": 3,
    "max_sequence_length": 48,
}
FLAWED = {"compatibility": "trained"}
GRADIENT = {"ema": False}
TWO_CLUSTERS = {"clusters_per_query": 2, "routing": None}
EXPERTS = {"feed_forward": "mixture_of_experts"}
SPARSE = {"sparse_projections": True}


@pytest.mark.parametrize(
    "message, fields",
    [
        # Of centroids.
        (r"`balance_rate`.*=0\.1, ema=False", {**GRADIENT, "balance_rate": 0.1}),
        ("revive_centroids_after=3", {**GRADIENT, "revive_centroids_after": 3}),
        ("='tokens', ema=False", {**GRADIENT, "centroid_initialization": "tokens"}),
        # Of several clusters for a query.
        (
            "`clusters_per_query`.*routing='hashed'",
            {**TWO_CLUSTERS, "routing": "hashed"},
        ),
        (
            "`clusters_per_query`.*'multipole'.*num_clusters=1 ",
            {**TWO_CLUSTERS, "routing": "multipole", "num_clusters": 1},
        ),
        (
            "`clusters_per_query`.*'multipole'.*attention_window=3",
            {**TWO_CLUSTERS, "routing": "multipole", "attention_window": 3},
        ),
        (
            r"`clusters_per_query`.*entmax_alpha=1\.5",
            {**TWO_CLUSTERS, "entmax_alpha": 1.5},
        ),
        (
            "`clusters_per_query`.*attention_window=15",
            {**TWO_CLUSTERS, "attention_window": 15},
        ),
        # Of the release.
        ("`exploring_queries`.*=4", {**FLAWED, "exploring_queries": 4}),
        ("`qk_norm`.*qk_norm=True", {**FLAWED, "qk_norm": True}),
        ("`rotary_positions=True`.*'trained'", {**FLAWED, "rotary_positions": True}),
        (
            "`rotary_positions=True`.*key_dim=3",
            {"rotary_positions": True, "key_dim": 3},
        ),
        ("`feed_forward='mixture_of_experts'`.*'trained'", {**FLAWED, **EXPERTS}),
        ("`feed_forward=.*local_block_width=2", {**EXPERTS, "local_block_width": 2}),
        ("`value_dim`.* 4 .*value_dim=5", {**SPARSE, "value_dim": 5, "key_dim": 4}),
        ("`local_key_shift=1`.*'trained'", {**FLAWED, "local_key_shift": 1}),
        ("`num_key_value_heads`.*=4", {**FLAWED, "num_key_value_heads": 4}),
        # Of heads.
        (
            "Received: num_local_heads=0, num_routed_heads=0, .*num_strided_heads=0",
            {"num_local_heads": 0, "num_routed_heads": 0},
        ),
        (
            "`hidden_dim`.*num_strided_heads=1",
            {"hidden_dim": 64, "num_strided_heads": 1},
        ),
        (
            "`hidden_dim`.*num_cluster_strided_heads=1",
            {"hidden_dim": 64, "num_cluster_strided_heads": 1},
        ),
        (
            "`num_key_value_heads`.*=2, num_local_heads=3, num_routed_heads=1",
            {"num_key_value_heads": 2, "num_local_heads": 3, "num_routed_heads": 1},
        ),
        ("`num_key_value_heads`.*`share_query_key=False`", {"num_key_value_heads": 4}),
        # Of images.
        ("image_height=4, image_width=None", {"image_height": 4}),
        (
            "`max_sequence_length`.* 48.*max_sequence_length=47",
            {**IMAGE, "max_sequence_length": 47},
        ),
        ("Received: num_encoder_layers=2", {**IMAGE, "num_encoder_layers": 2}),
        ("`num_classes`.*num_classes=10", {"num_classes": 10}),
    ],
)
def test_refused(message, fields):
    with pytest.raises(ValueError, match=message):
        Hyperparameters(**fields)


def test_defaults():
    h = Hyperparameters()
    assert h.num_heads == h.num_local_heads + h.num_routed_heads == 8
    assert h.compatibility is None and h.memory_flange_blocks is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        h.num_layers = 3


def test_integers_serve_as_floats():
    h = Hyperparameters(learning_rate=1, weight_decay=0)
    assert (type(h.learning_rate), type(h.weight_decay)) == (float, float)
    same = Hyperparameters(learning_rate=1.0)
    assert json.dumps(h.to_dict()) == json.dumps(same.to_dict())


def test_replace_names_unknown_fields_and_the_valid_ones():
    with pytest.raises(ValueError) as error:
        Hyperparameters().replace(num_layer=3, hidden_dim=64, depth=1)
    assert "Unknown hyperparameters: depth, num_layer." in str(error.value)
    assert "num_layers, hidden_dim, embedding_dim" in str(error.value)


def test_round_trip_through_json():
    h = Hyperparameters(
        embedding_dim=7,
        key_dim=5,
        truncate_length=11,
        learning_rate=1 / 3,
        compatibility="exact_shared_padding",
    )
    fields = json.loads(json.dumps(h.to_dict()))
    assert list(fields) == hyperparameters.field_names()
    assert Hyperparameters(**fields) == h


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", {}),
        (" , ,", {}),
        (" num_layers = 3 , ema = FALSE,", {"num_layers": 3, "ema": False}),
        ("share_query_key=1,ema=0", {"share_query_key": True, "ema": False}),
        ("learning_rate=1e-3", {"learning_rate": 1e-3}),
        ("num_layers=3,num_layers=4", {"num_layers": 4}),
        ("weight_decay=0", {"weight_decay": 0.0}),
        ("key_dim=None,value_dim=none", {"key_dim": None, "value_dim": None}),
        ("entmax_alpha=1.5", {"entmax_alpha": 1.5}),
        ("logit_soft_cap=30", {"logit_soft_cap": 30.0}),
        ("entmax_alpha=learned", {"entmax_alpha": "learned"}),
        ("entmax_alpha=None", {"entmax_alpha": None}),
        ("remat_attention=TRUE", {"remat_attention": True}),
        ("remat_attention=weights", {"remat_attention": "weights"}),
        ("routing=none,query_cluster=key", {"routing": None, "query_cluster": "key"}),
        ("optimizer=adam", {"optimizer": "adam"}),
        ("rotary_positions=true", {"rotary_positions": True}),
    ],
)
def test_parse_overrides(text, expected):
    overrides = hyperparameters.parse_overrides(text)
    assert overrides == expected
    for name, value in overrides.items():
        assert type(value) is type(expected[name]), name
    Hyperparameters().replace(**overrides)


@pytest.mark.parametrize(
    "text, message",
    [
        ("depth=3", "Received: 'depth=3'."),
        ("num_layers=3,depth=3", "Received: 'depth=3'"),
        ("num_layers", "Received: 'num_layers'"),
        ("=3", "Received: '=3'"),
        ("compatibility=1", "Received: 'compatibility=1'"),
        ("num_layers=3.0", "Received: num_layers=3.0"),
        ("num_layers=", "Received: num_layers=''"),
    ],
)
def test_parse_overrides_refuses(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        hyperparameters.parse_overrides(text)


def test_parse_overrides_lists_only_names_that_it_takes():
    with pytest.raises(ValueError) as error:
        hyperparameters.parse_overrides("depth=3")
    listed = str(error.value).partition("Valid names are: ")[2].split(", ")
    assert sorted(listed) == listed
    assert set(listed) == set(hyperparameters.field_names()) - {"compatibility"}


@pytest.mark.parametrize(
    "changes, full, prefix",
    [
        ({}, None, None),
        ({"routing": "expert_choice"}, "routing", None),
        ({"routing": "expert_choice", "num_local_only_layers": 1}, "routing", None),
        ({"routing": "token_choice"}, None, None),
        ({"routing": "expert_threshold"}, None, None),
        ({"routing": "full"}, None, None),
        ({"num_routed_heads": 0}, None, None),
        ({"num_local_only_layers": 12}, None, None),
        ({"routing": "hashed"}, None, None),
        ({"routing": "random"}, None, None),
        ({"routing": "random", "compatibility": "exact"}, None, None),
        ({"routing": "token_choice", "compatibility": "exact"}, None, None),
        (
            {"routing": "expert_choice", "num_cluster_strided_heads": 4, **FLAWED},
            "routing",
            "compatibility",
        ),
        ({"routing": "hashed", **FLAWED}, "compatibility", "compatibility"),
        (
            {"num_encoder_layers": 2, "compatibility": "exact"},
            "compatibility",
            "compatibility",
        ),
    ],
)
def test_what_sees_later_tokens(changes, full, prefix):
    h = Hyperparameters(hidden_dim=24 * 32, **changes)
    found = [h.sees_later_tokens(scope) for scope in ("full", "prefix")]
    assert found == [full, prefix]


@pytest.mark.parametrize("fields", [{}, {"share_query_key": False}])
def test_a_dict_means_what_it_means_as_arguments(fields):
    fields = {"compatibility": None, "train_steps": 5, **fields}
    assert Hyperparameters.from_dict(fields) == Hyperparameters(**fields)


@pytest.mark.parametrize("fields", [None, [1], {3: 2}])
def test_what_is_no_dict_is_refused(fields):
    with pytest.raises(ValueError, match="`fields`.*fields="):
        Hyperparameters.from_dict(fields)
