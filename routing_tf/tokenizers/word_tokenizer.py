"""Words as tokens, numbered as tensor2tensor's token encoder numbers them."""

import collections
import itertools
import pathlib

import keras
import numpy as np
import tensorflow as tf

from routing_tf.files import safe_loading
from routing_tf.tokenizers.byte_tokenizer import END_ID
from routing_tf.tokenizers.byte_tokenizer import PAD_ID
from routing_tf.tokenizers.byte_tokenizer import dense_ids
from routing_tf.tokenizers.vocabulary_tokenizer import Vocabulary
from routing_tf.tokenizers.vocabulary_tokenizer import VocabularyTokenizer
from routing_tf.tokenizers.vocabulary_tokenizer import as_strings

VOCABULARY_FILE = "vocabulary.words"
UNKNOWN_TOKEN = "<unk>"
NEWLINE_TOKEN = "<newline>"

_SPECIAL_TOKENS = ("<pad>", "<EOS>")
# Where str.split splits. \s of RE2 is ASCII, and tf.strings.split asks the locale.
_WHITE_SPACE = (
    r"[\x{9}-\x{d}\x{1c}-\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}"
    r"\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]+"
)
_NO_ID = -1
_WAY_OUT = (
    "Build the vocabulary from texts that hold the word, or with "
    f"`build_vocabulary(texts, unknown=True)`, which adds {UNKNOWN_TOKEN}"
)


