import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from routing_tf.tokenizers import WordTokenizer
from routing_tf.tokenizers import word_tokenizer

CORPUS = [
    " = The cat = \n \n the cat sat on the mat , \n",
    "the naïve dog_house stood @-@ behind \\n the mat 🙂 中文 e\u0301\n",
    "à … Å \ufeff \x00",
]
# Those of the test below, which looks at every character.
WHITE_SPACE = [c for c in map(chr, range(0x3001)) if c.isspace()]
TEXTS = [
    "",
    " ",
    "\n",
    "\n\n  \n",
    "the",
    " the\u00a0cat\n",
    "cat\r\nmat\n\n the",
    "the\u2028cat\x1fsat\x85on\u3000the mat",
    "à … Å 🙂 e\u0301 中文\x00 \x00 \ufeff",
    "no such words",
]


# The rules in plain Python: the reference of the tests below.
def reference_words(vocabulary, text):
    if "<newline>" not in vocabulary:
        return text.split()
    lines = [line.split() for line in text.split("\n")]
    return lines[0] + [word for line in lines[1:] for word in ("<newline>", *line)]


def reference_encode(vocabulary, text):
    known = vocabulary[1:]  # the word <pad> is no padding
    words = reference_words(vocabulary, text)
    return [vocabulary.index(word if word in known else "<unk>") for word in words]


def reference_decode(vocabulary, ids):
    """The text of ids that are no end and no padding."""
    lines = " ".join(vocabulary[id] for id in ids).split("<newline>")
    return "\n".join(line.strip(" ") for line in lines)


def random_texts(count, seed):
    generator = np.random.default_rng(seed)
    words = [*" ".join(CORPUS).split(), "<pad>", "<unk>", "<newline>", "unknown", "x"]
    spaces = [*WHITE_SPACE, " ", " ", "\n", "\n", "\u200b", "\u180e", "\\s", "", " \n"]
    return [
        "".join(
            generator.choice(spaces) + generator.choice(words)
            for _ in range(generator.integers(20))
        )
        + str(generator.choice(spaces))
        for _ in range(count)
    ]


@pytest.fixture(scope="module", params=[False, True], ids=["words", "newlines"])
def vocabulary(request):
    return WordTokenizer.build_vocabulary(CORPUS, newline=request.param, unknown=True)


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return WordTokenizer(vocabulary)


def test_white_space_is_that_of_python():
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD7FF < c < 0xE000]
    pattern = word_tokenizer._WHITE_SPACE
    is_space = tf.strings.regex_full_match(tf.constant(characters), pattern).numpy()
    assert is_space.tolist() == [character.isspace() for character in characters]
    spaces = [c for c in characters if c.isspace()]
    assert spaces == WHITE_SPACE
    # Python's rule for characters is also its rule for splitting.
    assert all(f"a{c}b".split() == ["a", "b"] for c in spaces)
    assert len("".join(c for c in characters if not c.isspace()).split()) == 1


def test_ids_are_those_of_the_rules(tokenizer, vocabulary):
    texts = [*TEXTS, *CORPUS, *random_texts(500, seed=0)]
    expected = [reference_encode(vocabulary, text) for text in texts]
    assert tokenizer.tokenize(texts).to_list() == expected
    for text, row in zip(texts, expected, strict=True):
        encoded = tokenizer.encode(text)
        assert encoded.dtype == np.int32
        assert encoded.tolist() == row
    decoded = [reference_decode(vocabulary, row) for row in expected]
    assert tokenizer.detokenize(expected) == decoded


def test_words_that_look_like_tokens(tokenizer, vocabulary):
    unknown = tokenizer.unknown_token_id
    assert vocabulary[unknown] == "<unk>"
    a_text = "the <EOS> <unk> <pad> <s>"
    ids = [vocabulary.index("the"), 1, unknown, unknown, unknown]
    assert tokenizer.tokenize(a_text).numpy().tolist() == ids
    assert tokenizer.encode(a_text).tolist() == ids
    assert tokenizer.detokenize(ids[2:]) == "<unk> <unk> <unk>"
    newline = tokenizer.newline_token_id or unknown
    assert tokenizer.encode("<newline>").tolist() == [newline]
    without = WordTokenizer(["<pad>", "<EOS>", "a"])
    assert without.unknown_token_id is None
    assert without.tokenize("<pad> a <EOS>").numpy().tolist() == [0, 2, 1]
    assert without.encode("<pad> a <EOS>").tolist() == [0, 2, 1]


