"""Tests of what XLA compiles: full structures of presets, in tiny widths."""

import re

import keras
import numpy as np
import pytest

from routing_tf import models
from routing_tf import training
from routing_tf.models import build
from routing_tf.training import engines
from routing_tf.training.engines.step import TrainingStep

TEXT = {
    "vocabulary_size": 32,
    "max_sequence_length": 64,
    "local_block_length": 8,
    "num_clusters": 4,
    "attention_window": 16,
}
# What is left of a preset: heads, blocks, kinds of layers and its training. Lengths,
# windows and clusters shrink alike, layers to one of each kind.
PRESETS = {
    "wikitext103_local_cluster4k": {**TEXT, "num_layers": 1},
    "pubmed_local_cluster10k": {
        **TEXT,
        "max_input_length": 128,
        "num_encoder_layers": 1,
        "num_layers": 2,
        "num_local_only_layers": 1,
    },
    "imagenet_local_cluster": {
        "image_height": 4,
        "image_width": 4,
        "vocabulary_size": 256,
        "max_sequence_length": 48,
        "batch_tokens": 48,
        "num_layers": 1,
        "local_block_length": 8,
        "num_clusters": 2,
        "attention_window": 12,
    },
    "python_small": {**TEXT, "num_layers": 1},
}
# Others compute in float32.
SHORT_FLOATS = {"wikitext103_local_cluster4k": ("bfloat16", "bf16")}
QUICK = "python_small"
CASES = [
    pytest.param(
        name, marks=pytest.mark.thorough if name == QUICK else pytest.mark.slow
    )
    for name in PRESETS
]


def hyperparameters(name):
    preset = models.preset_hyperparameters(name)
    size = 2 * preset.num_heads
    narrow = {"hidden_dim": size, "intermediate_dim": 8, "key_dim": 2, "value_dim": 2}
    narrow["embedding_dim"] = preset.embedding_dim and size // 2
    if preset.max_relative_position > 1:
        narrow["max_relative_position"] = 17
    return preset.replace(**narrow, **PRESETS[name])


def zeros(lm, h):
    """A batch of the shapes that the model is trained on."""

    def shape(name, tensor):
        length = h.max_input_length if "encoder" in name else h.max_sequence_length
        return [2, *(size or length for size in tensor.shape[1:])]

    inputs = {
        name: np.zeros(shape(name, tensor), tensor.dtype)
        for name, tensor in lm.input.items()
    }
    targets = np.zeros(shape("", lm.output)[:-1], "int32")
    return inputs, targets, np.ones(targets.shape, "float32")


def lowered(name, **options):
    """The program of the step that one device runs."""
    precision, short = SHORT_FLOATS.get(name, ("float32", ""))
    h = hyperparameters(name)
    engine = engines.make()
    lm = build.make_model(h, precision=precision)
    training.compile_for_training(lm, h)
    step = TrainingStep(lm, lm.optimizer, h.gradient_clip_norm)
    text = engine.lower(step, zeros(lm, h), **options)
    # What else could be amiss would be so in an empty program.
    assert len(lm.trainable_variables) > 10
    assert len(text.splitlines()) > 1000
    assert short in text
    return text


def assert_runs_on_the_device_alone(text):
    """No shape is dynamic, and nothing asks the host."""
    calls = re.findall(r"custom_call_target=\"([^\"]+)|custom_call @(\w+)", text)
    calls = {name for pair in calls for name in pair if name}
    assert not {name for name in calls if re.search("callback|host|python", name, re.I)}
    assert not re.search(r"\b(infeed|outfeed|send|recv|py_func)\b", text)
    assert not re.search(r"[\[,]<=\d|tensor<(\d+x)*\?", text)
    assert not re.search("set_dimension_size|dynamic_reshape|real_dynamic", text)
    # TensorFlow writes down the size of each top_k once more.
    pattern = r"\[([\d,]+)\]\S* set-dimension-size\(.*, s32\[\] (\S+)\), .*={(\d)}"
    found = re.findall(pattern, text)
    assert len(found) == text.count(" set-dimension-size(")
    for shape, name, axis in found:
        size = shape.split(",")[int(axis)]
        assert f"{name} = s32[] constant({size})" in text
    return calls


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_one_program_of_static_shapes(name):
    assert_runs_on_the_device_alone(lowered(name))


@pytest.mark.parametrize("name", CASES)
def test_jax_lowers_a_step_for_a_tpu(name):
    if keras.backend.backend() != "jax":
        pytest.skip("TensorFlow lowers for a TPU on its machine alone")
    calls = assert_runs_on_the_device_alone(lowered(name, platform="tpu"))
    assert calls <= {"Sharding", "TopK", "ApproxTopK", "SPMDFullToShardShape"}
