"""The checks that keras_hub makes of its own models."""

import importlib.util
import sys
import types
import unittest.mock

import keras
import numpy as np
import pytest

from routing_tf import models
from routing_tf.tokenizers import ByteTokenizer
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.models import small_models
from tests.models import small_seq2seq
from tests.models.small_models import FURTHER

# The module of the checks imports grain, which nothing else here needs.
if importlib.util.find_spec("grain") is None:
    sys.modules["grain"] = types.ModuleType("grain")
    from keras_hub.src.tests import test_case

    del sys.modules["grain"]
else:
    from keras_hub.src.tests import test_case


class Checks(test_case.TestCase):
    """keras_hub's checks, but for those that need grain."""

    __test__ = False  # no tests of its own

    def run_grain_preprocessing_test(self, layer, input_data, expected_output):
        pass


# Much is called there without being compiled.
SLOW_ON_JAX = [pytest.mark.slow] if small_models.ON_JAX else []
LENGTH = 8
TINY = {
    "vocabulary_size": 258,
    "num_layers": 1,
    "max_sequence_length": LENGTH,
    "local_block_length": 4,
    "routing": "token_choice",
    "commitment_weight": 0.0,
}
IMAGE = {
    "image_height": 2,
    "image_width": 2,
    "vocabulary_size": 5,
    "max_sequence_length": 4,
}
BACKBONES = {
    models.RoutingTransformer: small_models.hyperparameters(**TINY),
    models.RoutingTransformerEncoderDecoder: small_seq2seq.hyperparameters(
        **TINY, **small_seq2seq.LOCAL, max_input_length=LENGTH
    ),
    models.RoutingImageTransformer: small_models.hyperparameters(**{**TINY, **IMAGE}),
}
PREPROCESSORS = {
    models.RoutingTransformerCausalLMPreprocessor: {"sequence_length": LENGTH},
    models.RoutingTransformerSeq2SeqLMPreprocessor: {
        "encoder_sequence_length": LENGTH,
        "decoder_sequence_length": LENGTH,
    },
}
TEXTS = {
    models.RoutingTransformerCausalLMPreprocessor: ["a cat", "a hat"],
    models.RoutingTransformerSeq2SeqLMPreprocessor: {
        "encoder_text": ["a cat", "a hat"],
        "decoder_text": ["cat", "hat"],
    },
}
TASKS = models.RoutingTransformerCausalLM, models.RoutingTransformerSeq2SeqLM


@pytest.fixture
def checks():
    case = Checks()
    yield case
    case.doCleanups()


def inputs_of(cls):
    if cls is models.RoutingImageTransformer:
        shape = (2, 2, 2, 1)
        return {"images": np.ones(shape, "int32"), "padding_mask": np.ones(shape, bool)}
    prefixes = [""] if cls is models.RoutingTransformer else ["encoder_", "decoder_"]
    shape = (2, LENGTH)
    return {
        f"{prefix}{name}": np.ones(shape, dtype)
        for prefix in prefixes
        for name, dtype in (("token_ids", "int32"), ("padding_mask", bool))
    }


def parts_of(cls):
    """Returns the arguments of a task."""
    preprocessor_cls = cls.preprocessor_cls
    return {
        "backbone": cls.backbone_cls(BACKBONES[cls.backbone_cls]),
        "preprocessor": preprocessor_cls(
            ByteTokenizer(), **PREPROCESSORS[preprocessor_cls]
        ),
    }


@pytest.mark.parametrize(
    "cls",
    [
        pytest.param(models.RoutingTransformer, marks=SLOW_ON_JAX),
        pytest.param(models.RoutingTransformerEncoderDecoder, marks=FURTHER),
        pytest.param(models.RoutingImageTransformer, marks=pytest.mark.thorough),
    ],
)
def test_backbones(cls, checks):
    expected = (2, LENGTH, 16)
    if cls is models.RoutingImageTransformer:
        expected = (2, 2, 2, 1, 5)
    else:
        backbone = cls(BACKBONES[cls])
        assert backbone.token_embedding is backbone.get_layer("token_embedding")
    checks.run_backbone_test(
        cls,
        {"hyperparameters": BACKBONES[cls]},
        inputs_of(cls),
        expected_output_shape=expected,
        # Centroids and what they are scored with stay float32.
        run_mixed_precision_check=False,
    )