def test_unknown_words_are_refused_without_a_token():
    tokenizer = WordTokenizer(["<pad>", "<EOS>", "a"], sequence_length=2)
    match = "'naïve'.*`build_vocabulary.*unknown=True"
    for call in (tokenizer, tokenizer.tokenize, tokenizer.encode):
        with pytest.raises(ValueError, match=match):
            call("a a naïve b")
    with pytest.raises(ValueError, match=match):
        tokenizer.tokenize(["a a", "", "a naïve", "b"])
    in_a_function = tf.function(tokenizer.tokenize)
    with pytest.raises(tf.errors.InvalidArgumentError, match="unknown=True"):
        in_a_function(tf.constant(["a a", "a naive"]))
    assert in_a_function(tf.constant(["a a"])).numpy().tolist() == [[2, 2]]
    dataset = tf.data.Dataset.from_tensor_slices(["a", "b"]).map(tokenizer)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Received:\] \[b\]"):
        list(dataset)


def test_bytes_that_are_not_utf8():
    tokenizer = WordTokenizer(["<pad>", "<EOS>", "a\ufffdb", "c"])
    assert tokenizer.tokenize([b"a\xffb\xc2\xa0c"]).to_list() == [[2, 3]]


def test_detokenize_without_a_token_for_unknown_words():
    without = WordTokenizer(["<pad>", "<EOS>", "a"])
    assert without.detokenize([2, 3, -1, 2]) == "a \ufffd \ufffd a"


def test_built_vocabularies():
    texts = ["b a\u00a0c\nb", "<pad> é <EOS> a B <newline> c b"]
    words = ["<pad>", "<EOS>", "b", "a", "c", "B", "é"]
    build = WordTokenizer.build_vocabulary
    assert build(texts) == words
    assert build(text.encode() for text in texts) == words
    assert build(texts, newline=True) == [*words, "<newline>"]
    assert build(texts, unknown=True) == [*words, "<unk>"]
    assert build(texts, True, True) == [*words, "<unk>", "<newline>"]
    # Where the texts have it, as those of WikiText do, it is a word as any other.
    words.insert(2, "<unk>")
    texts += ["<unk> <unk> <unk> <unk>"]
    assert build(texts) == build(texts, unknown=True) == words


def test_errors_of_vocabularies(vocabulary, tmp_path):
    for tokens in (vocabulary[1:], ["<EOS>", "<pad>"], ["<pad>_", "<EOS>_"], ["a"]):
        received = re.escape(f"Received: {tokens[:2]}")
        with pytest.raises(ValueError, match=f"`vocabulary`.*{received}"):
            WordTokenizer(tokens)
    with pytest.raises(ValueError, match=r"`vocabulary`.*\['cat'\]"):
        WordTokenizer([*vocabulary, "cat", "cat"])
    for token in ("", "\n", "two words", " cat", "cat\u00a0", "a\x85"):
        received = re.escape(f"Received: {[token]}")
        with pytest.raises(ValueError, match=f"`vocabulary`.*{received}.*<newline>"):
            WordTokenizer([*vocabulary, token])
    path = tmp_path / "words"
    path.write_text("<pad>\n<EOS>\na\n\nb\n")
    with pytest.raises(ValueError, match=r"`vocabulary`.*\[''\]"):
        WordTokenizer(path)


def test_errors_of_calls(tokenizer):
    with pytest.raises(ValueError, match="`inputs`"):
        tokenizer.tokenize([["a"]])
    for text in (b"a", ["a"]):
        with pytest.raises(ValueError, match="`text`"):
            tokenizer.encode(text)


def test_texts_without_a_word():
    for texts in ([], [""], ["<EOS>\n"]):
        with pytest.raises(ValueError, match="`texts`"):
            WordTokenizer.build_vocabulary(texts, newline=True, unknown=True)
