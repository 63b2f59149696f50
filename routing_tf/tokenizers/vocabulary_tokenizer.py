"""What tokenizers with a vocabulary file have in common."""

import os
import pathlib

import numpy as np
import tensorflow as tf

from routing_tf.files import atomic
from routing_tf.tokenizers.byte_tokenizer import END_ID
from routing_tf.tokenizers.byte_tokenizer import PAD_ID
from routing_tf.tokenizers.preset_tokenizer import PresetTokenizer


class VocabularyTokenizer(PresetTokenizer):
    """A tokenizer whose ids are places in a list of tokens, which is an asset.

    A subclass reads a file in `read_tokens`, says in `set_tokens` what it makes of a
    list of tokens and in `line_of` how it writes one.

    Args:
        vocabulary: path of a file, or a list of tokens; `None` (the default) to set it
            later.
        sequence_length: integer, or `None` (the default) for results as long as the
            text.
        **kwargs: arguments of `keras_hub.tokenizers.Tokenizer`, such as `name`.

    Attributes:
        vocabulary_file: string, the name of the asset.

    Raises:
        ValueError: if `sequence_length` is not a positive integer, or the vocabulary
            is not valid.
    """

    vocabulary_file = None

    def __init__(self, vocabulary=None, sequence_length=None, **kwargs):
        super().__init__(**kwargs)
        is_integer = isinstance(sequence_length, (int, np.integer))
        if sequence_length is not None and not (is_integer and sequence_length > 0):
            raise ValueError(
                "`sequence_length` must be a positive integer, or None for results "
                f"as long as the text. Received: sequence_length={sequence_length!r}"
            )
        self.sequence_length = sequence_length
        # The model's sequences start behind a leading 0, as in the release.
        self.start_token_id = PAD_ID
        self.pad_token_id = PAD_ID
        self.end_token_id = END_ID
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
            vocabulary = self.read_tokens(pathlib.Path(vocabulary))
        self._vocabulary = self.set_tokens(
            [tf.compat.as_text(token) for token in vocabulary]
        )

    def read_tokens(self, path):
        """Returns the tokens of a file; to be written by subclasses."""
        raise NotImplementedError(
            f"{type(self).__name__} must define read_tokens(path)."
        )

    def set_tokens(self, tokens):
        """Makes what tokenizing needs; to be written by subclasses.

        Args:
            tokens: list of strings.

        Returns:
            `Vocabulary`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define set_tokens(tokens)."
        )

    def line_of(self, token):
        """Returns the line of a vocabulary file that holds a token."""
        return token

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
        return self.get_vocabulary()[: len(self.special_token_ids)]

    @property
    def special_token_ids(self):
        """The ids of padding and of the end of a text."""
        return [PAD_ID, END_ID]

    def save_vocabulary(self, path):
        """Writes the vocabulary to a file, one token on each line.

        Args:
            path: path of the file, which is overwritten.

        Raises:
            ValueError: if there is no vocabulary.
        """
        lines = [f"{self.line_of(token)}\n" for token in self._get_vocabulary().tokens]
        # Never seen half written: its lines are what ids mean.
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
        return {
            **super().get_config(),
            "vocabulary": None,
            "sequence_length": self.sequence_length,
        }

    @classmethod
    def from_config(cls, config):
        if isinstance(config.get("vocabulary"), str):
            raise ValueError(
                "`vocabulary` must not be a path in a saved config, which could name "
                "any file. Received: vocabulary="
                f"{config['vocabulary']!r}. Save the vocabulary as an asset"
            )
        return super().from_config(config)

    def _get_vocabulary(self):
        if self._vocabulary is None:
            raise ValueError(
                "`vocabulary` must be set before the tokenizer is used. Received: "
                "vocabulary=None. Give the constructor or `set_vocabulary` a file or "
                "a list of tokens"
            )
        return self._vocabulary


class Vocabulary:
    """Tokens and their ids.

    Keras and TensorFlow would wrap and track lists that are attributes of a layer.

    Args:
        tokens: list of strings.
    """

    def __init__(self, tokens):
        self.tokens = tokens
        self.ids = {token: id for id, token in enumerate(tokens)}


def as_strings(texts):
    """Returns decoded texts as `str` where there is no graph.

    Args:
        texts: string tensor `[]` or `[batch]`.

    Returns:
        A `str` or a list of them; in a graph `texts` itself.
    """
    if not tf.executing_eagerly():
        return texts
    texts = texts.numpy()
    if isinstance(texts, bytes):
        return texts.decode("utf-8")
    return [text.decode("utf-8") for text in texts]
