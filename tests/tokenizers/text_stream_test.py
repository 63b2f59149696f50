import keras_hub
import numpy as np
import pytest

from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import SubwordTokenizer
from routing_tf.tokenizers import WordTokenizer
from routing_tf.tokenizers.text_stream import text_stream

TEXTS = ["one fish, two fish", "red fish; blue fish\n\nnew_fish \\ 7 cafés"]


@pytest.fixture(scope="module")
def subwords():
    return SubwordTokenizer(SubwordTokenizer.build_vocabulary(TEXTS, 64))


@pytest.fixture(scope="module", params=[(), ("newline", "unknown")], ids=str)
def words(request):
    tokens = dict.fromkeys(request.param, True)
    return WordTokenizer(WordTokenizer.build_vocabulary(TEXTS, **tokens))


def read(stream, token_ids):
    """The pieces of a stream, the last of them what is left at the end."""
    return [*(stream.add(int(id)) for id in token_ids), stream.end()]


def test_bytes_of_a_character_are_held_back():
    tokenizer = ByteTokenizer()
    pieces = read(text_stream(tokenizer), tokenizer("né€!"))
    assert pieces == ["n", "", "é", "", "", "€", "!", ""]


def test_random_bytes_are_those_of_the_tokenizer():
    tokenizer = ByteTokenizer()
    values = [0x41, 0x80, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xED, 0xA0, 0xF4, 0xFF]
    ids = [0, 2 + 256, *(2 + value for value in values)]
    for row in np.random.default_rng(0).choice(ids, (100, 12)):
        assert "".join(read(text_stream(tokenizer), row)) == tokenizer.detokenize(row)


def test_subwords_of_a_word_are_held_back(subwords):
    ids = subwords.tokenize("two blue caféfishes").numpy().tolist()
    assert len(ids) > 4
    pieces = read(text_stream(subwords), ids)
    assert [piece for piece in pieces if piece] == ["two", " blue", " caféfishes"]
    assert len(pieces) == len(ids) + 1
    unfinished = read(text_stream(subwords), ids[:-1])
    assert "".join(unfinished) == subwords.detokenize(ids[:-1])
    assert unfinished[-1].startswith(" c")


def test_random_subwords_are_those_of_the_tokenizer(subwords):
    rows = np.random.default_rng(0).integers(2, 70, (20, 12))
    for row, text in zip(rows, subwords.detokenize(rows), strict=True):
        assert "".join(read(text_stream(subwords), row)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_context_is_continued(subwords, text):
    ids = subwords.tokenize(text).numpy().tolist()
    is_end = [subwords.id_to_token(id).endswith("_") for id in ids]
    places = np.flatnonzero(is_end) + 1
    starts = subwords.detokenize([ids[:place] for place in places])
    for place, start in zip(places, starts, strict=True):
        rest = read(text_stream(subwords, ids[:place]), ids[place:])
        assert start + "".join(rest) == text


def test_words_come_at_once():
    tokenizer = WordTokenizer(WordTokenizer.build_vocabulary(TEXTS, newline=True))
    ids = tokenizer.encode("one fish\n\ntwo").tolist()
    ids[1:1] = [0, -1]
    pieces = read(text_stream(tokenizer), ids)
    assert pieces == ["one", "", " \ufffd", " fish", "\n", "\n", "two", ""]
    # Padding behind a prompt is no text.
    fish, newline = ids[3:5]
    for context in ([fish], [fish, 0, 0], np.array([newline, fish])):
        assert read(text_stream(tokenizer, context), [fish]) == [" fish", ""]
    for context in ([0], [fish, newline], [fish, newline, 0], [fish, 1]):
        assert read(text_stream(tokenizer, context), [fish]) == ["fish", ""]


def test_random_words_are_those_of_the_tokenizer_behind_every_context(words):
    size = words.vocabulary_size()
    # Padding, newlines and ids outside of the vocabulary too.
    ids = [0, -1, size, *[size - 1] * 4, *range(2, size - 1)]
    for row in np.random.default_rng(0).choice(ids, (20, 12)):
        starts = words.detokenize([row[:place] for place in range(13)])
        for place, start in enumerate(starts):
            pieces = read(text_stream(words, row[:place]), row[place:])
            assert start + "".join(pieces) == starts[-1]


def test_the_end_id_is_a_line_break(subwords, words):
    for tokenizer in (ByteTokenizer(), subwords, words):
        ids = tokenizer.tokenize("fish").numpy().tolist()
        pieces = read(text_stream(tokenizer), [*ids, 1, *ids[:-1], 1, *ids])
        unfinished = tokenizer.detokenize(ids[:-1])
        assert "".join(pieces) == f"fish\n{unfinished}\nfish"


def test_pieces_of_characters_are_held_back():
    letters = {"a": 0, "Ã": 1, "©": 2, "Ġ": 3, "Ġa": 4}
    tokenizer = keras_hub.tokenizers.BytePairTokenizer(letters, merges=["Ġ a"])
    stream = text_stream(tokenizer, context=[0])
    assert [stream.add(x) for x in (1, 2, 4, 1)] == ["", "é", " a", ""]
    assert stream.end() == "\ufffd"


def test_what_is_no_tokenizer_is_refused():
    with pytest.raises(ValueError, match="`tokenizer`.*Received: object"):
        text_stream(object())
