import functools
import json
import os
import pathlib
import re
import unicodedata

import numpy as np
import pytest

from routing_tf.tokenizers import SubwordTokenizer

REFERENCE = os.environ.get("ROUTING_TF_REFERENCE_DIR")
needs_reference = pytest.mark.skipif(
    not REFERENCE, reason="needs ROUTING_TF_REFERENCE_DIR"
)
TEXTS = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "a b",
    "a  b ",
    " the cat  sat on the mat.\n",
    "snake_case __x__ _",
    "_ _",
    "\\ \\_ \\u \\- \\+ \\\\+_-",
    "a\\1234;b \\10; ;",
    "naïve 🙂\r\n\ttab\u2028line",
    "e\u0301 中文 x² ½ Ⅷ ٣",
    "\ufeffmark\x00zero\x00",
    "<pad>_ <EOS>",
]
CORPUS = [
    "The cat sat on the mat, and the dog_house stood behind the mat.",
    "A naïve catalogue of cats: sat, mat, hat; that is all there is.",
    "dogs and cats\nand mats\\hats 10 20 2024 <b>x</b> __init__ ½ e\u0301 --- ---",
] * 3


# tensor2tensor's rules in plain Python: the reference of the tests below.
def is_alphanumeric(character):
    return unicodedata.category(character)[0] in "LN"


def reference_words(text):
    words = []
    for character in text:
        if words and is_alphanumeric(words[-1][-1]) == is_alphanumeric(character):
            words[-1] += character
        else:
            words.append(character)
    last = len(words) - 1
    return [w for i, w in enumerate(words) if w != " " or i in (0, last)]


def reference_encode(vocabulary, texts):
    ids = {token: id for id, token in enumerate(vocabulary)}
    longest = max(map(len, vocabulary))
    alphabet = set("".join(vocabulary)) | set("\\_u;0123456789")
    result = []
    for text in texts:
        result.append([])
        for word in reference_words(text):
            word = word.replace("\\", "\\\\").replace("_", "\\u")
            word = [c if c in alphabet and c != "\n" else f"\\{ord(c)};" for c in word]
            word = "".join(word) + "_"
            while word:
                end = next(n for n in range(longest, 0, -1) if word[:n] in ids)
                result[-1].append(ids[word[:end]])
                word = word[end:]
    return result


def reference_unescape(match):
    if match.group(1) is None:
        return "_" if match.group(0) == "\\u" else "\\"
    try:
        return chr(int(match.group(1)))
    except (ValueError, OverflowError):
        return "\u3013"


def reference_decode(vocabulary, ids):
    words = "".join(vocabulary[id] for id in ids).split("_")
    escapes = re.compile(r"\\u|\\\\|\\([0-9]+);")
    words = [escapes.sub(reference_unescape, word) for word in words if word]
    text = ""
    for i, word in enumerate(words):
        if i and is_alphanumeric(words[i - 1][0]) and is_alphanumeric(word[0]):
            text += " "
        text += word
    return text


@functools.cache
def assigned_characters():
    # Later versions of Unicode may be known to Python and not to TensorFlow.
    category = unicodedata.ucd_3_2_0.category
    return [c for c in map(chr, range(0x110000)) if category(c) not in ("Cn", "Cs")]


def random_texts(count, seed):
    """Random texts of pieces that matter, and of any assigned characters."""
    generator = np.random.default_rng(seed)
    pieces = [" ", " ", "_", "\\", "\\u", ";", "1", "42", "cat", "the", "é", "e\u0301"]
    pieces += ["\n", "\t", "\r", "\x00", "🙂", "中", "-", ", ", "\u00a0", "\\10;", "u"]
    texts = []
    for _ in range(count):
        drawn = [
            values[generator.integers(len(values))]
            for values in (pieces, assigned_characters())
            for _ in range(generator.integers(10))
        ]
        texts.append("".join(drawn[i] for i in generator.permutation(len(drawn))))
    return texts


