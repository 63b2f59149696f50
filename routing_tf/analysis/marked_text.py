"""Texts with marked tokens."""

import codecs
import dataclasses

from routing_tf.generation.display import printable
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import WordTokenizer
from routing_tf.tokenizers.byte_tokenizer import BYTE_OFFSET
from routing_tf.tokenizers.byte_tokenizer import PAD_ID

BRACKETS = (
    "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}",
    "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}",
)
REVERSE_VIDEO = ("\x1b[7m", "\x1b[0m")
# Around the token for which others are marked.
ANGLE_BRACKETS = (
    "\N{MATHEMATICAL LEFT DOUBLE ANGLE BRACKET}",
    "\N{MATHEMATICAL RIGHT DOUBLE ANGLE BRACKET}",
)
BOLD_UNDERLINED = ("\x1b[1;4m", "\x1b[0m")
LINE_END = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
TAB = "\N{RIGHTWARDS ARROW TO BAR}"
CONTEXT_CHARACTERS = 24
# The leading id of texts, which is padding elsewhere.
START = "<start>"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a text that is shown together."""

    text: str
    is_marked: bool


def make_pieces(tokenizer, token_ids, is_marked):
    """Cuts the text of some tokens into a piece for each token or character.

    A character of several bytes is marked if one of them is. Subwords are shown as in
    their vocabulary, with a space for the underscore that ends a word; other characters
    that cannot be printed are U+FFFD, and the leading id 0 of texts is `START`.
    """
    token_ids = [int(id) for id in token_ids]
    if isinstance(tokenizer, ByteTokenizer):
        pieces = _byte_pieces(tokenizer, token_ids, is_marked)
    else:
        pieces = [
            Piece(_name(tokenizer, id), bool(marked))
            for id, marked in zip(token_ids, is_marked, strict=True)
        ]
    return [dataclasses.replace(p, text=printable(p.text)) for p in pieces]


def mark(pieces, marks):
    """Joins pieces, with a pair of marks such as `BRACKETS` around marked ones.

    Neighbours share a pair. A marked line end is shown as an arrow before it.
    """
    parts, inside = [], False
    for piece in pieces:
        if piece.is_marked != inside:
            parts.append(marks[inside])
            inside = piece.is_marked
        shown = piece.text
        parts.append(shown.replace("\n", LINE_END + "\n") if inside else shown)
    return "".join(parts) + (marks[1] if inside else "")


def find_piece(tokenizer, token_ids, token):
    """Returns the number of the piece that shows a token."""
    is_token = [number == token for number in range(len(token_ids))]
    pieces = make_pieces(tokenizer, token_ids, is_token)
    return [piece.is_marked for piece in pieces].index(True)


def mark_around(pieces, number, marks, own_marks):
    """Joins pieces as `mark` does, with other marks around one of them."""
    own = dataclasses.replace(pieces[number], is_marked=True)
    parts = (pieces[:number], marks), ([own], own_marks), (pieces[number + 1 :], marks)
    return "".join(mark(*part) for part in parts)


def in_one_line(tokenizer, token_ids):
    """Returns the text of tokens in one line, with line ends and tabs as arrows."""
    pieces = make_pieces(tokenizer, token_ids, [False] * len(token_ids))
    text = "".join(piece.text for piece in pieces)
    return text.replace("\n", LINE_END).replace("\t", TAB)


def names(tokenizer, token_ids):
    """Returns the text of each token, in one line."""
    return [in_one_line(tokenizer, [id]) for id in token_ids]


def context(tokenizer, token_ids, token):
    """Returns the end of the text before a token, in one line."""
    # A character has up to four bytes.
    start = max(0, token - 4 * CONTEXT_CHARACTERS)
    return in_one_line(tokenizer, token_ids[start:token])[-CONTEXT_CHARACTERS:]


def _byte_pieces(tokenizer, token_ids, is_marked):
    pieces, marked = [], False
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(text):
        nonlocal marked
        if text:
            pieces.append(Piece(text, marked))
            marked = False

    for id, is_member in zip(token_ids, is_marked, strict=True):
        is_byte = id >= BYTE_OFFSET
        if not is_byte:
            add(decoder.decode(b"", final=True))
        marked = marked or bool(is_member)
        if is_byte:
            add(decoder.decode(bytes([id - BYTE_OFFSET])))
        else:
            add(_name(tokenizer, id))
    add(decoder.decode(b"", final=True))
    return pieces


def _name(tokenizer, id):
    if tokenizer is None:
        return f"{id} "
    name = START if id == PAD_ID else tokenizer.id_to_token(id)
    if isinstance(tokenizer, WordTokenizer):
        return "\n" if id == tokenizer.newline_token_id else f"{name} "
    return name[:-1] + " " if name.endswith("_") else name
