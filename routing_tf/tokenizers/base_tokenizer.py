"""The common parts of tokenizers, and of those with a vocabulary file."""

import collections
import os
import pathlib

import keras_hub
import numpy as np
import tensorflow as tf

from routing_tf.files import atomic
from routing_tf.files import safe_loading
from routing_tf.layers.support.validation import is_integer

PAD_ID = 0
END_ID = 1


class Vocabulary:
    """Tokens and their ids, as lists that Keras and TensorFlow do not track."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.ids = {token: id for id, token in enumerate(tokens)}


class BaseTokenizer(keras_hub.tokenizers.Tokenizer):
    """Turns text into ids of tokens and back; presets of all models may have it.

    A subclass turns texts into ids in `ids_of`, and ids into texts in `texts_of`. Id 0
    is padding and id 1 ends a text.
    """

    _vocabulary = None

    def __init__(self, sequence_length=None, **kwargs):
        super().__init__(**kwargs)
        if sequence_length is not None and not (
            is_integer(sequence_length) and sequence_length > 0
        ):
            raise ValueError(
                "`sequence_length` must be a positive integer, or None for results "
                f"as long as the text. Received: sequence_length={sequence_length!r}"
            )
        self.sequence_length = sequence_length
        # A leading 0 comes before the model's sequences, as in the release.
        self.start_token_id = PAD_ID
        self.pad_token_id = PAD_ID
        self.end_token_id = END_ID

    def ids_of(self, texts):
        """Returns the ids, ragged `<int32>[batch, None]`, of strings `[batch]`."""
        raise NotImplementedError

    def texts_of(self, ids, is_text):
        """Returns the texts `[...]` of ids `[..., length]` where `is_text` is True."""
        raise NotImplementedError

    def tokenize(self, inputs):
        """Turns texts into ids.

        Args:
            inputs: a string, or a batch of strings `[batch]`: Python `str` or `bytes`,
                a list of them, or a string tensor.

        Returns:
            TensorFlow tensors: for one string `<int32>[ids]`; for a batch, a ragged
            one, `<int32>[batch, None]`. With `sequence_length`, both are dense.
        """
        texts = tf.convert_to_tensor(inputs)
        if texts.shape == (0,):  # a list of nothing becomes numbers
            texts = tf.constant([], tf.string)
        if texts.dtype != tf.string or texts.shape.rank not in (0, 1):
            raise ValueError(
                "`inputs` must be one string or a batch of strings of rank 1. "
                f"Received: inputs of dtype {texts.dtype.name}, shape {texts.shape}"
            )
        ids = self.ids_of(tf.reshape(texts, (-1,)))
        if self.sequence_length is not None:
            shape = (texts.shape[0] if texts.shape.rank else 1, self.sequence_length)
            ids = ids.to_tensor(PAD_ID, shape=shape)
        return ids if texts.shape.rank else ids[0]

    def encode(self, text):
        """Returns all ids of a text, `<int32>[ids]`, whatever `sequence_length`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts):
        """Turns texts into all of their ids, whatever `sequence_length` is.

        Args:
            texts: list of `str`, or of `bytes` in UTF-8.

        Returns:
            List of NumPy arrays `<int32>[ids]`.
        """
        if isinstance(texts, (str, bytes)):
            raise ValueError(
                f"`texts` must be a list of texts. Received: texts={texts!r}. Call "
                "`tokenize` for one text"
            )
        if not len(texts):
            return []
        ids = self.ids_of(tf.constant(texts, tf.string, (len(texts),)))
        return np.split(ids.flat_values.numpy(), ids.row_splits.numpy()[1:-1])

    def detokenize(self, inputs):
        """Turns ids back into text, which stops at its first end id.

        Args:
            inputs: integer ids `[length]` or `[batch, length]`: lists,
                also of different lengths, arrays, tensors or ragged tensors.

        Returns:
            A `str`, or a list of `str` for a batch; inside a `tf.function` or a
            `tf.data` pipeline, a string tensor `[]` or `[batch]`.

        Raises:
            ValueError: if `inputs` have neither rank 1 nor rank 2, or there is no
                vocabulary.
        """
        ids = _dense_ids(inputs)
        if ids.shape.rank not in (1, 2):
            raise ValueError(
                "`inputs` must be ids of shape (length,) or (batch, length). "
                f"Received: inputs of shape {ids.shape}"
            )
        is_end = tf.cast(ids == END_ID, tf.int32)
        is_text = (tf.cumsum(is_end, axis=-1) == 0) & (ids != PAD_ID)
        texts = self.texts_of(ids, is_text)
        if not tf.executing_eagerly():
            return texts
        if ids.shape.rank == 1:
            return tf.compat.as_str(texts.numpy())
        return [tf.compat.as_str(text) for text in texts.numpy()]

    def vocabulary_size(self):
        """Returns the number of ids."""
        return len(self._get_vocabulary().tokens)

    def get_vocabulary(self):
        """Returns the list of tokens, in the order of their ids."""
        return list(self._get_vocabulary().tokens)

    def id_to_token(self, id):
        """Returns the token of an id."""
        tokens = self._get_vocabulary().tokens
        if not 0 <= id < len(tokens):
            raise ValueError(
                f"`id` must be between 0 and {len(tokens) - 1}. Received: id={id}"
            )
        return tokens[id]

    def token_to_id(self, token):
        """Returns the id of a token; the inverse of `id_to_token`."""
        ids = self._get_vocabulary().ids
        if token not in ids:
            raise ValueError(
                "`token` must be in the vocabulary; `tokenize` turns any text into "
                f"ids of such tokens. Received: token={token!r}"
            )
        return ids[token]

    @property
    def special_tokens(self):
        """The tokens of padding and of the end of a text."""
        return [self.id_to_token(id) for id in self.special_token_ids]

    @property
    def special_token_ids(self):
        """The ids of padding and of the end of a text."""
        return [PAD_ID, END_ID]

    def get_config(self):
        return {**super().get_config(), "sequence_length": self.sequence_length}

    def _get_vocabulary(self):
        if self._vocabulary is None:
            raise ValueError(
                "`vocabulary` must be set before the tokenizer is used. Received: "
                "vocabulary=None. Give the constructor or `set_vocabulary` a file or "
                "a list of tokens"
            )
        return self._vocabulary

    # keras_hub assumes that each tokenizer is made for one backbone.
    @classmethod
    def from_preset(cls, preset, config_file="tokenizer.json", **kwargs):
        """Loads the tokenizer of a saved model.

        Args:
            preset: preset directory of a model of `routing_tf.models`, which must be
                imported before, or a handle that keras_hub downloads.
            config_file: name of the tokenizer's file there.
            **kwargs: changes of the arguments of the tokenizer.
        """
        safe_loading.check_preset(preset)
        tokenizer = keras_hub.tokenizers.Tokenizer.from_preset(
            preset, config_file=config_file, **kwargs
        )
        if not isinstance(tokenizer, cls):
            raise ValueError(
                f"The tokenizer of the preset must be a {cls.__name__}. Received: "
                f"preset={preset!r} with a {type(tokenizer).__name__}. Call "
                "`from_preset` of this class"
            )
        return tokenizer