@pytest.fixture(scope="module")
def vocabulary():
    return SubwordTokenizer.build_vocabulary(CORPUS, 150)


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return SubwordTokenizer(vocabulary)


@pytest.fixture(scope="module")
def golden():
    folder = pathlib.Path(REFERENCE, "golden", "pg19")
    cases = json.loads((folder / "text_encoder.json").read_text())
    return SubwordTokenizer(next(folder.glob("*.subwords"))), cases


@needs_reference
def test_golden_ids_and_texts(golden):
    tokenizer, cases = golden
    assert tokenizer.vocabulary_size() == cases["vocab_size"] == 98302
    assert tokenizer.get_vocabulary()[:12] == cases["first_subtokens"]
    assert tokenizer.pad_token_id == cases["pad_id"]
    assert tokenizer.end_token_id == cases["eos_id"]
    texts = [case["text"] for case in cases["cases"]]
    all_ids = tokenizer.tokenize(texts).to_list()
    for case, ids in zip(cases["cases"], all_ids, strict=True):
        assert ids == case["ids"], case["text"]
        assert [tokenizer.id_to_token(id) for id in ids] == case["subtokens"]
        assert tokenizer.tokenize(case["text"]).numpy().tolist() == case["ids"]
        assert tokenizer.detokenize(case["ids"]) == case["decoded"]
        assert tokenizer.detokenize([*case["ids"], 1, 0, 0]) == case["decoded_strip"]
    assert tokenizer.detokenize(all_ids) == [c["decoded"] for c in cases["cases"]]
    assert tokenizer.detokenize(cases["random_ids"]) == cases["random_ids_decoded"]


@needs_reference
def test_reference_of_these_tests_gives_the_golden_ids_and_texts(golden):
    tokenizer, cases = golden
    vocabulary = tokenizer.get_vocabulary()
    texts = [case["text"] for case in cases["cases"]]
    all_ids = [case["ids"] for case in cases["cases"]]
    assert reference_encode(vocabulary, texts) == all_ids
    for case in cases["cases"]:
        assert reference_decode(vocabulary, case["ids"]) == case["decoded"]
    text = reference_decode(vocabulary, cases["random_ids"])
    assert text == cases["random_ids_decoded"]


def test_ids_are_those_of_the_rules(tokenizer, vocabulary):
    texts = [*TEXTS, *CORPUS, *random_texts(500, seed=0)]
    ids = tokenizer.tokenize(texts)
    assert ids.to_list() == reference_encode(vocabulary, texts)
    assert tokenizer.detokenize(ids) == texts
    # Learned tokens are used: the corpus takes far fewer ids than characters.
    assert len(tokenizer.tokenize(CORPUS[0])) < len(CORPUS[0]) / 2


def test_long_words(tokenizer, vocabulary):
    texts = ["cat" * 2000, "🙂" * 300, "_" * 999, " " * 999, "a b" * 999]
    ids = tokenizer.tokenize(texts).to_list()
    assert ids == reference_encode(vocabulary, texts)
    assert tokenizer.detokenize(ids) == texts


def test_bytes_that_are_not_utf8(tokenizer):
    ids = tokenizer.tokenize([b"cat\xff\xfe sat"])
    assert tokenizer.detokenize(ids) == ["cat\ufffd\ufffd sat"]


def test_random_ids(tokenizer, vocabulary):
    generator = np.random.default_rng(3)
    # Escapes, most of them not valid, are frequent among these.
    characters = [tokenizer.token_to_id(c) for c in "\\\\\\u;_019a -"]
    draws = [
        generator.integers(2, len(vocabulary), (300, 12)),
        generator.choice(characters, (300, 16)),
    ]
    for ids in draws:
        expected = [reference_decode(vocabulary, row) for row in ids]
        expected = [re.sub("[\ud800-\udfff]", "\ufffd", text) for text in expected]
        assert tokenizer.detokenize(ids) == expected


