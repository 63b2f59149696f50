"""Preprocessors of presets, and the ids that models take: of tokens and documents."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from routing_tf.layers.support.masks import check_fit
from routing_tf.models.presets import preset_hyperparameters
from routing_tf.models.steps import longest_input
from routing_tf.tokenizers import ByteTokenizer

OF_TEXT = ("segment_ids",)
# In the order of attention to another sequence: of query, of value.
OF_PAIR = ("decoder_segment_ids", "encoder_segment_ids")
SEGMENT_NAMES = OF_TEXT + OF_PAIR


def known_ids(ids, vocabulary_size, where, mask=None):
    """Returns ids as a NumPy array `<int32>`; refuses those that a model does not have.

    Those of padding, where `mask` is False, become 0; None for no padding. `where` ends
    the message.

    Example:

    ```python
    from routing_tf.models.preprocessing import known_ids

    known_ids([0, 5, 257], vocabulary_size=258, where="the prompt")
    ```
    """
    ids = np.asarray(ops.convert_to_numpy(ids))
    if mask is None:
        mask = np.ones(ids.shape, "bool")
    mask = np.asarray(ops.convert_to_numpy(mask)).astype("bool")
    real, kept = ids[mask], np.zeros(ids.shape, "int32")
    if real.size:
        smallest, largest = real.min(), real.max()
        is_whole = real.dtype.kind in "iu" or (real == np.round(real)).all()
        # NaN is in no range.
        if not is_whole or not 0 <= smallest <= largest < vocabulary_size:
            raise ValueError(
                f"Ids must be integers from 0 to {vocabulary_size - 1}, as the model's "
                f"`vocabulary_size` says. Received: {smallest} to {largest} in {where}"
            )
    kept[mask] = real
    return kept


def without_segment_ids(inputs, names=OF_TEXT):
    """Returns inputs without segment ids, and these ids; None if there are none.

    Args:
        inputs: dict of tensors; other inputs have no such ids.
        names: the names of the ids that the model takes. If it takes several, they come
            together, and the ids are a tuple in this order.

    Raises:
        ValueError: if there are ids of other names or axes, or only one of a pair.
    """
    found = [
        name for name in SEGMENT_NAMES if isinstance(inputs, dict) and name in inputs
    ]
    if not found:
        return inputs, None
    if set(found) != set(names):
        raise ValueError(
            "The segment ids of packed documents must be "
            f"{' and '.join(f'`{name}`' for name in names)}. Received: "
            f"{', '.join(found)}. A model with an encoder takes `decoder_segment_ids` "
            "and `encoder_segment_ids`, another one `segment_ids`"
        )
    others = {name: x for name, x in inputs.items() if name not in names}
    ids = tuple(_checked(name, inputs[name]) for name in names)
    return others, ids if len(ids) > 1 else ids[0]


class ChecksSegmentIds:
    """The part of a model that checks ids before Keras converts them."""

    def __call__(self, inputs, *args, **kwargs):
        given = [kwargs.get("segment_ids")]
        if isinstance(inputs, dict):
            given += [inputs.get(name) for name in SEGMENT_NAMES]
        check_fit(given)
        return super().__call__(inputs, *args, **kwargs)


def _checked(name, ids):
    # The same names have masks, which may be None.
    ids = np.asarray(ids) if isinstance(ids, list) else ids
    if ids is not None and len(ids.shape) != 2:
        raise ValueError(
            f"`{name}` must have the shape [batch, length] of the token ids. Received: "
            f"shape={tuple(ids.shape)}"
        )
    check_fit(ids)
    return ids


def inputs_of(model, batch):
    """Returns the part of a batch that a model takes: its inputs and segment ids."""
    names = [*model.input, *(name for name in SEGMENT_NAMES if name in batch)]
    return {name: batch[name] for name in names}


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
