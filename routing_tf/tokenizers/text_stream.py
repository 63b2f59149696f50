"""Text of tokens: as they come one by one, and the characters of each."""

import codecs
import re

import numpy as np

from routing_tf.tokenizers.base_tokenizer import END_ID
from routing_tf.tokenizers.base_tokenizer import PAD_ID
from routing_tf.tokenizers.byte_tokenizer import BYTE_OFFSET
from routing_tf.tokenizers.byte_tokenizer import NUM_IDS
from routing_tf.tokenizers.byte_tokenizer import ByteTokenizer
from routing_tf.tokenizers.subword_tokenizer import SubwordTokenizer
from routing_tf.tokenizers.word_tokenizer import UNKNOWN_TOKEN
from routing_tf.tokenizers.word_tokenizer import WordTokenizer

# Pieces before a text that say whether it starts with a space.
LONGEST_CONTEXT = 8

_ESCAPED_CHARACTER = re.compile(r"\\u|\\\\|\\[0-9]+;|.", re.DOTALL)
_SPACES = (" ", r"\32;")


def token_offsets(tokenizer, text, token_ids):
    """Returns start and end of each token in characters, `<int64>[tokens, 2]`.

    The rule is that of `routing_tf.models.scoring.score`. `token_ids` must be all ids
    of the text.
    """
    if isinstance(tokenizer, ByteTokenizer):
        lengths = [len(character.encode("utf-8")) for character in text]
        starts = np.repeat(np.arange(len(text)), lengths)
        offsets = np.stack([starts, starts + 1], axis=-1)
    elif isinstance(tokenizer, SubwordTokenizer):
        offsets = _subword_offsets(tokenizer, text, token_ids)
    elif isinstance(tokenizer, WordTokenizer):
        offsets = _word_offsets(tokenizer, text)
    else:
        raise ValueError(
            "`tokenizer` must be a ByteTokenizer, SubwordTokenizer or WordTokenizer. "
            f"Received: {type(tokenizer).__name__}"
        )
    if len(offsets) != len(token_ids):
        raise ValueError(
            "`token_ids` must be those of the whole text; a tokenizer with a "
            f"`sequence_length` cuts or pads it. Received: {len(token_ids)} ids for "
            f"{len(text)} characters"
        )
    return offsets


def _subword_offsets(tokenizer, text, token_ids):
    tokens = [tokenizer.id_to_token(int(id)) for id in token_ids]
    places = []  # in the text, of each character of the joined tokens
    position = 0
    for word in "".join(tokens).split("_")[:-1]:
        for match in _ESCAPED_CHARACTER.finditer(word):
            if text[position : position + 1] == " " and match[0] not in _SPACES:
                # The space that was left out belongs to the end of the previous word.
                places[-1] = position
                position += 1
            places += [position] * len(match[0])
            position += 1
        places.append(position - 1)
    if position != len(text):
        raise ValueError(
            "`token_ids` must be those of the whole text; a tokenizer with a "
            f"`sequence_length` cuts or pads it. Received: ids of {position} "
            f"characters for a text of {len(text)}"
        )
    ends = np.cumsum([len(token) for token in tokens], dtype="int64")
    starts = np.concatenate([[0], ends[:-1]]).astype("int64")
    places = np.array(places, "int64")
    return np.stack([places[starts], places[ends - 1] + 1], axis=-1)


def _word_offsets(tokenizer, text):
    pattern = r"\S+" if tokenizer.newline_token_id is None else r"\n|\S+"
    starts = [match.start() for match in re.finditer(pattern, text)]
    # White space belongs to the word before it, or else to the first word.
    limits = np.array([*starts, len(text)], "int64")
    limits[0] = 0
    return np.stack([limits[:-1], limits[1:]], axis=-1)


