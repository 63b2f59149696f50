"""Models of keras_hub with two layers and random weights, by family."""

import keras
import keras_hub
import numpy as np
import pytest

ON_JAX = keras.backend.backend() == "jax"
#: Marks of tests of what does not depend on the backend: JAX compiles for long.
NOT_ON_JAX = [pytest.mark.slow] if ON_JAX else []

VOCABULARY, LENGTH, NUM_HEADS = 40, 24, 4
IDS = np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH))
REAL = np.arange(LENGTH) < np.array([[LENGTH], [15]])
INPUTS = {"token_ids": IDS, "padding_mask": REAL.astype("int32")}

COMMON = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "hidden_dim": 16,
    "intermediate_dim": 24,
    "dropout": 0.0,
}
GROUPED = {**COMMON, "num_query_heads": NUM_HEADS, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 2, "top_k": 1}
GEMMA = {**GROUPED, "head_dim": 6, "layer_norm_epsilon": 1e-6}

#: Arguments of the backbones.
FAMILIES = {
    "Llama": GROUPED,
    "Llama3": {
        **GROUPED,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_frequency_adjustment_factor": 8.0,
        "rope_pretraining_sequence_length": 16,
    },
    "Mistral": {**GROUPED, "sliding_window": 30},
    "Mixtral": {**GROUPED, **EXPERTS, "sliding_window": 30},
    "Phi3": {
        **GROUPED,
        "rope_scaling_type": "su",
        "rope_scaling_short_factor": [1.0, 1.1],
        "rope_scaling_long_factor": [2.0, 3.0],
        "pretraining_sequence_length": 20,
        "max_sequence_length": 80,
    },
    "Qwen": GROUPED,
    "Qwen3": {**GROUPED, "head_dim": 6},
    "QwenMoe": {
        **GROUPED,
        **EXPERTS,
        "moe_intermediate_dim": 8,
        "shared_expert_intermediate_dim": 8,
    },
    "Qwen3Moe": {
        **GROUPED,
        **EXPERTS,
        "head_dim": 6,
        "moe_intermediate_dim": 8,
    },
    "GPTNeoX": {**COMMON, "num_heads": NUM_HEADS, "rotary_percentage": 0.5},
    "Gemma": GEMMA,
    "Gemma2": {
        **GEMMA,
        "attention_logit_soft_cap": 2.0,
        "use_sliding_window_attention": True,
        "sliding_window_size": 4,
        "query_head_dim_normalize": False,
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
    },
    "Gemma3": {
        **GEMMA,
        "num_layers": 6,
        "image_size": 16,
        "vision_encoder": None,
        "use_sliding_window_attention": True,
        "sliding_window_size": 4,
        "use_query_key_norm": True,
    },
    "GptOss": {**GROUPED, **EXPERTS, "head_dim": 6, "sliding_window": 4},
    "GPT2": {**COMMON, "num_heads": NUM_HEADS, "max_sequence_length": 32},
    "OPT": {**COMMON, "num_heads": NUM_HEADS, "max_sequence_length": 32},
}
#: Names of classes where they are not those of the family.
CLASSES = {"Gemma2": "Gemma"}


def backbone(family, **options):
    """Returns a backbone with random weights, biases and scales included."""
    name = CLASSES.get(family, family)
    made = getattr(keras_hub.models, f"{name}Backbone")
    arguments = {**FAMILIES[family], **options}
    made = made(**arguments)
    random = np.random.default_rng(1)
    for weight in made.weights:
        old = keras.ops.convert_to_numpy(weight)
        weight.assign(old + random.normal(0.0, 0.2, old.shape))
    return made


def causal_lm(family, **options):
    """Returns a `CausalLM`."""
    name = CLASSES.get(family, family)
    cls = getattr(keras_hub.models, f"{name}CausalLM")
    return cls(backbone=backbone(family, **options), preprocessor=None)


def outputs(model, inputs=None):
    """Returns the outputs of a model, at real tokens."""
    inputs = INPUTS if inputs is None else inputs
    return of_padding_too(model, inputs)[np.asarray(inputs["padding_mask"]) > 0]


def of_padding_too(model, inputs):
    """Returns the outputs of a model, in the way that is cheapest."""
    if ON_JAX:
        return model.predict_on_batch(inputs)
    return keras.ops.convert_to_numpy(model(inputs, training=False))
