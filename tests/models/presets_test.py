"""Presets, but for what other tests hold against committed tables.

Sizes, heads, clusters, blocks and lengths are those of `docs/presets.md`, and all
variables at full size those of `preset_variables.json`.
"""

import re

import keras
import keras_hub
import numpy as np
import pytest

from routing_tf import models
from routing_tf.models.release import conversion
from routing_tf.models.score import TokenScorer
from routing_tf.settings.presets import RELEASE_SETS
from tests.layers import helpers

ON_JAX = keras.backend.backend() == "jax"
OWN = ["python_small", "digits_small", "images_small", "pairs_small", "byte_tiny"]
PAPER = [f"sparse_transformer_{data}" for data in ("cifar10", "enwik8", "imagenet64")]
CLASSES = {
    "text": [models.RoutingTransformer, models.RoutingTransformerCausalLM],
    "seq2seq": [
        models.RoutingTransformerEncoderDecoder,
        models.RoutingTransformerSeq2SeqLM,
    ],
    "image": [models.RoutingImageTransformer],
}
# Dropout of attention, feed-forward parts, embeddings and tokens by the start of a
# name; of several starts the last one counts.
DROPOUT = {
    "": (0.0, 0.0, 0.0, 0.0),
    "enwik8_local8k": (0.4, 0.4, 0.0, 0.0),
    "enwik8_local12k": (0.4, 0.4, 0.0, 0.0),
    "wikitext103": (0.4, 0.4, 0.4, 0.25),
    "wikitext103_local_cluster1k": (0.4, 0.4, 0.4, 0.2),
    "wikitext103_local_hash1k": (0.4, 0.4, 0.4, 0.2),
    "meena": (0.1, 0.1, 0.0, 0.0),
    "arxiv": (0.1, 0.1, 0.0, 0.0),
    "pubmed": (0.1, 0.1, 0.0, 0.0),
}
RESIDUAL_DROPOUT = {
    "": 0.1,
    **dict.fromkeys(("translate", "mnist", "cifar10", "imagenet"), 0.3),
    "sparse_imagetransformer": 0.0,
}


def of_start(table, name):
    return [value for start, value in table.items() if name.startswith(start)][-1]


def test_names():
    assert models.preset_names() == [*OWN, *PAPER, *RELEASE_SETS]
    for name in models.preset_names():
        assert models.preset_description(name).endswith(".")


@pytest.mark.parametrize("kind", CLASSES)
def test_names_of_a_kind(kind):
    names = [
        name
        for name in models.preset_names()
        if models.preset_hyperparameters(name).kind == kind
    ]
    assert sorted(models.preset_names(kind)) == sorted(names)
    for cls in CLASSES[kind]:
        assert cls.presets == {
            name: {"metadata": {"description": models.preset_description(name)}}
            for name in models.preset_names(kind)
        }


@pytest.mark.parametrize("name", RELEASE_SETS)
def test_training_of_the_release(name):
    h = models.preset_hyperparameters(name)
    dropout = (
        h.attention_dropout,
        h.feed_forward_dropout,
        h.embedding_dropout,
        h.token_dropout,
    )
    assert dropout == of_start(DROPOUT, name)
    assert h.residual_dropout == of_start(RESIDUAL_DROPOUT, name)
    assert h.input_dropout == (0.1 if name.startswith("pubmed") else 0.0)
    assert h.weight_decay == (2e-5 if name.startswith("wikitext103") else 0.0)
    length = h.max_input_length if h.kind == "seq2seq" else h.max_sequence_length
    translates = name.startswith("translate")
    assert h.batch_tokens == (8192 if translates else length)
    if translates:
        assert (h.optimizer, h.learning_rate, h.warmup_steps) == ("adam", 0.1, 4000)
        assert h.learning_rate_schedule == "noam"
        assert (h.adam_beta_1, h.adam_beta_2, h.adam_epsilon) == (0.9, 0.98, 1e-9)
    else:
        assert h.optimizer == "adafactor"
        assert (h.learning_rate, h.warmup_steps) == (0.01, 10000)
        assert h.learning_rate_schedule == "constant*rsqrt_normalized_decay"


@pytest.mark.parametrize("name", RELEASE_SETS)
def test_what_sets_of_the_release_share(name):
    h = models.preset_hyperparameters(name)
    assert h.norm_position == "post"
    assert h.ema
    assert not h.timing_signal and not h.scale_embeddings and not h.relative_key_stddev
    assert (h.centroid_decay, h.commitment_weight) == (0.999, 1e-4)
    assert (h.initializer_gain, h.gradient_clip_norm) == (0.2, 0.0)
    assert h.shared_head_projection and h.project_shared_keys
    assert h.encoder_inputs == "tokens" and h.memory_block_length is None
    assert h.num_classes is None and h.channel_vocabulary_size is None
    # It registers 16 clusters for no routed heads.
    assert h.share_query_key == (name != "translate_local8k")
    assert h.local_flange_blocks == (0 if name.endswith("_full") else 1)


