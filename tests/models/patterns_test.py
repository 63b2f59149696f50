"""Patterns of other systems, which `Hyperparameters.routing` names, as heads of models.

What they compute is tested with the layers.
"""

import keras
import keras_hub
import numpy as np
import pytest

from routing_tf import models
from routing_tf.models import patterns
from routing_tf.models.patterns import PATTERNS
from tests import golden_cases
from tests.models import small_models
from tests.models import small_seq2seq

pytestmark = pytest.mark.usefixtures("eager")
LENGTH, START = 12, 9
# On JAX they take long to compile.
FEW = () if keras.backend.backend() == "jax" else ("reformer", "linformer")
ON_TEXT = [name for name, pattern in PATTERNS.items() if not pattern.of_images]
OF_DECODERS = [name for name in ON_TEXT if PATTERNS[name].of_decoders]
OF_ENCODERS = [name for name in ON_TEXT if PATTERNS[name].of_encoders]
SMALL = {"num_layers": 1, "attention_window": 8, "max_sequence_length": LENGTH}


def cases(names):
    return [
        pytest.param(name, marks=() if name in FEW else pytest.mark.thorough)
        for name in names
    ]


def logits(lm, x):
    return golden_cases.to_numpy(lm(x))


def heads_of(block):
    return [type(group) for group in block.attention.head_groups]


@pytest.mark.parametrize("name", cases(OF_DECODERS))
def test_of_text(name):
    lm = small_models.language_model(routing=name, **SMALL)
    assert PATTERNS[name].heads in heads_of(lm.backbone.blocks[-1])
    x = small_models.inputs((LENGTH, LENGTH), LENGTH)
    expected = logits(lm, x)
    changed = x["token_ids"].copy()
    changed[:, START:] = changed[:, START:] % 29 + 1
    np.testing.assert_array_equal(
        logits(lm, {**x, "token_ids": changed})[:, :START], expected[:, :START]
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
    assert PATTERNS[name].heads in heads_of(lm.backbone.encoder_blocks[-1])
    assert PATTERNS[name].heads not in heads_of(lm.backbone.blocks[-1])
    buffers = {"buffers": (LENGTH, LENGTH)}
    x = small_seq2seq.inputs((LENGTH, START), (LENGTH, LENGTH), **buffers)
    expected = logits(lm, x)
    mask = x["encoder_padding_mask"]
    other = small_seq2seq.change(x, "encoder_token_ids", ~mask)
    np.testing.assert_array_equal(logits(lm, other), expected)
    other = small_seq2seq.change(x, "encoder_token_ids", mask)
    assert np.abs(logits(lm, other) - expected).max() > 1e-3


@pytest.mark.parametrize("name", cases(OF_DECODERS))
def test_of_decoders_behind_an_encoder(name):
    lm = small_seq2seq.language_model(routing=name, **SMALL)
    of_encoder = heads_of(lm.backbone.encoder_blocks[-1])
    assert (PATTERNS[name].heads in of_encoder) == PATTERNS[name].of_encoders
    x = small_seq2seq.inputs(lengths=(LENGTH, LENGTH), buffers=(40, LENGTH))
    expected = logits(lm, x)
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
    assert patterns.routing_of(h, is_causal=False) == expected
    assert patterns.routing_of(h, is_causal=True) == routing


@pytest.mark.parametrize("name", OF_DECODERS)
def test_caches_grow_unless_a_pattern_says_that_they_are_bounded(name):
    sizes = patterns.Sizes(attention_window=8, max_length=64, num_clusters=4)
    group = PATTERNS[name].heads(1, **PATTERNS[name].settings(sizes))
    group.set_sizes(4, 4)
    sizes = [
        [tuple(x.shape) for x in keras.tree.flatten(group.make_cache(1, length))]
        for length in (32, 64)
    ]
    assert (sizes[0] == sizes[1]) == PATTERNS[name].is_bounded


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


@pytest.mark.parametrize(
    "message, changes",
    [
        ("without flaws of the release", {"compatibility": "exact"}),
        ("needs rows and columns", {"routing": "axial"}),
        ("no causal form.*name it in `encoder_routing`", {"routing": "linformer"}),
        ("for models with an encoder", {"encoder_routing": "linformer"}),
        (
            "`encoder_routing` must name.*encoder_routing='native_sparse'",
            {"encoder_routing": "native_sparse", "num_encoder_layers": 1},
        ),
        (
            "need neither a causal mask",
            {"encoder_routing": "token_choice", "num_encoder_layers": 1},
        ),
        (
            "nor an image",
            {"encoder_routing": "axial", "num_encoder_layers": 1},
        ),
        (
            "`encoder_routing='full'` must come without flaws",
            {
                **{"routing": "hashed", "encoder_routing": "full"},
                **{"num_encoder_layers": 1, "compatibility": "exact"},
            },
        ),
    ],
)
def test_refused(message, changes):
    with pytest.raises(ValueError, match=message):
        small_models.hyperparameters(**{"routing": "block_top_k", **changes})
