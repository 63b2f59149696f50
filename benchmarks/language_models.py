"""Contenders that are whole language models of this package."""

import keras
import numpy as np
from keras import ops

from routing_tf import training
from routing_tf.models import build
from routing_tf.models.compiled import compiled
from routing_tf.models.hyperparameters import Hyperparameters
from routing_tf.models.presets import preset_hyperparameters
from routing_tf.training import engines
from routing_tf.training.engines.step import TrainingStep

ROUTINGS = {
    "expert choice": "expert_choice",
    "token choice": "token_choice",
    "dense": "full",
}
REMAT_ATTENTION = {
    "attention weights": "weights",
    "attention": True,
    "attention and feed-forward": True,
}


def train_step(
    sizes,
    length,
    pattern,
    relative,
    remat,
    dtype,
    xla,
    implementation="plain",
    exploring_queries=0,
):
    """Returns a function that takes one training step, as `routing_tf.train` does.

    Args:
        sizes: see `benchmarks.contenders.SIZES`.
        length: number of tokens.
        pattern: `"expert choice"`, `"token choice"` or `"dense"`.
        relative: whether positions are relative, in all heads; else sinusoids.
        remat: what is computed again for the gradients: `"blocks"`, `"attention"`,
            `"attention and feed-forward"`, `"attention weights"`, or None for nothing.
        dtype: `"float32"` or `"bfloat16"`.
        xla: whether XLA compiles it on TensorFlow.
        implementation: `attention_implementation` of all heads.
        exploring_queries: number of exploring queries of each routed head.
    """
    settings = hyperparameters(sizes, length, pattern, relative, remat).replace(
        attention_implementation=implementation, exploring_queries=exploring_queries
    )
    return _step(settings, dtype, xla)


def preset_step(name, changes, dtype, xla):
    """Returns a function that takes one training step of a preset of texts.

    Args:
        name: of the preset.
        changes: dict of hyperparameters that are not the preset's.
        dtype: `"float32"` or `"bfloat16"`.
        xla: whether XLA compiles it on TensorFlow.
    """
    return _step(preset_hyperparameters(name).replace(**changes), dtype, xla)


def _step(settings, dtype, xla):
    engine = engines.make()
    keras.utils.set_random_seed(0)
    lm = build.make_model(settings, precision=dtype)
    training.compile_for_training(lm, jit_compile=xla)
    step = TrainingStep(lm, lm.optimizer, settings.gradient_clip_norm)
    train = engine.compile(step, jit_compile=xla)
    length = settings.max_sequence_length
    shape = max(1, settings.batch_tokens // length), length
    tokens = _tokens(settings.vocabulary_size, (shape[0], length + 1))
    inputs = {"token_ids": tokens[:, :-1], "padding_mask": np.ones(shape, "bool")}
    batch = (inputs, tokens[:, 1:], np.ones(shape, "float32"))
    return lambda: train([batch], 0)


def decode(sizes, length, pattern, relative, num_tokens, dtype, xla):
    """Returns a function that decodes the last tokens of a context, with caches.

    The most likely token follows each, in one compiled loop, as `generate` does it.

    Args:
        sizes: see `benchmarks.contenders.SIZES`.
        length: tokens that the caches are made for.
        pattern: `"token choice"` or `"dense"`.
        relative: whether positions are relative, in all heads; else sinusoids.
        num_tokens: number of tokens to decode.
        dtype: `"float32"` or `"bfloat16"`.
        xla: whether XLA compiles it on TensorFlow.
    """
    lm = _compiled_model(sizes, length, pattern, relative, dtype, xla)

    def step(index, token, cache):
        logits, _, cache = lm.call_with_cache(token, cache, index)
        return index + 1, ops.cast(ops.argmax(logits, axis=-1), "int32"), cache

    def loop(index, token, cache):
        state = (index, token, cache)
        return ops.while_loop(lambda index, *_: index < length, step, state)[1]

    function = compiled(lm, loop)
    cache = lm.make_cache(1, length)
    start = (
        np.int32(length - num_tokens),
        _tokens(sizes["vocabulary_size"], (1, 1)),
        cache,
    )
    return lambda: ops.convert_to_numpy(function(*start))


def recompute(sizes, length, pattern, relative, dtype, xla):
    """Returns a function that finds the next token from the whole prefix."""
    lm = _compiled_model(sizes, length, pattern, relative, dtype, xla)

    def next_token(token_ids):
        hidden = lm.backbone.decode(token_ids, ops.ones_like(token_ids, dtype="bool"))
        return ops.argmax(lm.logits_of(hidden[:, -1]), axis=-1)

    function = compiled(lm, next_token)
    tokens = _tokens(sizes["vocabulary_size"], (1, length))
    return lambda: ops.convert_to_numpy(function(tokens))


def smollm2(heads, length, dtype, xla):
    """Returns a function that calls SmolLM2-135M on all tokens of a text.

    Args:
        heads: `"full attention"`, or `"multipole"` for those of `benchmarks.retrofit`
            with 260 keys and random centroids.
        length: number of tokens.
        dtype: `"float32"` or `"bfloat16"`.
        xla: whether XLA compiles it on TensorFlow.
    """
    # They need packages of their own.
    from benchmarks.retrofit import contenders
    from benchmarks.retrofit import smollm2 as model

    lm = model.load(dtype=dtype)
    tokens = _tokens(49152, (1, length))
    if heads == "multipole":
        random = contenders.CONTENDERS["multipole with random centroids"]
        random.put_into(lm, 260, tokens[:, :128])
    lm.compile(jit_compile=xla)

    def last(token_ids):
        mask = ops.ones_like(token_ids)
        hidden = lm.backbone({"token_ids": token_ids, "padding_mask": mask})
        return hidden[:, -1]

    function = compiled(lm, last)
    return lambda: ops.convert_to_numpy(function(tokens))


def hyperparameters(sizes, length, pattern, relative, remat=None):
    """Returns the settings of a model; a dense one has full heads alone."""
    num_local = 0 if pattern == "dense" else sizes["num_heads"] // 2
    window = sizes["window"]
    return Hyperparameters(
        vocabulary_size=sizes["vocabulary_size"],
        max_sequence_length=length,
        num_layers=sizes["num_layers"],
        hidden_dim=sizes["hidden_dim"],
        intermediate_dim=sizes["intermediate_dim"],
        feed_forward="relu",
        num_local_heads=num_local,
        local_block_length=window,
        num_routed_heads=sizes["num_heads"] - num_local,
        num_clusters=max(1, length // window),
        attention_window=window,
        routing=ROUTINGS[pattern],
        local_relative_positions=relative,
        routed_relative_positions=relative,
        max_relative_position=window - 1,
        timing_signal=not relative,
        batch_tokens=length,
        remat=remat == "blocks",
        remat_attention=REMAT_ATTENTION.get(remat, False),
        remat_feed_forward=remat == "attention and feed-forward",
        optimizer="adam",
    )


def _compiled_model(sizes, length, pattern, relative, dtype, xla):
    keras.utils.set_random_seed(0)
    settings = hyperparameters(sizes, length, pattern, relative)
    # One model at all contexts.
    settings = settings.replace(num_clusters=sizes["decoding_clusters"])
    lm = build.make_model(settings, precision=dtype)
    lm.compile(jit_compile=xla)
    return lm


def _tokens(vocabulary_size, shape):
    generator = np.random.default_rng(0)
    return generator.integers(vocabulary_size, size=shape, dtype="int32")
