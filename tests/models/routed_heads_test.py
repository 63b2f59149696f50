"""Head groups as data, instead of the routed heads of a model."""

import json

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import models
from routing_tf import zoo
from routing_tf.generation import token_stream
from routing_tf.models import patterns
from routing_tf.models import stack
from routing_tf.models.release import heads
from tests import golden_cases
from tests.models import small_models
from tests.models import small_seq2seq

SMALL = {"num_layers": 1, "attention_window": 8, "routing": None}


def hyperparameters(**changes):
    return small_models.hyperparameters(**{"routing": None, **changes})


def serialized(group):
    return keras.saving.serialize_keras_object(group)


def mixture():
    """Heads of two groups of one class, and of the zoo."""
    hashed = [layers.HashedHeads(1, 3, window, key_shift=1) for window in (2, 6)]
    return [*hashed, zoo.BlockTopKHeads(2, block_length=4, num_blocks=2, key_shift=1)]


def test_data_is_that_of_any_form():
    settings = {"num_routed_heads": 4, "key_dim": 4}
    h = hyperparameters(routed_heads=mixture(), **settings)
    names = [config["config"]["name"] for config in h.routed_heads]
    assert names == [
        f"routed_{x}" for x in ("hashed_heads", "hashed_heads_1", "block_top_kheads")
    ]
    forms = [[serialized(group) for group in mixture()], h.routed_heads]
    for form in forms:
        assert hyperparameters(routed_heads=form, **settings) == h
    assert models.Hyperparameters.from_dict(json.loads(json.dumps(h.to_dict()))) == h
    for form in (layers.FullHeads(2), serialized(layers.FullHeads(2))):
        h = hyperparameters(routed_heads=form)
        assert [config["class_name"] for config in h.routed_heads] == ["FullHeads"]
    assert h.replace(routed_heads=None) == hyperparameters()


def test_a_name_is_that_of_routing():
    h = hyperparameters(routed_heads="block_top_k")
    assert h == hyperparameters(routing="block_top_k")
    parse = models.hyperparameters.parse_overrides
    named = {"routed_heads": "block_top_k", "routing": None}
    assert parse("routed_heads=block_top_k,routing=none") == named
    assert parse("routed_heads=none") == {"routed_heads": None}
    for name in ("block_topk", "none"):
        with pytest.raises(ValueError, match=f"`routed_heads`.*routed_heads='{name}'"):
            hyperparameters(routed_heads=name)


def test_one_pattern_is_named():
    full = hyperparameters(routing="full")
    hashed = {"routed_heads": "hashed"}
    assert full.replace(**hashed) == hyperparameters(routing="hashed")
    for change in (full.replace, hyperparameters):
        with pytest.raises(ValueError, match="`routed_heads`.*`routing`.*='full'"):
            change(**hashed, routing="full")
    h = full.replace(routed_heads=layers.FullHeads(2))
    assert h.routing is None
    for name in ("full", "linformer"):
        with pytest.raises(ValueError, match=f"`routing`.*='{name}'"):
            h.replace(routing=name)
    # An encoder, and attention to its output, also have such heads.
    encoder = full.replace(num_encoder_layers=1)
    assert encoder.replace(routed_heads=layers.FullHeads(2)).routing == "full"


def test_names_are_those_of_one_group():
    others = {
        "num_local_heads": 1,
        "num_strided_heads": 1,
        "num_cluster_strided_heads": 1,
        "num_factorized_heads": 2,
    }
    doubles = [
        layers.LocalHeads(1, (8,)),
        layers.LocalHeads(1, (4,)),
        layers.StridedHeads(1, (8,)),
        layers.SlidingHeads(1, 8),
        layers.FixedHeads(1, (8,)),
        layers.ClusterStridedHeads(1, 3, 8),
    ]
    expected = ["routed_local_heads", "routed_local_heads_1", "routed_strided_heads"]
    for pattern in ("strided", "fixed"):
        h = hyperparameters(
            routed_heads=doubles,
            num_routed_heads=6,
            key_dim=4,
            factorized_pattern=pattern,
            factorized_arrangement="merged",
            **others,
        )
        block = stack.decoder_block(h, 0, None)
        names = [group.name for group in block.attention.head_groups]
        assert names[:3] == expected
        assert len(set(names)) == 10


