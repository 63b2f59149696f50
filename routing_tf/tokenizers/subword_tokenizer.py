"""Subwords as tokens, numbered as in tensor2tensor's subword encoder."""

import collections

import keras
import numpy as np
import tensorflow as tf
import tensorflow_text as tf_text
from tensorflow_text.tools.wordpiece_vocab import wordpiece_tokenizer_learner_lib

from routing_tf.files import limits
from routing_tf.tokenizers.base_tokenizer import PAD_ID
from routing_tf.tokenizers.base_tokenizer import Vocabulary
from routing_tf.tokenizers.base_tokenizer import VocabularyTokenizer
from routing_tf.tokenizers.base_tokenizer import check_texts
from routing_tf.tokenizers.base_tokenizer import first

VOCABULARY_FILE = "vocabulary.subwords"
# Characters that stand for others; every vocabulary has them as tokens.
ESCAPE_CHARACTERS = "\\_u;0123456789"

_SPECIAL_TOKENS = ("<pad>_", "<EOS>_")
_ALPHANUMERIC = r"[\p{L}\p{N}]"
_ESCAPES = r"\\u|\\\\|\\[0-9]+;"
# The release's decoding of a code point that Unicode does not have.
_UNDEFINED = 0x3013


@keras.saving.register_keras_serializable(package="routing_tf")
class SubwordTokenizer(VocabularyTokenizer):
    r"""Splits text into the subwords of a vocabulary, as tensor2tensor does.

    Text is split wherever letters and digits meet other characters, and a single
    space between two words of letters and digits is left out. In every word `\`
    becomes `\\`, `_` becomes `\u`, and newlines and characters that no token holds
    become `\<code point>;`. The word ends in `_` and is cut from its start into the
    longest tokens that fit. Id 0 is padding, and id 1 ends a text. Letters and digits
    are those of TensorFlow's regular expressions (Unicode 15); the release used those
    of its Python. Bytes that are not valid UTF-8 become U+FFFD.

    `detokenize` is the exact inverse. Ids outside of the vocabulary are dropped. As in
    the release, `\` before characters that make no escape does not change, and a code
    point above U+10FFFF becomes U+3013. A surrogate becomes U+FFFD.

    It uses only TensorFlow operations, so the same object works on Python strings, in a
    `tf.data` pipeline and in a SavedModel. A SavedModel needs the vocabulary's table:
    if the backend of Keras is not TensorFlow, keep `tokenizer.table` in the saved
    `tf.Module` next to the tokenizer.

    As in every `keras_hub` tokenizer, `tokenizer(inputs)` called eagerly gives
    tensors of the Keras backend, or lists for ragged results, while
    `tokenizer.tokenize(inputs)` always gives TensorFlow tensors.

    Args:
        vocabulary: path of a file with one quoted token on each line, as in the
            release, or a list of tokens. The first two tokens are `"<pad>_"` and
            `"<EOS>_"`, with or without the underscore, and every character in a token
            is also a token, as is each of ``\_u;0123456789``; see `build_vocabulary`.
            `None` (the default) to set it later.
        sequence_length: integer, or `None` (the default) for results as long as
            the text. If given, every text is cut, or padded with id 0, to this
            many ids.
        **kwargs: arguments of `keras_hub.tokenizers.Tokenizer`, such as `name`.

    Raises:
        ValueError: if `sequence_length` is not a positive integer, the file is
            missing or has a line without quotes, or `vocabulary` is empty or breaks a
            rule above.

    Example:
    ```python
    from routing_tf import tokenizers

    vocabulary = tokenizers.SubwordTokenizer.build_vocabulary(
        ["one fish two fish", "red fish blue fish"], vocabulary_size=64
    )
    tokenizer = tokenizers.SubwordTokenizer(vocabulary)
    ids = tokenizer("one red fish")
    tokenizer.detokenize(ids)  # "one red fish"
    ```
    """

    vocabulary_file = VOCABULARY_FILE
    first_tokens = tuple((token, token[:-1]) for token in _SPECIAL_TOKENS)

    def read_tokens(self, path):
        tokens = []
        for number, line in enumerate(limits.read_lines(path), 1):
            line = line.strip()
            if len(line) < 2 or line[0] != line[-1] or line[0] not in "'\"":
                raise ValueError(
                    "`vocabulary` must be a file with one token on each line, in "
                    f"single or double quotes. Received: line {number} of "
                    f"{str(path)!r}, {line!r}"
                )
            tokens.append(line[1:-1])
        return tokens

    def set_tokens(self, tokens):
        """Makes the tables of tokens; see `VocabularyTokenizer`."""
        _check(tokens)
        vocabulary = _Vocabulary(tokens)
        with tf.init_scope():
            self._texts = tf.constant(tokens)
            self.table = tf.lookup.StaticHashTable(
                tf.lookup.KeyValueTensorInitializer(
                    self._texts, tf.range(len(tokens), dtype=tf.int64)
                ),
                default_value=-1,
            )
        self._matcher = tf_text.WordpieceTokenizer(
            self.table,
            suffix_indicator="",
            max_bytes_per_word=np.iinfo("int32").max,
            max_chars_per_token=max(map(len, tokens)),
            token_out_type=tf.int32,
        )
        return vocabulary

    def ids_of(self, texts):
        alphabet = self._get_vocabulary().alphabet
        words = _split(texts)
        # Most words of a text are repeated, so each is matched only once.
        different, places = tf.unique(words.flat_values)
        subwords = self._matcher.tokenize(_escape(different, alphabet))
        return words.with_flat_values(tf.gather(subwords, places)).merge_dims(-2, -1)

    def texts_of(self, ids, is_text):
        is_text &= (ids >= 0) & (ids < self.vocabulary_size())
        subwords = tf.gather(self._texts, tf.where(is_text, ids, PAD_ID))
        subwords = tf.where(is_text, subwords, "")
        texts = _join(tf.strings.reduce_join(subwords, axis=-1))
        return texts if ids.shape.rank == 2 else texts[0]

    def line_of(self, token):
        return f"'{token}'"

    @staticmethod
    def build_vocabulary(texts, vocabulary_size):
        """Builds a vocabulary for texts; it can also encode any other text.

        Tokens are learned as in the release: the substrings of words that occur often
        enough, for a bound found by bisection. The most frequent characters are also
        tokens, up to half of the vocabulary; others are written as their code points.
        Words longer than 50 characters do not count.

        Args:
            texts: iterable of `str`, or of `bytes` in UTF-8.
            vocabulary_size: integer, the largest number of tokens. There are usually a
                few fewer, and even fewer if the texts do not have enough substrings.

        Returns:
            A list of tokens, for the constructor.

        Raises:
            ValueError: if `texts` are one text or contain no word, or `vocabulary_size`
                is too small for the tokens that every vocabulary has.
        """
        required = dict.fromkeys([*_SPECIAL_TOKENS, *ESCAPE_CHARACTERS])
        required = list(required | dict.fromkeys("".join(_SPECIAL_TOKENS)))
        if vocabulary_size < len(required):
            raise ValueError(
                f"`vocabulary_size` must be at least {len(required)}, the tokens that "
                f"every vocabulary has. Received: vocabulary_size={vocabulary_size}"
            )
        check_texts(texts)
        characters, counts = collections.Counter(), collections.Counter()
        for text in map(tf.compat.as_text, texts):
            characters.update(text)
            counts.update(_split(tf.constant([text])).flat_values.numpy().tolist())
        del characters["\n"], counts[b""]
        if not counts:
            raise ValueError("`texts` must hold at least one word. Received: none")
        free = min(vocabulary_size // 2, vocabulary_size - len(required))
        alphabet = {character for character, _ in characters.most_common(free)}
        words = _escape(list(counts), _code_points(alphabet.union(*required)))
        words = [word.decode("utf-8") for word in words.numpy()]
        tokens = wordpiece_tokenizer_learner_lib.learn(
            list(zip(words, counts.values())),
            vocabulary_size,
            required,
            upper_thresh=None,
            lower_thresh=None,
            max_unique_chars=vocabulary_size,
            include_joiner_token=False,
            joiner="",
        )
        # The bisection may end above the size; the tokens are sorted by their counts.
        return tokens[:vocabulary_size]


class _Vocabulary(Vocabulary):
    """Tokens and data derived from them."""

    def __init__(self, tokens):
        super().__init__(tokens)
        self.alphabet = _code_points(set().union(*tokens))


def _code_points(characters):
    return np.array(sorted(map(ord, characters)), "int32")


def _check(tokens):
    """Raises ValueError unless `tokens` can encode and decode any text."""
    refused = [token for token in tokens if not token or "\n" in token]
    if refused:
        raise ValueError(
            "`vocabulary` must not hold empty tokens or tokens with newlines, which "
            f"are encoded as code points. Received: {first(refused)}"
        )
    missing = set().union(ESCAPE_CHARACTERS, *tokens) - set(tokens)
    if missing:
        raise ValueError(
            "`vocabulary` must hold every character of its tokens and of "
            f"{ESCAPE_CHARACTERS!r} as a token, or some texts could not be encoded. "
            f"Received a vocabulary without {first(sorted(missing))}. "
            "`SubwordTokenizer.build_vocabulary` makes one from text"
        )


def _split(texts):
    r"""Words of texts, some of them empty, as a ragged tensor.

    `\` has become `\+` and `_` has become `\-`, so that `_` can mark where words end.
    """
    texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")
    texts = tf.strings.regex_replace(texts, r"\\", r"\\+")
    texts = tf.strings.regex_replace(texts, "_", r"\\-")
    texts = tf.strings.regex_replace(texts, f"{_ALPHANUMERIC}+", r"_\0_")
    return tf.strings.split(tf.strings.regex_replace(texts, "_ _", "_"), "_")


def _escape(words, alphabet):
    """Escapes words of `_split` as in the release; empty ones stay empty."""
    words = tf.strings.regex_replace(words, r"\\-", r"\\u")
    words = tf.strings.regex_replace(words, r"\\\+", r"\\\\")
    points = tf.strings.unicode_decode(words, "UTF-8")
    values = points.flat_values
    places = tf.searchsorted(alphabet, values)
    nearest = tf.gather(alphabet, tf.minimum(places, len(alphabet) - 1))
    escaped = tf.strings.join(["\\", tf.strings.as_string(values), ";"])
    characters = tf.strings.unicode_encode(values[:, None], "UTF-8")
    characters = tf.where(values == nearest, characters, escaped)
    words = tf.strings.reduce_join(points.with_flat_values(characters), axis=-1)
    return tf.where(words == "", "", tf.strings.join([words, "_"]))


def _join(words):
    """Texts of joined escaped words; the inverse of the two functions."""
    words = tf.strings.split(tf.reshape(words, (-1,)), "_")
    words = tf.ragged.boolean_mask(words, words != "")
    different, places = tf.unique(words.flat_values)
    different = _unescape(different)
    is_alphanumeric = tf.strings.regex_full_match(different, f"(?s){_ALPHANUMERIC}.*")
    is_alphanumeric = tf.gather(is_alphanumeric, places)
    rows = words.value_rowids()
    is_inner = (rows[1:] == rows[:-1]) & is_alphanumeric[1:] & is_alphanumeric[:-1]
    # One more than the number of words, so that there may be no words.
    spaces = tf.concat([[""], tf.where(is_inner, " ", "")], 0)[: tf.size(places)]
    pieces = tf.strings.join([spaces, tf.gather(different, places)])
    return tf.strings.reduce_join(words.with_flat_values(pieces), axis=-1)


def _unescape(words):
    # tensorflow_text.regex_split would cut words at characters 0.
    pieces = tf.strings.split(tf.strings.regex_replace(words, _ESCAPES, r"_\0_"), "_")
    values = pieces.flat_values
    is_code = tf.strings.regex_full_match(values, r"\\[0-9]+;")
    digits = tf.strings.regex_replace(values, r"^\\0*([0-9]+);$", r"\1")
    is_short = tf.strings.length(digits) <= len(str(0x10FFFF))
    points = tf.strings.to_number(tf.where(is_code & is_short, digits, "0"), tf.int32)
    points = tf.where(is_short & (points <= 0x10FFFF), points, _UNDEFINED)
    characters = tf.strings.unicode_encode(points[:, None], "UTF-8")
    values = tf.where(is_code, characters, values)
    values = tf.where(values == r"\u", "_", values)
    values = tf.where(values == r"\\", "\\", values)
    return tf.strings.reduce_join(pieces.with_flat_values(values), axis=-1)
