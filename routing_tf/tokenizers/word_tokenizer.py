"""Words as tokens, numbered as in tensor2tensor's token encoder."""

import collections
import itertools

import keras
import numpy as np
import tensorflow as tf

from routing_tf.files import limits
from routing_tf.tokenizers.base_tokenizer import PAD_ID
from routing_tf.tokenizers.base_tokenizer import Vocabulary
from routing_tf.tokenizers.base_tokenizer import VocabularyTokenizer
from routing_tf.tokenizers.base_tokenizer import check_texts
from routing_tf.tokenizers.base_tokenizer import first

VOCABULARY_FILE = "vocabulary.words"
UNKNOWN_TOKEN = "<unk>"
NEWLINE_TOKEN = "<newline>"

_SPECIAL_TOKENS = ("<pad>", "<EOS>")
# Where str.split splits. \s of RE2 is ASCII, and tf.strings.split uses the locale.
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

    White space is that of Python's `str.split`. With the token `"<newline>"` in the
    vocabulary, each newline is a token, too; otherwise it is white space. Words that
    the vocabulary does not have become `"<unk>"`; without this token they are refused,
    by a `tf.errors.InvalidArgumentError` inside a `tf.function` or a `tf.data`
    pipeline. Bytes that are not valid UTF-8 become U+FFFD. `detokenize` joins words by
    single spaces and has none around newlines; ids outside of the vocabulary become
    `"<unk>"`, or U+FFFD without this token. Id 0 is padding, id 1 ends a text.

    Words that look like a token are this token, as in tensor2tensor: the word `<EOS>`
    of a text has id 1, and `detokenize` stops there. Only the word `<pad>`, which would
    be taken for padding, becomes `"<unk>"` if there is this token; otherwise its id is
    0.

    `tokenize` and `detokenize` use only TensorFlow operations, so the same object works
    on Python strings, in a `tf.data` pipeline and in a SavedModel. A SavedModel needs
    the vocabulary's table: if the backend of Keras is not TensorFlow, keep
    `tokenizer.table` in the saved `tf.Module` next to the tokenizer. For long texts in
    memory, `encode` gives the same ids faster.

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
    first_tokens = tuple((token,) for token in _SPECIAL_TOKENS)

    def read_tokens(self, path):
        return [line.removesuffix("\r") for line in limits.read_lines(path)]

    def set_tokens(self, tokens):
        """Makes the tables of tokens; see `VocabularyTokenizer`."""
        refused = [token for token in tokens if token.split() != [token]]
        if refused:
            raise ValueError(
                "`vocabulary` must not hold empty tokens or tokens with white space, "
                f"which splits texts. Received: {first(refused)}. A newline is the "
                f"token {NEWLINE_TOKEN}"
            )
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

    def ids_of(self, texts):
        vocabulary = self._get_vocabulary()
        words = _split(texts, vocabulary.has_newline)
        values = tf.cast(self.table.lookup(words.flat_values), tf.int32)
        if not vocabulary.has_unknown:
            _check_known(words.flat_values, values)
        return words.with_flat_values(values)

    def encode(self, text):
        """Turns one text into its ids, faster than `tokenize` and without TensorFlow.

        Args:
            text: `str`, whose words all take memory while this runs.

        Returns:
            NumPy array `<int32>[words]`, of all words whatever `sequence_length` is.

        Raises:
            ValueError: if `text` is not a `str`, there is no vocabulary, or it has
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

    def texts_of(self, ids, is_text):
        vocabulary = self._get_vocabulary()
        is_token = (ids >= 0) & (ids < len(vocabulary.tokens))
        words = tf.gather(self._texts, tf.where(is_token, ids, PAD_ID))
        other = UNKNOWN_TOKEN if vocabulary.has_unknown else "\ufffd"
        words = tf.where(is_text, tf.where(is_token, words, other), "")
        texts = tf.strings.reduce_join(words, axis=-1, separator=" ")
        # No word contains a space, so all spaces separate words, dropped ones included.
        texts = tf.strings.regex_replace(texts, " *\n *", "\n")
        texts = tf.strings.regex_replace(texts, "^ +| +$", "")
        return tf.strings.regex_replace(texts, " +", " ")

    @property
    def newline_token_id(self):
        """The id of newlines, or `None` if they are white space."""
        return self._get_vocabulary().ids.get(NEWLINE_TOKEN)

    @property
    def unknown_token_id(self):
        """The id of unknown words, or `None` if these are refused."""
        return self._get_vocabulary().ids.get(UNKNOWN_TOKEN)

    @staticmethod
    def build_vocabulary(texts, newline=False, unknown=False):
        """Builds a vocabulary of all words of texts, as tensor2tensor does.

        Frequent words come first, equally frequent ones in the order of their
        characters. The words `<pad>`, `<EOS>` and `<newline>` of the texts are left
        out.

        Args:
            texts: iterable of `str`, or of `bytes` in UTF-8.
            newline: whether newlines are tokens. If so, `"<newline>"` is the last
                token: words have the same ids with and without it. Defaults to `False`.
            unknown: whether `"<unk>"`, for words that the texts do not have, follows
                the words unless it is one of them. Defaults to `False`.

        Returns:
            A list of tokens, for the constructor.
        """
        check_texts(texts)
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
    """Tokens and data derived from them."""

    def __init__(self, tokens):
        super().__init__(tokens)
        self.has_newline = NEWLINE_TOKEN in self.ids
        self.has_unknown = UNKNOWN_TOKEN in self.ids
        self.default_id = self.ids.get(UNKNOWN_TOKEN, _NO_ID)
        # In a text, <pad> is a word and not padding.
        pad_word = self.ids.get(UNKNOWN_TOKEN, PAD_ID)
        self.ids_of_words = {**self.ids, _SPECIAL_TOKENS[PAD_ID]: pad_word}


def _split(texts, has_newline):
    """Words of texts as a ragged tensor."""
    texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")
    if has_newline:
        texts = tf.strings.regex_replace(texts, "\n", f" {NEWLINE_TOKEN} ")
    words = tf.strings.split(tf.strings.regex_replace(texts, _WHITE_SPACE, " "), " ")
    return tf.ragged.boolean_mask(words, words != "")


def _check_known(words, ids):
    """Refuses words without an id."""
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