def test_can_be_hashed():
    one, other = (hyperparameters(routed_heads=layers.FullHeads(2)) for _ in range(2))
    assert {one: 1}[other] == 1
    assert one != hyperparameters()


def test_equals_the_pattern_of_the_same_sizes():
    x = small_models.inputs()
    (group,) = zoo.PATTERNS["block_top_k"].groups(
        patterns.Sizes(8, small_models.LENGTH, 3), 2, max_relative_position=10
    )
    outputs = [
        golden_cases.run(small_models.language_model(**{**SMALL, **changes}), x)[0]
        for changes in ({"routing": "block_top_k"}, {"routed_heads": group})
    ]
    np.testing.assert_array_equal(*outputs)


def test_models_keep_them(tmp_path):
    settings = {**SMALL, "num_layers": 2, "num_local_only_layers": 1}
    lm = small_models.language_model(
        routed_heads=mixture(), num_routed_heads=4, key_dim=4, **settings
    )
    first, second = (block.attention.head_groups for block in lm.backbone.blocks)
    assert [type(group).__name__ for group in first] == ["LocalHeads"]
    assert [group.num_heads for group in second] == [1, 1, 2, 2]
    x = small_models.inputs()
    expected, _ = golden_cases.run(lm, x)
    changed = {**x, "token_ids": x["token_ids"].copy()}
    changed["token_ids"][:, 15:] = changed["token_ids"][:, 15:] % 29 + 1
    np.testing.assert_array_equal(
        golden_cases.run(lm, changed)[0][:, :15], expected[:, :15]
    )
    for copy in small_models.saved(lm, tmp_path):
        assert copy.hyperparameters == lm.hyperparameters
        np.testing.assert_array_equal(golden_cases.run(copy, x)[0], expected)


def test_have_the_dtype_of_the_model():
    lm = small_models.language_model(
        dtype="mixed_bfloat16", routed_heads=layers.FullHeads(2), **SMALL
    )
    groups = lm.backbone.blocks[0].attention.head_groups
    assert {group.compute_dtype for group in groups} == {"bfloat16"}


def test_blocks_have_seeds_of_their_own():
    own = layers.RandomHeads(2, 3, 4, seed=5, dropout_seed=7)
    h = hyperparameters(routed_heads=own)
    for index in range(2):
        group = stack.decoder_block(h, index, None).attention.head_groups[0]
        assert (group.seed, group.dropout_seed) == (5 + index, 7 + index)


def test_an_encoder_has_others():
    lm = small_seq2seq.language_model(
        **{**SMALL, "routing": "full"}, routed_heads=layers.HashedHeads(2, 3, 4)
    )
    backbone = lm.backbone
    for blocks, expected in (
        (backbone.blocks, "HashedHeads"),
        (backbone.encoder_blocks, "FullHeads"),
    ):
        assert type(blocks[-1].attention.head_groups[0]).__name__ == expected


def test_what_they_see_and_remember_is_known():
    def settings(**options):
        return hyperparameters(routed_heads=layers.RoutedHeads(2, 3, 6, **options))

    leaking = settings(routing="expert_choice")
    assert leaking.sees_later_tokens("full") == "routed_heads"
    assert leaking.sees_later_tokens("prefix") is None
    scope = {"routing_scope": "prefix"}
    with pytest.raises(ValueError, match="`routing_scope`.*='full' "):
        settings(routing="expert_choice", **scope)
    with pytest.raises(ValueError, match="`routing_scope`.*='prefix' "):
        leaking.replace(**scope)
    # Token choice is the same in both.
    assert settings().replace(**scope).routing_scope == "prefix"
    assert settings().sees_later_tokens("full") is None
    found = token_stream.remembers_all_tokens(settings())
    assert found == "routed_heads of RoutedHeads, which are data"


def changed(config, **options):
    """The config of a group with other arguments."""
    return {**config, "config": {**config["config"], **options}}


FULL, HASHED = map(serialized, (layers.FullHeads(2), layers.HashedHeads(2, 3, 4)))
FORGETFUL = serialized(layers.FullHeads(2))
del FORGETFUL["config"]["num_heads"]