@keras.saving.register_keras_serializable(package="routing_tf")
class WordTokenizer(VocabularyTokenizer):
    r"""Splits text at white space into words, with ids as in tensor2tensor.

    White space is what Python's `str.split` splits at. With the token `"<newline>"`
    in the vocabulary each newline is a token too; else it is white space as any other.
    Words that the vocabulary does not have become `"<unk>"`; without this token they
    are refused. `detokenize` joins words by single spaces and has none around
    newlines. Id 0 is padding, id 1 ends a text.

    Words that look like a token are this token, as in tensor2tensor: the word `<EOS>`
    of a text has id 1, and `detokenize` stops there. Only the word `<pad>` would be
    taken for padding, so it becomes `"<unk>"` where there is this token; else its id
    is 0.

    Only TensorFlow operations are used by `tokenize` and `detokenize`: the same
    object works on Python strings, in a `tf.data` pipeline and in a SavedModel. A
    SavedModel needs the vocabulary's table: where the backend of Keras is not
    TensorFlow, hold `tokenizer.table` in the saved `tf.Module` beside the tokenizer.
    For long texts in memory, `encode` is the faster way to the same ids.

    As in every `keras_hub` tokenizer, `tokenizer(inputs)` called eagerly gives
    tensors of the Keras backend, or lists for ragged results, while
    `tokenizer.tokenize(inputs)` always gives TensorFlow tensors.

    Args:
        vocabulary: path of a UTF-8 file with one token on each line, or a list of
            tokens; the ids are their places. The first two tokens are `"<pad>"` and
            `"<EOS>"`; see `build_vocabulary`. `None` (the default) to set it later.
        sequence_length: integer, or `None` (the default) for results as long as
            the text. If given, every text is cut, or padded with id 0, to this
            many ids.
        **kwargs: arguments of `keras_hub.tokenizers.Tokenizer`, such as `name`.

    Raises:
        ValueError: if `sequence_length` is not a positive integer, the file is
            missing, or `vocabulary` is empty, does not begin with the two tokens,
            has a token twice, or a token with white space or no character.

    Example:
    ```python
    from routing_tf import tokenizers

    vocabulary = tokenizers.WordTokenizer.build_vocabulary(
        ["one fish two fish", "red fish blue fish"], newline=True, unknown=True
    )
    tokenizer = tokenizers.WordTokenizer(vocabulary)
    ids = tokenizer("one  red fish\ntwo dogs")
    tokenizer.detokenize(ids)  # "one red fish\ntwo <unk>"
    ```
    """

    vocabulary_file = VOCABULARY_FILE

    def read_tokens(self, path):
        return _read(path)

    def set_tokens(self, tokens):
        """Makes the tables of tokens; see `VocabularyTokenizer`."""
        _check(tokens)
        vocabulary = _Vocabulary(tokens)
        with tf.init_scope():
            self._texts = tf.constant(
                ["\n" if token == NEWLINE_TOKEN else token for token in tokens]
            )
            self.table = tf.lookup.StaticHashTable(
                tf.lookup.KeyValueTensorInitializer(
                    tf.constant(tokens),
                    tf.constant([*vocabulary.ids_of_words.values()], tf.int64),
                ),
                default_value=vocabulary.default_id,
            )
        return vocabulary

    def tokenize(self, inputs):
        """Turns texts into ids.

        Args:
            inputs: a string, or a batch of strings `[batch]`: Python
                `str` or `bytes`, a list of them, or a string tensor. Bytes that are
                not valid UTF-8 become U+FFFD.

        Returns:
            TensorFlow tensors of ids. For one string a dense one, `<int32>[ids]`;
            for a batch a ragged one, `<int32>[batch, None]`. With `sequence_length`,
            dense ones, `[sequence_length]` and `[batch, sequence_length]`.

        Raises:
            ValueError: if `inputs` are not strings, or of another rank, there is no
                vocabulary, or it has neither a word of the texts nor `"<unk>"`.
                Inside of a `tf.function` or a `tf.data` pipeline such a word is a
                `tf.errors.InvalidArgumentError`.
        """
        vocabulary = self._get_vocabulary()
        texts = tf.convert_to_tensor(inputs)
        if texts.dtype != tf.string or texts.shape.rank not in (0, 1):
            raise ValueError(
                "`inputs` must be one string or a batch of strings of rank 1. "
                f"Received: inputs of dtype {texts.dtype.name}, shape {texts.shape}"
            )
        words = _split(tf.reshape(texts, (-1,)), vocabulary.has_newline)
        values = tf.cast(self.table.lookup(words.flat_values), tf.int32)
        if not vocabulary.has_unknown:
            _check_known(words.flat_values, values)
        ids = words.with_flat_values(values)
        if self.sequence_length is not None:
            shape = (texts.shape[0] if texts.shape.rank else 1, self.sequence_length)
            ids = ids.to_tensor(PAD_ID, shape=shape)
        return ids if texts.shape.rank else ids[0]

    def encode(self, text):
        """Turns one text into the ids of `tokenize`, faster and without TensorFlow.

        Args:
            text: `str`, in which every word takes memory while this runs.

        Returns:
            NumPy array `<int32>[words]`, of all words whatever `sequence_length` is.

        Raises:
            ValueError: if `text` is no `str`, there is no vocabulary, or it has
                neither a word of the text nor `"<unk>"`.
        """
        vocabulary = self._get_vocabulary()
        if not isinstance(text, str):
            raise ValueError(
                "`text` must be a str; `tokenize` takes bytes, batches and tensors "
                f"too. Received: {type(text).__name__}"
            )
        if vocabulary.has_newline:
            text = text.replace("\n", f" {NEWLINE_TOKEN} ")
        words = text.split()
        default = itertools.repeat(vocabulary.default_id)
        ids = map(vocabulary.ids_of_words.get, words, default)
        ids = np.fromiter(ids, "int32", len(words))
        if not vocabulary.has_unknown and (ids == _NO_ID).any():
            raise _unknown_word(words[int(np.argmax(ids == _NO_ID))])
        return ids

    def detokenize(self, inputs):
        r"""Turns ids back into text.

        Words are joined by single spaces, and `"<newline>"` becomes `"\n"` without
        any around it. Padding is dropped, a text stops at its first end id, and ids
        outside of the vocabulary become `"<unk>"`, or U+FFFD without this token.

        Args:
            inputs: integer ids `[length]` or `[batch, length]`: lists,
                also of different lengths, arrays, tensors or ragged tensors.

        Returns:
            A `str`, or a list of `str` for a batch; inside of a `tf.function` or
            a `tf.data` pipeline a string tensor `[]` or `[batch]`.

        Raises:
            ValueError: if `inputs` have neither rank 1 nor rank 2, or there is no
                vocabulary.
        """
        vocabulary = self._get_vocabulary()
        ids = dense_ids(inputs)
        if ids.shape.rank not in (1, 2):
            raise ValueError(
                "`inputs` must be ids of shape (length,) or (batch, length). "
                f"Received: inputs of shape {ids.shape}"
            )
        is_end = tf.cast(ids == END_ID, tf.int32)
        is_text = (tf.cumsum(is_end, axis=-1) == 0) & (ids != PAD_ID)
        is_token = (ids >= 0) & (ids < len(vocabulary.tokens))
        words = tf.gather(self._texts, tf.where(is_token, ids, PAD_ID))
        other = UNKNOWN_TOKEN if vocabulary.has_unknown else "\ufffd"
        words = tf.where(is_text, tf.where(is_token, words, other), "")
        texts = tf.strings.reduce_join(words, axis=-1, separator=" ")
        # No word holds a space: all of them are separators, also of what is dropped.
        texts = tf.strings.regex_replace(texts, " *\n *", "\n")
        texts = tf.strings.regex_replace(texts, "^ +| +$", "")
        texts = tf.strings.regex_replace(texts, " +", " ")
        return as_strings(texts)

    @property
    def newline_token_id(self):
        """The id of newlines, or `None` where they are white space."""
        return self._get_vocabulary().ids.get(NEWLINE_TOKEN)

    @property
    def unknown_token_id(self):
        """The id of words that have none, or `None` where these are refused."""
        return self._get_vocabulary().ids.get(UNKNOWN_TOKEN)

    @staticmethod
    def build_vocabulary(texts, newline=False, unknown=False):
        """Builds a vocabulary of all words of texts, as tensor2tensor does.

        Frequent words come first, and words that are equally frequent in the order
        of their characters. The words `<pad>`, `<EOS>` and `<newline>` of the texts
        are left out.

        Args:
            texts: iterable of `str`, or of `bytes` in UTF-8.
            newline: whether newlines are tokens. If so, `"<newline>"` is the last
                token: words have the same ids with and without it. Defaults to
                `False`.
            unknown: whether there is a token for words that the texts do not have.
                If so, `"<unk>"` follows the words unless it is one of them. Defaults
                to `False`.

        Returns:
            A list of tokens, for the constructor.

        Raises:
            ValueError: if `texts` are one text, or none that holds a word.
        """
        if isinstance(texts, (str, bytes)):
            raise ValueError(
                "`texts` must be an iterable of texts, such as [text]. Received: one "
                f"text of length {len(texts)}"
            )
        counts = collections.Counter()
        for text in map(tf.compat.as_text, texts):
            counts.update(text.split())
        for token in (*_SPECIAL_TOKENS, NEWLINE_TOKEN):
            del counts[token]
        if not counts:
            raise ValueError("`texts` must hold at least one word. Received: none")
        words = sorted(counts, key=lambda word: (-counts[word], word))
        if unknown and UNKNOWN_TOKEN not in counts:
            words.append(UNKNOWN_TOKEN)
        if newline:
            words.append(NEWLINE_TOKEN)
        return [*_SPECIAL_TOKENS, *words]