def _dense_ids(inputs):
    """Ids of any accepted kind as a dense int32 tensor, with padding."""
    if isinstance(inputs, (list, tuple)):
        rows = [np.asarray(row).tolist() for row in inputs]
        inputs = tf.ragged.constant(rows, dtype=tf.int32)
    if isinstance(inputs, tf.RaggedTensor):
        inputs = inputs.to_tensor(PAD_ID)
    if not tf.is_tensor(inputs):
        inputs = np.asarray(inputs)
    return tf.cast(inputs, tf.int32)


class VocabularyTokenizer(BaseTokenizer):
    """A tokenizer whose ids are places in a list of tokens, which is an asset.

    A subclass reads a file in `read_tokens`, uses a list of tokens in `set_tokens`, and
    writes a token in `line_of`. `vocabulary_file` is the name of the asset.
    `first_tokens` are two tuples: the possible names of the token of padding, and of
    the token of the end of a text.
    """

    vocabulary_file = None
    first_tokens = ()

    def __init__(self, vocabulary=None, sequence_length=None, **kwargs):
        super().__init__(sequence_length, **kwargs)
        self.file_assets = [self.vocabulary_file]
        self.set_vocabulary(vocabulary)

    def set_vocabulary(self, vocabulary):
        """Sets the vocabulary.

        Args:
            vocabulary: as in the constructor.

        Raises:
            ValueError: as in the constructor.
        """
        self._vocabulary = None
        if vocabulary is None:
            return
        if isinstance(vocabulary, (str, os.PathLike)):
            path = pathlib.Path(vocabulary)
            if not path.is_file():
                raise ValueError(
                    "`vocabulary` must be the path of an existing file, or a list of "
                    f"tokens. Received: vocabulary={str(path)!r}. "
                    f"`{type(self).__name__}.build_vocabulary` makes one from text"
                )
            vocabulary = self.read_tokens(path)
        tokens = [tf.compat.as_text(token) for token in vocabulary]
        self._check_tokens(tokens)
        self._vocabulary = self.set_tokens(tokens)

    def _check_tokens(self, tokens):
        if not tokens:
            problem = "not be empty. Received: no tokens"
        elif len(tokens) < 2 or any(
            token not in names for token, names in zip(tokens, self.first_tokens)
        ):
            names = tuple(names[0] for names in self.first_tokens)
            problem = (
                f"begin with the tokens {names}, for padding and the end of a text. "
                f"Received: {tokens[:2]}"
            )
        elif len(set(tokens)) < len(tokens):
            twice = [token for token, n in collections.Counter(tokens).items() if n > 1]
            problem = f"have every token once. Received more often: {first(twice)}"
        else:
            return
        raise ValueError(
            f"`vocabulary` must {problem}. `{type(self).__name__}.build_vocabulary` "
            "makes a vocabulary from text"
        )

    def read_tokens(self, path):
        """Returns the tokens of a file; subclasses implement this."""
        raise NotImplementedError

    def set_tokens(self, tokens):
        """Prepares tokenizing, and returns the `Vocabulary` of `tokens`."""
        raise NotImplementedError

    def line_of(self, token):
        """Returns the line of a vocabulary file with a token."""
        return token

    def save_vocabulary(self, path):
        """Writes the vocabulary to the file `path`, one token on each line."""
        lines = [f"{self.line_of(token)}\n" for token in self._get_vocabulary().tokens]
        # Written atomically, because its lines define the ids.
        with atomic.whole(path) as partial:
            partial.write_bytes("".join(lines).encode("utf-8"))

    def save_assets(self, dir_path):
        """Saves the vocabulary."""
        self.save_vocabulary(os.path.join(dir_path, self.vocabulary_file))

    def load_assets(self, dir_path):
        """Loads the vocabulary."""
        self.set_vocabulary(os.path.join(dir_path, self.vocabulary_file))

    def get_config(self):
        # The vocabulary is saved as an asset.
        return {**super().get_config(), "vocabulary": None}

    @classmethod
    def from_config(cls, config):
        if isinstance(config.get("vocabulary"), str):
            raise ValueError(
                "`vocabulary` must not be a path in a saved config, which could name "
                "any file. Received: vocabulary="
                f"{config['vocabulary']!r}. Save the vocabulary as an asset"
            )
        return super().from_config(config)


def check_texts(texts):
    """Raises a `ValueError` if a vocabulary would be built from one text."""
    if isinstance(texts, (str, bytes)):
        raise ValueError(
            "`texts` must be an iterable of texts, such as [text]. Received: one "
            f"text of length {len(texts)}"
        )


def first(values):
    """At most ten values, for a message."""
    return f"{values[:10]}" + (" and others" if len(values) > 10 else "")
