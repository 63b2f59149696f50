"""Tests of the characters of words; those of other tokens are in scoring_test."""

import sys

import keras_hub
import numpy as np
import pytest

from routing_tf.tokenizers import WordTokenizer
from routing_tf.tokenizers.text_stream import token_offsets

WORDS = ["the", "cat", "<unk>", "<EOS>", "<pad>", "naïve", "中文", "🙂", "\u200b", "\0"]
CHARACTERS = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD7FF < c < 0xE000]
WHITE_SPACE = [c for c in CHARACTERS if c.isspace()]


@pytest.fixture(params=[False, True], ids=["words", "newlines"])
def tokenizer(request):
    options = {"newline": request.param, "unknown": True}
    return WordTokenizer(WordTokenizer.build_vocabulary(WORDS, **options))


def offsets_of(tokenizer, text):
    return token_offsets(tokenizer, text, tokenizer.tokenize(text).numpy()).tolist()


def test_white_space_belongs_to_the_word_in_front(tokenizer):
    text = "\t the  cat \n\n 🙂\u3000"
    if tokenizer.newline_token_id is None:
        expected = [[0, 7], [7, 14], [14, 16]]
    else:
        expected = [[0, 7], [7, 11], [11, 12], [12, 14], [14, 16]]
    assert offsets_of(tokenizer, text) == expected
    newline = [] if tokenizer.newline_token_id is None else [[0, 2]]
    assert offsets_of(tokenizer, " \n") == newline
    assert offsets_of(tokenizer, "") == []


def test_every_character_is_in_its_word(tokenizer):
    text = "the" + "the".join(CHARACTERS)
    ids = tokenizer.tokenize(text).numpy()
    offsets = token_offsets(tokenizer, text, ids)
    assert offsets.dtype == np.int64
    assert offsets[0, 0] == 0 and offsets[-1, 1] == len(text)
    np.testing.assert_array_equal(offsets[1:, 0], offsets[:-1, 1])
    words = [text[start:end].split() for start, end in offsets]
    assert sum(words, []) == text.split()
    is_word = ids != tokenizer.newline_token_id
    assert [len(each) for each in words] == is_word.astype("int").tolist()
    assert len(words) > len(WHITE_SPACE)


def test_words_that_look_like_tokens(tokenizer):
    found = offsets_of(tokenizer, "<pad> <EOS>  <newline>")
    assert found == [[0, 6], [6, 13], [13, 22]]
    # Its id is 0, that of padding.
    alone = WordTokenizer(["<pad>", "<EOS>", "a"])
    assert offsets_of(alone, "a <pad> <EOS>") == [[0, 2], [2, 8], [8, 13]]


def test_ids_of_another_text_are_refused(tokenizer):
    with pytest.raises(ValueError, match="`token_ids`.*3 .* 7"):
        token_offsets(tokenizer, "the cat", np.array([2, 3, 0]))


def test_other_tokenizers_are_refused():
    with pytest.raises(ValueError, match="`tokenizer`.*Received: Tokenizer"):
        token_offsets(keras_hub.tokenizers.Tokenizer(), "a", np.array([2]))