@pytest.mark.parametrize(
    "cls",
    [
        pytest.param(models.RoutingTransformerCausalLM, marks=FURTHER),
        pytest.param(models.RoutingTransformerSeq2SeqLM, marks=pytest.mark.slow),
    ],
)
def test_tasks(cls, checks):
    checks.run_task_test(
        cls,
        parts_of(cls),
        train_data=(TEXTS[cls.preprocessor_cls],),
        expected_output_shape=(2, LENGTH, 258),
    )


@pytest.mark.parametrize("cls", PREPROCESSORS)
def test_preprocessors(cls, checks):
    arguments = {"tokenizer": ByteTokenizer(), **PREPROCESSORS[cls]}
    checks.run_preprocessing_layer_test(cls, arguments, TEXTS[cls])
    # The rest of `run_preprocessor_test`.
    preprocessor = cls(**arguments)
    for length in (LENGTH, 17):
        preprocessor.sequence_length = length
        x, y, _ = preprocessor(TEXTS[cls])
        ids = x.get("token_ids", x.get("decoder_token_ids"))
        assert tuple(ids.shape) == tuple(y.shape) == (2, length)


@helpers.further_on_jax
@pytest.mark.parametrize("cls", kinds.some(TASKS, TASKS[:1]))
def test_generation_stops_early_if_the_model_says_so(cls):
    lm = cls(**parts_of(cls))
    call_with_cache = lm.call_with_cache

    def ends(*args, **kwargs):
        logits, hidden, cache = call_with_cache(*args, **kwargs)
        return logits + 1e9 * keras.ops.one_hot(1, 258), hidden, cache

    lm.compile(sampler="greedy", run_eagerly=True)
    with unittest.mock.patch.object(lm, "call_with_cache", wraps=ends):
        prompts = TEXTS[cls.preprocessor_cls]
        texts = prompts["decoder_text"] if isinstance(prompts, dict) else prompts
        assert lm.generate(prompts) == texts


def language_model(**changes):
    """Returns a model of local heads, whose calls are cheap."""
    return small_models.language_model(**{**TINY, **small_seq2seq.LOCAL, **changes})


def values(weights):
    return [small_models.array(weight) for weight in weights]


def assert_same(actual, expected):
    for value, other in zip(values(actual), values(expected), strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize(
    "cls, number",
    list(zip(BACKBONES, [1, 1 + 2, 1])),
    ids=lambda x: getattr(x, "__name__", None),
)
def test_lora_adapts_attention_and_freezes_all_else(cls, number):
    backbone = cls(BACKBONES[cls])
    total = len(backbone.trainable_weights)
    for names in ([], ["query_dense"], ["input", "typo"]):
        with pytest.raises(
            ValueError, match="`target_layer_names`.*'gate'.*target_layer_names="
        ):
            backbone.enable_lora(2, target_layer_names=names)
    assert len(backbone.trainable_weights) == total
    backbone.enable_lora(2)
    parts = [weight.path.split("/")[-2:] for weight in backbone.trainable_weights]
    assert len(parts) == 2 * number
    assert {layer for layer, _ in parts} <= {"attention", "cross_attention"}
    assert {name for _, name in parts} == {"lora_kernel_a", "lora_kernel_b"}
    with pytest.raises(ValueError, match="LoRA.*'routing_"):
        backbone.enable_lora(2)


def test_lora_adapts_feed_forward_layers():
    backbone = models.RoutingTransformer(BACKBONES[models.RoutingTransformer])
    backbone.enable_lora(2, target_layer_names=["input", "gate", "output", "attention"])
    parts = {weight.path.split("/")[-2] for weight in backbone.trainable_weights}
    assert parts == {"input", "gate", "output", "attention"}


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=FURTHER)])
def test_what_lora_learns_is_saved(remat, tmp_path):
    lm = language_model(remat=remat)
    fixed = lm.variables
    before = values(fixed)
    lm.backbone.enable_lora(2)
    lm.logits_dense.trainable = False
    adapters = lm.trainable_weights
    initial = values(adapters)
    lm.compile(optimizer=keras.optimizers.SGD(1.0), run_eagerly=not small_models.ON_JAX)
    x = small_models.inputs((LENGTH, LENGTH), LENGTH)
    lm.fit(x, np.roll(x["token_ids"], -1, axis=1), verbose=0)
    assert_same(fixed, before)
    assert any(np.any(new != old) for new, old in zip(values(adapters), initial))

    path = tmp_path / "tuned.lora.h5"
    lm.backbone.save_lora_weights(path)
    copy = language_model(remat=remat)
    copy.backbone.load_lora_weights(path)
    copy.logits_dense.trainable = False
    assert_same(copy.trainable_weights, adapters)

    attention = lm.backbone.blocks[0].attention
    kernels = [attention.adapted("query"), attention.adapted("value")]
    for loaded in small_models.saved(lm, tmp_path):
        assert len(loaded.variables) == len(fixed)
        attention = loaded.backbone.blocks[0].attention
        assert_same([attention.query_kernel, attention.value_kernel], kernels)


