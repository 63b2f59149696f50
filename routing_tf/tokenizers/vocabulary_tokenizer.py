"""The common part of tokenizers with a vocabulary file."""

import collections
import os
import pathlib

import tensorflow as tf

from routing_tf.files import atomic
from routing_tf.tokenizers.base_tokenizer import BaseTokenizer


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
