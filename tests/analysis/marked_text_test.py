"""Tests of texts with marks."""

import numpy as np
import pytest

from routing_tf.analysis import pictures
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import SubwordTokenizer
from routing_tf.tokenizers import WordTokenizer


def marked(text_or_ids, is_marked, tokenizer=None, marks=("<", ">")):
    tokenizer = tokenizer or ByteTokenizer()
    ids = text_or_ids
    if isinstance(text_or_ids, str):
        ids = np.asarray(tokenizer.tokenize(text_or_ids))
    return pictures.mark(pictures.make_pieces(tokenizer, ids, is_marked), marks)


def bits(string):
    return [character == "1" for character in string]


@pytest.mark.parametrize(
    "is_marked, expected",
    [
        ("000000", "banana"),
        ("111111", "<banana>"),
        ("010101", "b<a>n<a>n<a>"),
        ("110010", "<ba>na<n>a"),
    ],
)
def test_exactly_the_members(is_marked, expected):
    assert marked("banana", bits(is_marked)) == expected


@pytest.mark.parametrize("is_marked", ["0100", "0010", "0110"])
def test_a_character_of_several_bytes(is_marked):
    assert marked("aéb", bits(is_marked)) == "a<é>b"


def test_bytes_that_are_no_text():
    ids = [0, 0xC3 + 2, ord("a") + 2, 1, 0xA9 + 2]
    assert marked(ids, bits("00000")) == "<start>\ufffda<EOS>\ufffd"
    assert marked(ids, bits("01000")) == "<start><\ufffda><EOS>\ufffd"
    assert marked(ids, bits("00011")) == "<start>\ufffda<<EOS>\ufffd>"
    assert marked(ids[:2], bits("10")) == "<<start>>\ufffd"


def test_line_ends_show_where_they_are_marked():
    assert marked("a\n\nb", bits("0100")) == "a<↵\n>\nb"


def test_nothing_is_sent_to_the_terminal():
    shown = marked("\x1b[2J\x07\tx", bits("0000000"))
    assert shown == "\ufffd[2J\ufffd\tx"


def test_reverse_video():
    shown = marked("abc", bits("010"), marks=pictures.REVERSE_VIDEO)
    assert shown == "a\x1b[7mb\x1b[0mc"


def test_subwords():
    tokens = ["<pad>_", "<EOS>_", "cat", "s_", "dog_", *"\\_u;0123456789"]
    tokens += list("<>ESOacdgopst")
    tokenizer = SubwordTokenizer(tokens)
    assert marked([2, 3, 4], bits("011"), tokenizer) == "cat<s dog >"


def test_words():
    words = ["<pad>", "<EOS>", "cat", "dog_"]
    tokenizer = WordTokenizer([*words, "<newline>"])
    shown = marked([2, 3, 4, 2, 1], bits("01100"), tokenizer)
    assert shown == "cat <dog_ ↵\n>cat <EOS> "
    # Without the token it is a word as any other.
    shown = marked("cat <newline> dog_", bits("011"), WordTokenizer([*words, "<unk>"]))
    assert shown == "cat <<unk> dog_ >"


def test_ids():
    pieces = pictures.make_pieces(None, [5, 17], [False, True])
    assert pictures.mark(pieces, pictures.BRACKETS) == "5 ⟦17 ⟧"


def test_one_piece_with_marks_of_its_own():
    ids = np.asarray(ByteTokenizer().tokenize("aébc"))
    pieces = pictures.make_pieces(ByteTokenizer(), ids, bits("11001"))
    numbers = [pictures.find_piece(ByteTokenizer(), ids, i) for i in range(5)]
    assert numbers == [0, 1, 1, 2, 3]
    for number, expected in enumerate(["{a}<é>b<c>", "<a>{é}b<c>", "<aé>{b}<c>"]):
        shown = pictures.mark_around(pieces, number, ("<", ">"), ("{", "}"))
        assert shown == expected


def test_context():
    tokenizer = ByteTokenizer()
    ids = np.asarray(tokenizer.tokenize("a\tb\n" + "é" * 30 + "xyz"))
    assert pictures.in_one_line(tokenizer, ids[:4]) == "a⇥b↵"
    assert pictures.context(tokenizer, ids, 0) == ""
    assert pictures.context(tokenizer, ids, 4) == "a⇥b↵"
    assert pictures.context(tokenizer, ids, 66) == "é" * 22 + "xy"
    assert pictures.context(None, [7, 8, 9], 2) == "7 8 "