@pytest.mark.usefixtures("compiled")
def test_what_is_compiled_follows_adapters():
    lm = language_model()
    generate = lm.make_generate_function()
    assert lm.make_generate_function() is generate
    ids = [[5, 6, 7, 8]]
    before = lm.score(ids)[0].log_likelihoods
    lm.backbone.enable_lora(2)
    assert lm.make_generate_function() is not generate
    small_models.randomize(lm, seed=1)
    after = lm.score(ids)[0].log_likelihoods
    assert np.abs(after - before).max() > 0.01
    losses = lm.score(
        token_ids=[[0, *ids[0][:-1]]], scoring_mode="loss", target_ids=ids
    )
    np.testing.assert_allclose(-small_models.array(losses)[0], after, rtol=1e-5)


@FURTHER
def test_quantized_models_load(tmp_path):
    lm = language_model(embedding_dim=6)
    lm.quantize("int8")
    for loaded in small_models.saved(lm, tmp_path):
        assert_same(loaded.weights, lm.weights)
        for layer in (loaded.output_projection, loaded.logits_dense):
            assert layer.quantization_mode == "int8"
        assert loaded.get_config() == lm.get_config()


def test_positions_are_scored_as_in_keras_hub():
    lm = language_model(num_layers=2)
    x = small_models.inputs((LENGTH, 5), LENGTH)
    expected, _ = golden_cases.run(lm, x)
    seen = {}

    def intercept(hidden, index):
        seen[index] = hidden
        return hidden * 0.0 if index == 1 else hidden

    logits = lm.score(**x, scoring_mode="logits")
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    by_place = lm.score(x["token_ids"], padding_mask=x["padding_mask"])
    np.testing.assert_array_equal(by_place, logits)
    by_mode = lm.score(x["token_ids"], None, scoring_mode="logits")
    everywhere = lm.score(x["token_ids"], padding_mask=np.ones((2, LENGTH), "bool"))
    np.testing.assert_array_equal(by_mode, everywhere)
    alone = lm.score(token_ids=x["token_ids"][1:, :5])
    np.testing.assert_allclose(alone[0], expected[1, :5], rtol=1e-4, atol=1e-5)
    targets = np.roll(x["token_ids"], -1, axis=1)
    losses = lm.score(**x, scoring_mode="loss", target_ids=targets)
    by_position = lm.score(*x.values(), "loss", target_ids=targets)
    np.testing.assert_array_equal(*map(small_models.array, (by_position, losses)))
    likelihoods = keras.ops.log_softmax(expected)
    by_hand = -np.take_along_axis(
        small_models.array(likelihoods), targets[..., None], axis=-1
    )
    np.testing.assert_allclose(losses, by_hand[..., 0], rtol=1e-4)
    logits = lm.score(**x, layer_intercept_fn=intercept)
    np.testing.assert_array_equal(
        small_models.array(seen[-1]),
        small_models.array(lm.backbone.token_embedding(x["token_ids"])),
    )
    assert list(seen) == [-1, 0, 1]
    assert np.ptp(small_models.array(logits), axis=1).max() == 0
