"""The checks that keras_hub makes of its own models."""

import importlib.util
import sys
import types
import unittest.mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from routing_tf import models
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import SubwordTokenizer
from routing_tf.tokenizers import WordTokenizer
from tests.models import small_models
from tests.models import small_seq2seq

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
TOKENIZERS = {
    ByteTokenizer: {},
    SubwordTokenizer: {
        "vocabulary": SubwordTokenizer.build_vocabulary(["a cat", "a hat"], 30)
    },
    WordTokenizer: {"vocabulary": WordTokenizer.build_vocabulary(["a cat", "a hat"])},
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
TASKS = {
    models.RoutingTransformerCausalLM: models.RoutingTransformerCausalLMPreprocessor,
    models.RoutingTransformerSeq2SeqLM: models.RoutingTransformerSeq2SeqLMPreprocessor,
}


@pytest.fixture
def checks():
    case = Checks()
    # Compiling takes most of the time.
    tf.config.run_functions_eagerly(True)
    yield case
    tf.config.run_functions_eagerly(False)
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


def task_of(cls):
    return cls(
        cls.backbone_cls(BACKBONES[cls.backbone_cls]), preprocessor_of(TASKS[cls])
    )


def preprocessor_of(cls):
    return cls(ByteTokenizer(), **PREPROCESSORS[cls])


@pytest.mark.parametrize("cls", BACKBONES)
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
        models.RoutingTransformerCausalLM,
        pytest.param(models.RoutingTransformerSeq2SeqLM, marks=pytest.mark.slow),
    ],
)
def test_tasks(cls, checks):
    checks.run_task_test(
        cls,
        {
            "backbone": cls.backbone_cls(BACKBONES[cls.backbone_cls]),
            "preprocessor": preprocessor_of(TASKS[cls]),
        },
        train_data=(TEXTS[TASKS[cls]],),
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


@pytest.mark.parametrize("cls", TOKENIZERS)
def test_tokenizers(cls, checks):
    checks.run_preprocessing_layer_test(
        cls, TOKENIZERS[cls], input_data=["a cat", "a hat"]
    )


@pytest.mark.parametrize("cls", TASKS)
def test_generation_stops_early_if_the_model_says_so(cls):
    lm = task_of(cls)
    call_with_cache = lm.call_with_cache

    def ends(*args, **kwargs):
        logits, hidden, cache = call_with_cache(*args, **kwargs)
        return logits + 1e9 * keras.ops.one_hot(1, 258), hidden, cache

    lm.compile(sampler="greedy", run_eagerly=True)
    with unittest.mock.patch.object(lm, "call_with_cache", wraps=ends):
        prompts = TEXTS[TASKS[cls]]
        texts = prompts["decoder_text"] if isinstance(prompts, dict) else prompts
        assert lm.generate(prompts) == texts