@pytest.mark.parametrize("name", RELEASE_SETS)
def test_flaws_of_the_release_come_only_on_request(name):
    hparams = RELEASE_SETS[name][1]
    sound = models.preset_hyperparameters(name)
    assert sound.compatibility is None
    assert sound.truncate_length is None
    flawed = conversion.hyperparameters_from_release(hparams, faithful=True)
    image = sound.kind == "image"
    assert flawed.compatibility == ("exact_shared_padding" if image else "exact")
    asked_for = {"compatibility": None}
    if image:
        assert flawed.channel_vocabulary_size == 256
        asked_for |= {"channel_vocabulary_size": None}
    else:
        assert flawed.truncate_length == hparams["max_target_length"]
        asked_for |= {"truncate_length": None}
    if sound.kind == "seq2seq":
        assert flawed.encoder_inputs == "embeddings"
        assert (flawed.memory_block_length,) == sound.local_block_shape
        assert flawed.memory_flange_blocks == 1
        asked_for |= {
            "encoder_inputs": "tokens",
            "memory_block_length": None,
            "memory_flange_blocks": None,
        }
    assert sound == flawed.replace(**asked_for)


@pytest.mark.parametrize(
    "hparams",
    [
        {"frame_height": 4, "frame_width": 6, "batch_size": 5},
        {"frame_height": 4, "frame_width": 6, "batch_size": 5, "num_channels": 2},
    ],
)
def test_channels_of_an_image_come_from_elsewhere(hparams):
    h = conversion.hyperparameters_from_release(hparams, num_channels=1, num_classes=7)
    assert (h.image_height, h.image_width, h.num_channels) == (4, 6, 1)
    assert (h.max_sequence_length, h.batch_tokens, h.num_classes) == (24, 5 * 24, 7)
    with_its_own = conversion.hyperparameters_from_release(hparams)
    channels = hparams.get("num_channels", 3)
    assert with_its_own.num_channels == channels
    assert with_its_own.max_sequence_length == 24 * channels


def test_settings_that_are_missing_are_those_of_the_base_sets():
    for hparams, base in (
        ({}, "sparse_transformer_local"),
        ({"frame_height": 32}, "sparse_imagetransformer_base"),
    ):
        settings = conversion.hyperparameters_from_release(hparams)
        assert settings == models.preset_hyperparameters(base)


@pytest.mark.parametrize("faithful", [False, True])
def test_fields_come_before_settings_of_the_release(faithful):
    h = conversion.hyperparameters_from_release({}, faithful, vocabulary_size=300)
    assert h.vocabulary_size == 300


SQUARE = {"query_shape": (8, 8)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query_shape": (4, 4, 3)}, r"`query_shape`.*=\(4, 4, 3\), "),
        ({"query_shape": (), "memory_flange": ()}, r"`query_shape`.*=\(\), "),
        ({"query_shape": (16, 48)}, r"`query_shape`.*=\(16, 48\), "),
        ({**SQUARE, "memory_flange": (8, 16)}, r"`memory_flange`.*=\(8, 16\)"),
        ({**SQUARE, "memory_flange": (8, 12)}, r"`memory_flange`.*=\(8, 12\)"),
        ({"optimizer": "sgd"}, "'sgd'"),
        ({"initializer": "orthogonal"}, "'orthogonal'"),
    ],
)
def test_unsupported_settings_of_images(change, message):
    with pytest.raises(ValueError, match=message):
        conversion.hyperparameters_from_release({"frame_height": 32, **change})


@pytest.mark.parametrize("name", OWN)
def test_own_presets(name):
    h = models.preset_hyperparameters(name)
    assert h.compatibility is None
    assert h.batch_tokens % h.max_sequence_length == 0


@pytest.mark.parametrize(
    "function", [models.preset_hyperparameters, models.preset_description]
)
def test_unknown_names(function):
    with pytest.raises(ValueError, match="Received: 'pg19'.*python_small") as error:
        function("pg19")
    listed = str(error.value).partition("Valid names are: ")[2]
    assert listed.split(", ") == models.preset_names()


@pytest.mark.parametrize("cls", sum(CLASSES.values(), []))
def test_other_names_go_to_keras_hub(cls, monkeypatch):
    calls = []

    def from_preset(cls, preset, load_weights=True, **kwargs):
        calls.append((cls, preset, load_weights, kwargs))
        return "loaded"

    for base in (keras_hub.models.Backbone, keras_hub.models.Task):
        monkeypatch.setattr(base, "from_preset", classmethod(from_preset))
    assert cls.from_preset("some/folder", dtype="bfloat16") == "loaded"
    assert cls.from_preset("pg19", load_weights=False) == "loaded"
    assert calls == [
        (cls, "some/folder", True, {"dtype": "bfloat16"}),
        (cls, "pg19", False, {}),
    ]


