"""Preprocessors of presets, and the ids that models take without them."""

import keras
import numpy as np
import tensorflow as tf

from routing_tf.models.presets import preset_hyperparameters
from routing_tf.models.steps import longest_input
from routing_tf.tokenizers import ByteTokenizer


def sequence_lengths(hyperparameters):
    """Returns the lengths of a preprocessor's sequences, the longest of the model."""
    length = longest_input(hyperparameters)
    if hyperparameters.kind == "seq2seq":
        return {
            "encoder_sequence_length": hyperparameters.max_input_length,
            "decoder_sequence_length": length,
        }
    return {"sequence_length": length}


def byte_preprocessor(cls, preset, hyperparameters):
    """Returns the preprocessor of a preset of bytes, which needs no vocabulary file.

    It is None if the model, by its hyperparameters, is not one of bytes.
    """
    tokenizer = ByteTokenizer()
    sizes = {
        preset_hyperparameters(preset).vocabulary_size,
        hyperparameters.vocabulary_size,
    }
    reads_texts = hyperparameters.encoder_inputs == "tokens"
    if sizes != {tokenizer.vocabulary_size()} or not reads_texts:
        return None
    return cls.preprocessor_cls(tokenizer, **sequence_lengths(hyperparameters))


def check_tokenizer(tokenizer):
    """Refuses a tokenizer of sequences of one length, which cuts texts and pads them.

    Nothing would tell its padding from tokens.
    """
    length = getattr(tokenizer, "sequence_length", None)
    if length is not None:
        raise ValueError(
            "`tokenizer` must leave texts as long as they are. Received: "
            f"{type(tokenizer).__name__}(sequence_length={length}). Leave "
            "`sequence_length` of the tokenizer out, and pass that of the preprocessor"
        )


def without_last(inputs, prefix, name, length):
    """Returns ids and mask of texts without their last place, which must be padding.

    They were packed into `length` + 1 places, so that a text which would be cut shows.
    `prefix` is that of their names among the inputs; `name` is that of `length`.
    """
    kept = {key: inputs[f"{prefix}{key}"] for key in ("token_ids", "padding_mask")}
    message = (
        "Texts are not cut, so each must fit into the sequences of the model. "
        f"Received: one with more than {length} tokens, start and end included, and "
        f"{name}={length}. Pass a larger `{name}`, where the model has room, or a "
        "shorter text"
    )
    last = kept["padding_mask"][..., -1]
    if tf.executing_eagerly():
        if np.any(keras.ops.convert_to_numpy(last)):
            raise ValueError(message)
        checks = []
    else:  # in a pipeline of `tf.data`
        checks = [tf.debugging.assert_equal(last, False, message)]
    with tf.control_dependencies(checks):
        return {f"{prefix}{key}": x[..., :length] for key, x in kept.items()}


def takes(lm, samples):
    """Returns whether samples are a dict, as a call of a model takes."""
    return isinstance(samples, dict) and set(lm.backbone.input) <= set(samples)


def holds_nothing(lm, prompts):
    """Returns whether prompts contain no text, or no batch if they are `tf.data`."""
    if hasattr(prompts, "element_spec"):
        # Its number of batches is not always known.
        return next(iter(prompts.take(1)), None) is None
    shapes = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(prompts)]
    return not takes(lm, prompts) and all(x is not None and 0 in x[:1] for x in shapes)


def has_texts(samples):
    """Returns whether there are texts among samples."""
    return any(map(_is_text, keras.tree.flatten(samples)))


def refuse(lm, samples):
    """Refuses texts for a model without a preprocessor, which takes a dict of ids."""
    names = ", ".join(f"`{name}`" for name in lm.backbone.input)
    received = sorted(samples) if isinstance(samples, dict) else type(samples).__name__
    raise ValueError(
        f"A model without a preprocessor takes a dict of {names}. Received: "
        f"{received}. For texts, attach one with the tokenizer of the model, such as "
        f"`lm.preprocessor = models.{lm.preprocessor_cls.__name__}("
        "tokenizers.ByteTokenizer())` for bytes"
    )


def _is_text(leaf):
    if isinstance(leaf, (str, bytes)):
        return True
    dtype = getattr(leaf, "dtype", "")
    # NumPy's strings are "<U3" or "S3", and its arrays of Python strings "object".
    return any(kind in str(dtype) for kind in ("string", "object", "U", "S"))
