"""Small models to look into, and windows for them.

Models and probes are made once and shared: most of the time goes into compiling.
"""

import functools

import numpy as np

from routing_tf import models
from routing_tf.analysis import Probe
from tests import golden_cases
from tests.models import small_models

LENGTH = small_models.LENGTH
# Without relative positions outputs are products of maps and values; three clusters of
# four tokens leave some of 24 out.
SETTINGS = {
    "attention_window": 4,
    "local_relative_positions": False,
    "routed_relative_positions": False,
}
# Blocks of 2 x 4 sub-pixels in 4 x 8.
IMAGES = {
    "vocabulary_size": 7,
    "max_sequence_length": 32,
    "image_height": 4,
    "image_width": 8,
    "local_block_length": 2,
    "local_block_width": 4,
    "local_relative_positions": False,
}


def windows(number=1, seed=0):
    """Returns windows of random ids after an id 0, without padding."""
    inputs = small_models.inputs((LENGTH,) * number, seed=seed)
    inputs["token_ids"][:, 0] = 0
    return inputs


@functools.cache
def language_model(**changes):
    return small_models.language_model(**{**SETTINGS, **changes})


@functools.cache
def image_model(**changes):
    settings = small_models.hyperparameters(**{**IMAGES, **changes})
    model = models.RoutingImageTransformer(settings)
    small_models.randomize(model, seed=0)
    return model


@functools.cache
def probe(lm, routing_scope="full"):
    return Probe(lm, routing_scope)


def looked_into(lm, routing_scope="full"):
    """Yields each block with the state before it and the attention in it."""
    found, inputs = probe(lm, routing_scope), windows()
    states = found.hidden_states(inputs)[:-1]
    yield from zip(found.blocks, states, found.attention(inputs), strict=True)


def images(number=1, seed=0):
    generator = np.random.default_rng(seed)
    shape = (number, 4, 8, 1)
    return {
        "images": generator.integers(0, 7, shape).astype("int32"),
        "padding_mask": np.ones(shape, "bool"),
    }


def split_heads(x, size):
    """From `[B, L, H * size]` to `[B, H, L, size]`."""
    x = x.reshape(*x.shape[:2], -1, size)
    return np.swapaxes(x, 1, 2)


def attention_maps(block, state):
    """Returns the input of a block's attention, and the maps of all its heads."""
    x, _ = golden_cases.run(block.attention_input, state)
    (_, maps), _ = golden_cases.run(
        block.attention, x, use_causal_mask=True, return_attention_scores=True
    )
    return x, maps


def group_outputs(block, state):
    """Outputs of each head group from maps and values; no relative positions."""
    attention = block.attention
    x, maps = attention_maps(block, state)
    values = x @ small_models.array(attention.value_kernel)
    heads = maps @ split_heads(values, attention.key_dim)
    outputs, start = {}, 0
    for group in attention.head_groups:
        part = np.swapaxes(heads[:, start : start + group.num_heads], 1, 2)
        outputs[group.name] = part.reshape(*part.shape[:2], -1)
        start += group.num_heads
    return outputs