class _Vocabulary(Vocabulary):
    """Tokens and what follows from them."""

    def __init__(self, tokens):
        super().__init__(tokens)
        self.has_newline = NEWLINE_TOKEN in self.ids
        self.has_unknown = UNKNOWN_TOKEN in self.ids
        self.default_id = self.ids.get(UNKNOWN_TOKEN, _NO_ID)
        # In a text, <pad> is a word and no padding.
        pad_word = self.ids.get(UNKNOWN_TOKEN, PAD_ID)
        self.ids_of_words = {**self.ids, _SPECIAL_TOKENS[PAD_ID]: pad_word}


def _read(path):
    """Tokens of a file with one on each line."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(
            "`vocabulary` must be the path of an existing file, or a list of tokens. "
            f"Received: vocabulary={str(path)!r}. "
            "`WordTokenizer.build_vocabulary` makes one from text"
        )
    return [line.removesuffix("\r") for line in safe_loading.read_lines(path)]


def _check(tokens):
    """Raises ValueError unless every token can be found in a text."""
    build = "`WordTokenizer.build_vocabulary` makes a vocabulary from text"
    if not tokens:
        raise ValueError(
            f"`vocabulary` must not be empty. Received: no tokens. {build}"
        )
    if tuple(tokens[:2]) != _SPECIAL_TOKENS:
        raise ValueError(
            f"`vocabulary` must begin with the tokens {_SPECIAL_TOKENS}, for padding "
            f"and the end of a text. Received: {tokens[:2]}. {build}"
        )
    refused = [token for token in tokens if token.split() != [token]]
    if refused:
        raise ValueError(
            "`vocabulary` must not hold empty tokens or tokens with white space, at "
            f"which texts are split. Received: {refused[:10]}. A newline is the token "
            f"{NEWLINE_TOKEN}. {build}"
        )
    if len(set(tokens)) < len(tokens):
        twice = [token for token, n in collections.Counter(tokens).items() if n > 1]
        raise ValueError(
            "`vocabulary` must hold every token once. Received more often: "
            f"{twice[:10]}. {build}"
        )


def _split(texts, has_newline):
    """Words of texts as a ragged tensor."""
    texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")
    if has_newline:
        texts = tf.strings.regex_replace(texts, "\n", f" {NEWLINE_TOKEN} ")
    words = tf.strings.split(tf.strings.regex_replace(texts, _WHITE_SPACE, " "), " ")
    return tf.ragged.boolean_mask(words, words != "")


def _check_known(words, ids):
    """Refuses words that have no id."""
    unknown = tf.boolean_mask(words, ids == _NO_ID)
    if not tf.executing_eagerly():
        message = f"Every word must be in the vocabulary. {_WAY_OUT}. Received:"
        tf.debugging.Assert(tf.size(unknown) == 0, [message, unknown])
    elif len(unknown):
        raise _unknown_word(unknown[0].numpy().decode("utf-8"))


def _unknown_word(word):
    return ValueError(
        f"Every word must be in the vocabulary. Received: {word!r}. {_WAY_OUT}"
    )
