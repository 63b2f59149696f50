"""Patterns of other systems, which `Hyperparameters.routing` names, as heads of models.

What they compute is tested with the layers.
"""

import dataclasses

import keras
import keras_hub
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import models
from routing_tf.models import feed_forwards
from routing_tf.models import patterns
from routing_tf.models import stack
from routing_tf.zoo import FEED_FORWARDS
from routing_tf.zoo import PATTERNS
from routing_tf.zoo import entmax
from tests import golden_cases
from tests.models import small_models
from tests.models import small_seq2seq
from tests.models.small_models import output
from tools import preset_table

LENGTH, START = 12, 9
# One of each way to remember: heads of the zoo are tested alone, these within models.
# On JAX they take long to compile.
FURTHER = ("luna", "long_short", "native_sparse", "nystrom", "bigbird")
FEW = () if keras.backend.backend() == "jax" else ("reformer", "linformer")
ON_TEXT = [name for name, pattern in PATTERNS.items() if not pattern.of_images]
OF_DECODERS = [name for name in ON_TEXT if PATTERNS[name].of_decoders]
OF_ENCODERS = [name for name in ON_TEXT if PATTERNS[name].of_encoders]
ENCODER = {"num_encoder_layers": 1, "max_input_length": 16}
DEEPER = {"num_layers": 2, "intermediate_dim": 32, "routing": "token_choice"}
SMALL = {"num_layers": 1, "attention_window": 8, "max_sequence_length": LENGTH}


def all_cases(names):
    return [
        pytest.param(name, marks=() if name in FEW else pytest.mark.thorough)
        for name in names
    ]


def cases(names):
    few = ("reformer", "linformer", *FURTHER)
    return all_cases([name for name in names if name in few])


def assert_has(block, name, expected=True):
    """Asserts that the routed heads of a block are a pattern, or are not."""
    made = {type(group).__name__ for group in block.attention.head_groups}
    sizes = patterns.Sizes(attention_window=8, max_length=16, num_clusters=4)
    groups = PATTERNS[name].groups(sizes, 2)
    assert ({type(group).__name__ for group in groups} <= made) == expected


@pytest.mark.parametrize("name", all_cases(ON_TEXT))
def test_heads_of_each_pattern(name):
    """Their variables have different paths, by which checkpoints hold them."""
    of_decoders = PATTERNS[name].of_decoders
    changes = {"routing": name} if of_decoders else {"encoder_routing": name, **ENCODER}
    cls = models.RoutingTransformer
    if not of_decoders:
        cls = models.RoutingTransformerEncoderDecoder
    with preset_table.shapes_alone():
        model = cls(small_models.hyperparameters(**changes, **SMALL))
    blocks = model.blocks
    if not of_decoders:
        assert_has(blocks[-1], name, expected=False)
        blocks = model.encoder_blocks
    assert_has(blocks[-1], name)
    assert len({variable.path for variable in model.weights}) == len(model.weights)