@pytest.mark.parametrize("cls", sum(CLASSES.values(), []))
def test_misspelt_names_of_presets_and_of_settings(cls):
    name = next(iter(cls.presets))
    with pytest.raises(ValueError, match=f"`preset`.*preset='{name[:-1]}'.*'{name}'"):
        cls.from_preset(name[:-1])
    with pytest.raises(ValueError, match=r"num_layer\. .*'num_layers'"):
        cls.from_preset(name, num_layer=3)
    other = "digits_small" if "byte_tiny" in cls.presets else "byte_tiny"
    with pytest.raises(ValueError, match=f"`preset`.*preset='{other}'.*`from_preset`"):
        cls.from_preset(other)


@helpers.further_on_jax
def test_presets_of_bytes_take_texts_and_ids():
    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny", num_layers=1)
    lm.compile(sampler="greedy")
    text = lm.generate("import os", max_length=12, stop_token_ids=None)
    assert text.startswith("import os")
    assert lm.generate(b"import os", max_length=12, stop_token_ids=[]) == text
    wrong = {"stop_token_ids": (1, ["1"]), "max_length": (0,)}
    for name, value in ((name, x) for name, values in wrong.items() for x in values):
        with pytest.raises(ValueError, match=re.escape(f"Received: {name}={value}")):
            lm.generate("ab", **{name: value})
    # Texts and what the preprocessor makes of them are one and the same.
    lm.compile(optimizer="sgd", loss=lm.loss, run_eagerly=not ON_JAX)
    texts = lm.evaluate(["abc"] * 4, verbose=0)
    x, y, weights = lm.preprocessor(["abc"] * 4)
    assert x["token_ids"].shape == (4, 64)  # the preset's `max_sequence_length`
    ids = lm.evaluate(x, y, sample_weight=weights, verbose=0)
    np.testing.assert_allclose(ids, texts, rtol=1e-6)
    # Padding is no part of the loss.
    lm(x)
    weights = np.asarray(weights)
    nats = TokenScorer(lm).score(x, y)[weights].mean()
    np.testing.assert_allclose(ids[0], nats + sum(map(float, lm.losses)), rtol=1e-4)
    lm.fit(["abc"] * 4, verbose=0)
    # Ids come and go as ids, with the tokenizer's end id as the only stop.
    ids = {
        "token_ids": np.array([[0, 101, 102, 0, 0, 0]]),
        "padding_mask": np.array([[True] * 3 + [False] * 3]),
    }
    preprocessor = lm.preprocessor
    found = lm.generate(ids)
    assert found["token_ids"].shape == (1, 6)
    assert found["token_ids"][0, :3].tolist() == [0, 101, 102]
    assert lm.preprocessor is preprocessor


def test_presets_of_bytes_with_an_encoder_take_texts():
    lm = models.RoutingTransformerSeq2SeqLM.from_preset(
        "pairs_small", num_layers=1, num_encoder_layers=1, max_input_length=64
    )
    assert lm.preprocessor.encoder_sequence_length == 64
    assert lm.preprocessor.decoder_sequence_length == 256
    lm.compile(sampler="greedy", run_eagerly=not ON_JAX)
    assert isinstance(lm.generate("one", max_length=3), str)


@pytest.mark.parametrize(
    "changes", [{"preprocessor": None}, {"vocabulary_size": 64}], ids=str
)
def test_models_of_ids_say_that_they_take_no_texts(changes):
    lm = models.RoutingTransformerCausalLM.from_preset(
        "byte_tiny", num_layers=1, **changes
    )
    assert lm.preprocessor is None
    message = (
        r"`token_ids`, `padding_mask`.*Received: .*`lm\.preprocessor = .*Preprocessor"
    )
    for call in (
        lambda: lm.generate("import os"),
        lambda: lm.generate(["import os"], stop_token_ids=None),
        lambda: lm.fit(["abc"] * 4),
        lambda: lm.predict(np.array(["abc"] * 4)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_presets_of_subwords_bring_no_preprocessor():
    small = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 8, "key_dim": 2}
    small |= {"value_dim": 2, "embedding_dim": None, "vocabulary_size": 258}
    lm = models.RoutingTransformerCausalLM.from_preset("pg19_local8k", **small)
    assert lm.preprocessor is None


def test_changes_of_a_language_model_from_preset():
    preprocessor = object()
    lm = models.RoutingTransformerCausalLM.from_preset(
        "byte_tiny",
        vocabulary_size=300,
        dtype="mixed_bfloat16",
        preprocessor=preprocessor,
        compile=False,
    )
    assert not lm.compiled
    assert lm.preprocessor is preprocessor
    assert lm.backbone.dtype_policy.name == "mixed_bfloat16"
    assert tuple(lm.output.shape) == (None, None, 300)
    lm = type(lm)(lm.backbone, dtype_policies={"logits": "float32"})
    assert type(lm).from_config(lm.get_config()).output.dtype == "float32"
