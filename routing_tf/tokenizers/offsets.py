"""The characters of a text that each of its tokens stands for."""

import re

import numpy as np

from routing_tf.tokenizers.byte_tokenizer import ByteTokenizer
from routing_tf.tokenizers.subword_tokenizer import SubwordTokenizer
from routing_tf.tokenizers.word_tokenizer import WordTokenizer

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