def text_stream(tokenizer, context=()):
    """Returns a decoder of tokens that come one by one.

    Its `add(token_id)` returns the text that is now complete, which is often empty, and
    `end()` returns the rest. Together they return the result of `tokenizer.detokenize`,
    and a line break for an end id, after which a new text starts (not for tokenizers of
    keras_hub). `context` are ids of the text before, such as a prompt, which is not
    returned.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return ByteStream()
    if isinstance(tokenizer, SubwordTokenizer):
        return SubwordStream(tokenizer, context)
    if isinstance(tokenizer, WordTokenizer):
        return WordStream(tokenizer, context)
    if not callable(getattr(tokenizer, "detokenize", None)):
        raise ValueError(
            "`tokenizer` must be one of this package or of keras_hub. Received: "
            f"{type(tokenizer).__name__}"
        )
    return PieceStream(tokenizer, context)


class ByteStream:
    """Holds the bytes of a character back until the last one comes."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id):
        """Returns the text that an id of a byte completes."""
        if token_id == END_ID:
            return self.end() + "\n"
        if token_id == PAD_ID:
            return ""
        is_byte = BYTE_OFFSET <= token_id < NUM_IDS
        return self._decoder.decode(
            bytes([token_id - BYTE_OFFSET]) if is_byte else b"\xff"
        )

    def end(self):
        """Returns the text that is held back, with U+FFFD for part of a character."""
        return self._decoder.decode(b"", final=True)


class SubwordStream:
    """Holds the subwords of a word back until its end comes."""

    def __init__(self, tokenizer, context=()):
        self._tokenizer = tokenizer
        self._tokens = tokenizer.get_vocabulary()
        # A space belongs between some words and not between others.
        self._before = [int(id) for id in context]
        self._held = []

    def add(self, token_id):
        """Returns the text that an id of a subword completes."""
        if token_id == END_ID:
            text = self.end() + "\n"
            self._before = []
            return text
        if not PAD_ID < token_id < len(self._tokens):
            return ""
        self._held.append(int(token_id))
        return self.end() if self._tokens[token_id].endswith("_") else ""

    def end(self):
        """Returns the text that is held back, which may be part of a word."""
        if not self._held:
            return ""
        before, both = self._tokenizer.detokenize(
            [self._before, self._before + self._held]
        )
        text = both[len(before) :]
        if text:
            self._before = self._held
        self._held = []
        return text


class WordStream:
    """Returns each word at once, with the space before it."""

    def __init__(self, tokenizer, context=()):
        self._tokenizer = tokenizer
        self._line_ends = (END_ID, tokenizer.newline_token_id)
        self._is_behind_word = False
        for last in [id for id in context if id != PAD_ID][-1:]:
            self.add(last)

    def add(self, token_id):
        """Returns the text of an id."""
        if token_id == PAD_ID:
            return ""
        space = " " if self._is_behind_word else ""
        self._is_behind_word = token_id not in self._line_ends
        return space + self._word(int(token_id)) if self._is_behind_word else "\n"

    def end(self):
        """Returns an empty string, because nothing is held back."""
        return ""

    def _word(self, token_id):
        if 0 <= token_id < self._tokenizer.vocabulary_size():
            return self._tokenizer.id_to_token(token_id)
        return "\ufffd" if self._tokenizer.unknown_token_id is None else UNKNOWN_TOKEN


class PieceStream:
    """Holds pieces of a character back until the last one comes.

    Args:
        tokenizer: a tokenizer of keras_hub.
        context: ids of the text before.
    """

    def __init__(self, tokenizer, context=()):
        self._tokenizer = tokenizer
        # Some spaces belong to two pieces.
        self._before, self._held = [int(x) for x in context][-LONGEST_CONTEXT:], []

    def add(self, token_id):
        """Returns the text that an id completes."""
        self._held.append(int(token_id))
        text = self._new_text()
        return "" if text.endswith("\ufffd") else self._given(text)

    def end(self):
        """Returns the text that is held back, with U+FFFD for part of a character."""
        return self._given(self._new_text())

    def _given(self, text):
        self._before, self._held = (self._before + self._held)[-LONGEST_CONTEXT:], []
        return text

    def _new_text(self):
        before, both = (
            str(self._tokenizer.detokenize(ids)) if ids else ""
            for ids in (self._before, self._before + self._held)
        )
        return both[len(before) :]
