"""Patterns of other systems, which `Hyperparameters.routing` names, as heads of models.

What they compute is tested with the layers.
"""

import keras
import keras_hub
import numpy as np
import pytest

from routing_tf import models
from routing_tf.models.patterns import PATTERNS
from tests import golden_cases
from tests.models import small_models

pytestmark = pytest.mark.usefixtures("eager")
LENGTH, START = 12, 9
# On JAX they take long to compile.
FEW = () if keras.backend.backend() == "jax" else ("reformer",)
TEXT = [
    pytest.param(name, marks=() if name in FEW else pytest.mark.thorough)
    for name, pattern in PATTERNS.items()
    if not pattern.of_images
]


def logits(lm, x):
    return golden_cases.to_numpy(lm(x))


def heads_of(lm):
    return [type(group) for group in lm.backbone.blocks[-1].attention.head_groups]


@pytest.mark.parametrize("name", TEXT)
def test_of_text(name):
    lm = small_models.language_model(
        routing=name, num_layers=1, attention_window=8, max_sequence_length=LENGTH
    )
    assert PATTERNS[name].heads in heads_of(lm)
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


@pytest.mark.parametrize("name", [n for n, p in PATTERNS.items() if not p.of_images])
def test_caches_grow_unless_a_pattern_says_that_they_are_bounded(name):
    h = small_models.hyperparameters(
        routing=name, attention_window=8, max_sequence_length=64
    )
    group = PATTERNS[name].heads(1, **PATTERNS[name].settings(h, 0))
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
        ("for decoders without an encoder", {"num_encoder_layers": 1}),
        ("without flaws of the release", {"compatibility": "exact"}),
        ("needs rows and columns", {"routing": "axial"}),
    ],
)
def test_refused(message, changes):
    with pytest.raises(ValueError, match=message):
        small_models.hyperparameters(**{"routing": "block_top_k", **changes})