class Unknown(layers.FullHeads):
    """Heads that Keras does not know."""


@pytest.mark.parametrize(
    "message, groups, changes",
    [
        ("`routed_heads`.*Received: routed_heads=3", 3, {}),
        ("`routed_heads`.*Received: .*name=dense", keras.layers.Dense(2), {}),
        ("`routed_heads`.*Received: .*name=unknown", Unknown(2), {}),
        ("`routed_heads`.*Received: .*<class .*FullHeads", layers.FullHeads, {}),
        ("`routed_heads`.*Received: .*'hashed'", ["hashed"], {}),
        ("`routed_heads`.*'full_heads", layers.FullHeads(2).get_config(), {}),
        (r"`routed_heads`.*routed_heads=\[\]", [], {"num_routed_heads": 0}),
        ("`routed_heads`.*=", {**FULL, "class_name": "__lambda__"}, {}),
        ("`routed_heads`.*=", {**FULL, "registered_name": ["a"]}, {}),
        ("`num_routed_heads`.* 3 .*num_routed_heads=2", layers.FullHeads(3), {}),
        ("`num_routed_heads`.* 1 .*num_routed_heads=2", layers.FullHeads(1), {}),
        ("`routed_heads`.*JSON.*FullHeads.*JSON", changed(FULL, option=1j), {}),
        (r"`num_heads`.*num_heads=\[None\].*`get_config`", FORGETFUL, {}),
        (
            "`routed_heads`.*LinformerHeads.*`encoder_routing`",
            zoo.LinformerHeads(2, 24),
            {},
        ),
        ("`routed_heads`.*AxialHeads.*`image_height`", zoo.AxialHeads(2, 0), {}),
        (
            "`routed_heads`.*`compatibility`.*compatibility='exact'",
            layers.FullHeads(2),
            {"compatibility": "exact"},
        ),
        (
            "`routed_heads`.*num_local_only_layers=2",
            layers.FullHeads(2),
            {"num_local_only_layers": 2},
        ),
        (r"`routed_key_shift`.*key_shift=\[0\] ", FULL, {"routed_key_shift": 1}),
        (
            r"`attention_dropout`.*dropout=\[0\.1\]",
            layers.FullHeads(2, dropout=0.1),
            {"attention_dropout": 0.5},
        ),
        (
            r"`exploring_queries`.*exploring_queries=\[0\]",
            [layers.RandomHeads(1, 3, 4), layers.FullHeads(1)],
            {"exploring_queries": 2},
        ),
        (
            r"`attention_implementation`.*attention_implementation=\['plain'\]",
            FULL,
            {"attention_implementation": "auto"},
        ),
        *(
            (f"flaws of.*{cls.__name__}.*compatib", serialized(cls(2, 3, 4)), {})
            for cls in (
                heads.TrainedRoutedHeads,
                heads.TrainedHashedHeads,
                heads.ExactHashedHeads,
                heads.TrainedClusterStridedHeads,
                heads.ExactClusterStridedHeads,
            )
        ),
    ],
)
def test_refused(message, groups, changes):
    with pytest.raises(ValueError, match=message):
        hyperparameters(routed_heads=groups, **changes)


def test_refuses_code():
    group = layers.RoutedHeads(2, 3, 4, relative_key_initializer=lambda *_: 0.0)
    message = r"`routed_heads`.*RoutedHeads.*`keras\.initializers\.Initializer`"
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=message):
        hyperparameters(routed_heads=group)


def test_takes_what_keras_serializes_of_a_built_group():
    group = layers.FullHeads(2)
    layers.MixedAttention([group], key_dim=4)(np.zeros((1, 3, 8), "float32"))
    h = hyperparameters(routed_heads=keras.saving.serialize_keras_object(group))
    assert models.RoutingTransformer(h).hyperparameters == h


def test_refused_by_the_heads():
    h = hyperparameters(routed_heads=changed(HASHED, num_buckets=0))
    with pytest.raises(
        ValueError,
        match=r"`routed_heads`.*\['HashedHeads'\].*`num_buckets`.*num_buckets=0",
    ):
        models.RoutingTransformer(h)
