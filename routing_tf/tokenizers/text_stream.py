"""Text of tokens that come one by one; incomplete text is held back."""

import codecs

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