@pytest.mark.parametrize(
    "escaped, text",
    [
        ("\\1114111;", "\U0010ffff"),
        ("\\1114112;", "\u3013"),
        ("\\99999999999999999999;", "\u3013"),
        ("\\000000000000097;", "a"),
        ("\\55296;", "\ufffd"),
        ("\\0;", "\x00"),
        ("\\u\\\\u\\;\\a\\10", "_\\u\\;\\a\\10"),
        ("\\97;_b_\\32;_c", "a b c"),
        ("a__b", "a b"),
        ("_", ""),
    ],
)
def test_escapes(tokenizer, escaped, text):
    ids = [tokenizer.token_to_id(character) for character in escaped]
    assert tokenizer.detokenize(ids) == text


def test_built_vocabularies():
    vocabulary = SubwordTokenizer.build_vocabulary(CORPUS, 70)
    assert len(vocabulary) <= 70
    assert vocabulary[:2] == ["<pad>_", "<EOS>_"]
    larger = SubwordTokenizer.build_vocabulary(CORPUS, 150)
    assert 70 < len(larger) <= 150
    assert {"the_", "mat_", "\\u_"} < set(larger)
    as_bytes = (text.encode() for text in CORPUS)
    assert larger == SubwordTokenizer.build_vocabulary(as_bytes, 150)
    # The smallest vocabulary, and characters of a text that are too many for it.
    smallest = SubwordTokenizer.build_vocabulary(["中文字" * 9, "ω" * 60], 24)
    assert len(smallest) == 24
    many = "".join(map(chr, range(0x4E00, 0x4E00 + 500)))
    for tokens in (smallest, SubwordTokenizer.build_vocabulary([many] * 9, 60)):
        tokenizer = SubwordTokenizer(tokens)
        assert tokenizer.detokenize(tokenizer.tokenize([many, "ω x"])) == [many, "ω x"]


def test_files(vocabulary, tmp_path):
    path = tmp_path / "tokens"
    # Double quotes, quotes and line separators in tokens, no newline at the end.
    extra = ["\u2028", "'", '"', "\r", "'\"", "\x1c"]
    lines = [f'"{token}"' for token in [*vocabulary, *extra]]
    path.write_bytes("\n".join(dict.fromkeys(lines)).encode())
    other = SubwordTokenizer(path)
    assert set(extra) <= set(other.get_vocabulary())
    path.write_bytes("\r\n".join(dict.fromkeys(lines)).encode())
    assert SubwordTokenizer(path).get_vocabulary() == other.get_vocabulary()
    copy = tmp_path / "copy"
    other.save_vocabulary(copy)
    assert SubwordTokenizer(copy).get_vocabulary() == other.get_vocabulary()


@pytest.mark.parametrize(
    "message, change",
    [
        (r"`vocabulary`.*\['cat'\]", lambda tokens: [*tokens, "cat", "cat"]),
        (r"`vocabulary`.*\['\\n'\]", lambda tokens: [*tokens, "\n"]),
        (r"`vocabulary`.*\['中', '文'\]", lambda tokens: [*tokens, "中文"]),
        (r"`vocabulary`.*\[';'\]", lambda tokens: [x for x in tokens if x != ";"]),
    ],
)
def test_refused_tokens(message, change, vocabulary):
    with pytest.raises(ValueError, match=message):
        SubwordTokenizer(change(vocabulary))


def test_names_of_special_tokens_without_an_end(vocabulary):
    assert SubwordTokenizer(["<pad>", "<EOS>", *vocabulary[2:]]).vocabulary_size()


@pytest.mark.parametrize("line", ["the_", "'the_", "'", "'x\"", ""])
def test_refused_files(line, tmp_path):
    (tmp_path / "tokens").write_text(f"'<pad>_'\n'<EOS>_'\n{line}\n'a'\n")
    with pytest.raises(ValueError, match="`vocabulary`.* 3 .*/tokens'"):
        SubwordTokenizer(tmp_path / "tokens")


def test_vocabularies_that_are_too_small():
    with pytest.raises(ValueError, match="`vocabulary_size`.*vocabulary_size=23"):
        SubwordTokenizer.build_vocabulary(CORPUS, 23)