@pytest.mark.parametrize(
    "changes",
    [
        *(
            pytest.param({"routing": case.values[0]}, marks=case.marks)
            for case in cases(OF_DECODERS)
        ),
        *(
            pytest.param(
                {"feed_forward": name, **DEEPER},
                marks=pytest.mark.thorough if number else (),
            )
            for number, name in enumerate(FEED_FORWARDS)
        ),
        pytest.param({"sparse_projections": True, **DEEPER}, id="sparse_projections"),
    ],
    ids=lambda changes: next(iter(changes.values())),
)
def test_of_text(changes):
    lm = small_models.language_model(**SMALL | changes)
    if "feed_forward" in changes:
        made = {type(block.feed_forward).__name__ for block in lm.backbone.blocks}
        assert made - {"FeedForward"}
    x = small_models.inputs((LENGTH, LENGTH), LENGTH)
    expected = output(lm, x)
    changed = x["token_ids"].copy()
    changed[:, START:] = changed[:, START:] % 29 + 1
    np.testing.assert_array_equal(
        output(lm, {**x, "token_ids": changed})[:, :START], expected[:, :START]
    )
    lm.compile(sampler=keras_hub.samplers.GreedySampler())
    prompts = small_models.inputs((START, START), START + 1)
    prompts["token_ids"] = x["token_ids"][:, : START + 1]
    found = lm.generate(prompts, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(
        found[:, START], expected[:, START - 1].argmax(axis=-1)
    )


@pytest.mark.parametrize("name", cases(OF_ENCODERS))
def test_of_encoders(name):
    lm = small_seq2seq.language_model(
        encoder_routing=name, max_input_length=LENGTH, **SMALL
    )
    assert_has(lm.backbone.encoder_blocks[-1], name)
    assert_has(lm.backbone.blocks[-1], name, expected=False)
    buffers = {"buffers": (LENGTH, LENGTH)}
    x = small_seq2seq.inputs((LENGTH, START), (LENGTH, LENGTH), **buffers)
    expected = output(lm, x)
    mask = x["encoder_padding_mask"]
    other = small_seq2seq.change(x, "encoder_token_ids", ~mask)
    np.testing.assert_array_equal(output(lm, other), expected)
    other = small_seq2seq.change(x, "encoder_token_ids", mask)
    assert np.abs(output(lm, other) - expected).max() > 1e-3


@pytest.mark.parametrize("name", cases(OF_DECODERS))
def test_of_decoders_behind_an_encoder(name):
    lm = small_seq2seq.language_model(routing=name, **SMALL)
    assert_has(lm.backbone.encoder_blocks[-1], name, PATTERNS[name].of_encoders)
    x = small_seq2seq.inputs(lengths=(LENGTH, LENGTH), buffers=(40, LENGTH))
    expected = output(lm, x)
    lm.compile(sampler=keras_hub.samplers.GreedySampler())
    prompts = {**x, "decoder_padding_mask": np.arange(LENGTH)[None] <= [[START]] * 2}
    found = lm.generate(prompts, stop_token_ids=None)["decoder_token_ids"]
    np.testing.assert_array_equal(
        found[:, START + 1], expected[:, START].argmax(axis=-1)
    )


@pytest.mark.parametrize(
    "routing, encoder_routing, expected",
    [
        ("token_choice", None, "expert_choice"),
        (None, None, "expert_choice"),
        ("hashed", None, "hashed"),
        ("linear", None, "linear"),
        ("native_sparse", None, "expert_choice"),
        (None, "linformer", "linformer"),
        ("hashed", "full", "full"),
    ],
)
def test_routing_of_an_encoder(routing, encoder_routing, expected):
    h = small_seq2seq.hyperparameters(routing=routing, encoder_routing=encoder_routing)
    assert patterns.routing_of(h, is_decoder=False) == expected
    assert patterns.routing_of(h, is_decoder=True) == routing


@pytest.mark.parametrize("name", PATTERNS)
def test_what_a_pattern_refuses_is_what_its_heads_refuse(name):
    pattern, refused = PATTERNS[name], set()
    sizes = patterns.Sizes(attention_window=8, max_length=16, num_clusters=4)
    options = {"dropout": 0.5, "rotary_positions": True, "key_shift": 1}
    for argument, value in {**options, "entmax_alpha": 1.5}.items():
        try:
            made = pattern
            if argument == "entmax_alpha":
                heads = entmax.with_entmax(pattern.heads)
                made = dataclasses.replace(pattern, heads=heads)
            made.groups(sizes, 2, **{argument: value})
        except ValueError:
            refused.add(argument)
    assert refused == set(pattern.refuses)
    if pattern.min_heads > 1:
        with pytest.raises(ValueError):
            pattern.groups(sizes, pattern.min_heads - 1)


@pytest.mark.parametrize("name", OF_DECODERS)
def test_caches_grow_unless_a_pattern_says_that_they_are_bounded(name):
    sizes = patterns.Sizes(attention_window=8, max_length=64, num_clusters=4)
    groups = PATTERNS[name].groups(sizes, 2)
    for group in groups:
        group.set_sizes(4, 4)
    shapes = [
        [
            tuple(x.shape)
            for group in groups
            for x in keras.tree.flatten(group.make_cache(1, length))
        ]
        for length in (32, 64)
    ]
    assert (shapes[0] == shapes[1]) == PATTERNS[name].is_bounded


@pytest.mark.parametrize(
    "blocks",
    [{}, {"local_block_length": 2, "local_block_width": 6}],
    ids=["rows", "rectangles"],
)
@pytest.mark.thorough
def test_of_images(blocks):
    h = small_models.hyperparameters(
        **{
            "routing": "axial",
            "image_height": 4,
            "image_width": 4,
            "num_channels": 3,
            "max_sequence_length": 48,
            "num_layers": 1,
            "local_relative_positions": False,
            **blocks,
        }
    )
    lm = models.RoutingImageTransformer(h)
    images = np.random.default_rng(0).integers(0, 31, (2, 4, 4, 3)).astype("int32")
    changed = images.copy()
    changed[:, 3, 3] = 0
    found, other = (golden_cases.to_numpy(lm({"images": x})) for x in (images, changed))
    np.testing.assert_array_equal(found[:, :3], other[:, :3])
    assert np.abs(found - other).max() > 0


ONE_HEAD = {"num_routed_heads": 1, "key_dim": 4}


def in_an_encoder(name, **changes):
    return {"routing": None, **ENCODER, "encoder_routing": name, **changes}


@pytest.mark.parametrize(
    "message, changes",
    [
        ("`routing`.*routing='block_top_k'", {"compatibility": "exact"}),
        ("`routing`.*routing='axial'", {"routing": "axial"}),
        ("routing='linformer'.*`encoder_routing`", {"routing": "linformer"}),
        ("`routing`.*num_routed_heads=0", {"num_routed_heads": 0}),
        ("`routing`.*num_local_only_layers=2", {"num_local_only_layers": 2}),
        (
            r"`attention_dropout`.*routing='linear' .*attention_dropout=0\.5",
            {"routing": "linear", "attention_dropout": 0.5},
        ),
        (
            "`rotary_positions`.*routing='luna'",
            {"routing": "luna", "rotary_positions": True},
        ),
        (
            "`routed_key_shift`.*routing='reformer'",
            {"routing": "reformer", "routed_key_shift": 1},
        ),
        (
            "`share_query_key`.*routing='reformer'",
            {"routing": "reformer", "share_query_key": False},
        ),
        (
            r"`entmax_alpha`.*routing='block_top_k' .*entmax_alpha=1\.5",
            {"entmax_alpha": 1.5},
        ),
        ("`num_routed_heads`.*num_routed_heads=1", {"routing": "bigbird", **ONE_HEAD}),
        (
            "`encoder_routing`.*encoder_routing='linformer' .*num_encoder_layers=0",
            in_an_encoder("linformer", num_encoder_layers=0),
        ),
        ("`encoder_routing`.*='native_sparse'", in_an_encoder("native_sparse")),
        ("`encoder_routing`.*='token_choice'", in_an_encoder("token_choice")),
        ("`encoder_routing`.*encoder_routing='axial'", in_an_encoder("axial")),
        (
            "`encoder_routing`.*`compatibility`.*compatibility='exact'",
            in_an_encoder("full", compatibility="exact"),
        ),
        (
            "`encoder_routing`.*num_local_only_layers=1 ",
            in_an_encoder("full", num_local_only_layers=1),
        ),
        (
            "`attention_dropout`.*encoder_routing='nystrom'",
            in_an_encoder("nystrom", attention_dropout=0.5),
        ),
    ],
)
def test_refused(message, changes):
    with pytest.raises(ValueError, match=message):
        small_models.hyperparameters(**{"routing": "block_top_k", **changes})


def test_refused_by_heads_of_a_pattern_that_says_nothing(monkeypatch):
    own = dataclasses.replace(PATTERNS["luna"], refuses=())
    monkeypatch.setattr(patterns, "all_patterns", lambda: {"own": own})
    h = small_models.hyperparameters(routing="own", routed_key_shift=1)
    message = "`routed_key_shift`.*'own'.*=1.*`key_shift`"
    with pytest.raises(ValueError, match=message):
        stack.decoder_block(h, 0, None)


def test_other_settings_of_heads():
    changes = {"entmax_alpha": 1.5, "local_dilation": 2}
    lm = small_models.language_model(routing="full", **changes, **SMALL)
    groups = lm.backbone.blocks[0].attention.head_groups
    assert {group.entmax_alpha for group in groups} == {1.5}
    assert [group.dilation for group in groups if hasattr(group, "dilation")] == [2]
    for name, value in changes.items():
        with pytest.raises(ValueError, match=f"`{name}`.*compatibility='exact'"):
            small_models.hyperparameters(compatibility="exact", **{name: value})


def test_sliding_windows_have_no_entmax():
    changes = {"num_factorized_heads": 2, "num_routed_heads": 0}
    with pytest.raises(ValueError, match="`entmax_alpha`.*num_factorized_heads=2"):
        small_models.hyperparameters(entmax_alpha=1.5, **changes)


def test_centroids_of_a_pattern_move_as_hyperparameters_say():
    changes = {"balance_rate": 0.25, "exploring_queries": 2, "share_query_key": False}
    h = small_models.hyperparameters(routing="multipole", **changes)
    group = stack.decoder_block(h, 0, None).attention.head_groups[0]
    assert (group.clustering.balance_rate, group.exploring_queries) == (0.25, 2)
    assert not group.share_query_key
    with pytest.raises(
        ValueError, match="`num_key_value_heads`.*`share_query_key=False`"
    ):
        h.replace(share_query_key=True, num_key_value_heads=2)


def test_multipole_heads_read_as_many_clusters_as_hyperparameters_say():
    h = small_models.hyperparameters(
        routing="multipole", num_clusters=4, clusters_per_query=3
    )
    group = stack.decoder_block(h, 0, None).attention.head_groups[0]
    assert (group.num_clusters, group.clusters_per_query) == (4, 3)


@pytest.mark.parametrize("routing, expected", [("token_choice", 1), ("multipole", 2)])
def test_multipole_heads_of_an_encoder_read_several_clusters_if_routing_does(
    routing, expected
):
    h = small_models.hyperparameters(
        routing=routing, encoder_routing="multipole", clusters_per_query=2, **ENCODER
    )
    group = stack.encoder_block(h, 0, None).attention.head_groups[0]
    assert group.clusters_per_query == expected


@pytest.mark.parametrize("name", ["full", "multipole", ""])
def test_names_of_the_package_are_not_registered_anew(name):
    pattern = PATTERNS["sliding"]
    with pytest.raises(ValueError, match="`name`.*name="):
        patterns.register(name, pattern)


@pytest.mark.parametrize("name", ["geglu", "mixture_of_experts"])
def test_feed_forwards_of_the_package_are_not_registered_anew(name):
    with pytest.raises(ValueError, match="`name`.*name="):
        feed_forwards.register(name, lambda place, **options: None)


def test_what_is_no_pattern_is_not_registered():
    with pytest.raises(ValueError, match="`pattern`.*pattern=<class"):
        patterns.register("mine", layers.FullHeads)
