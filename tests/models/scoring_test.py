import re

import numpy as np
import pytest

from routing_tf import layers
from routing_tf import models
from routing_tf import tokenizers
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.models import scoring
from routing_tf.tokenizers.text_stream import token_offsets
from tests import golden_cases
from tests.layers import helpers
from tests.models import small_models

LIMIT = small_models.LENGTH
CORPUS = [
    "the cat sat on the mat, and the cat had a hat.",
    "a cat\\dog_house sat; the hat had a mat; cats and dogs sat.",
] * 4


def language_model(tokenizer=None, **changes):
    tokenizer = tokenizers.ByteTokenizer() if tokenizer is None else tokenizer
    preprocessor = models.RoutingTransformerCausalLMPreprocessor(tokenizer)
    settings = {"vocabulary_size": tokenizer.vocabulary_size(), **changes}
    settings = {**small_models.GENERATING, **settings}
    return small_models.language_model(preprocessor=preprocessor, **settings)


@pytest.fixture(scope="module")
def lm():
    return language_model()


@pytest.fixture(scope="module")
def local_lm():
    return language_model(num_layers=1, num_routed_heads=0)


@pytest.fixture(scope="module")
def subword_lm():
    vocabulary = tokenizers.SubwordTokenizer.build_vocabulary(CORPUS, 60)
    tokenizer = tokenizers.SubwordTokenizer(vocabulary)
    return language_model(tokenizer, num_layers=1, num_routed_heads=0)


@pytest.fixture(scope="module", params=[False, True], ids=["words", "newlines"])
def word_lm(request):
    vocabulary = tokenizers.WordTokenizer.build_vocabulary(
        CORPUS, newline=request.param, unknown=True
    )
    tokenizer = tokenizers.WordTokenizer(vocabulary)
    return language_model(tokenizer, num_layers=1, num_routed_heads=0)


def expected(lm, token_ids):
    """Log-likelihoods of ids, from the logits of a call, in plain NumPy."""
    token_ids = np.asarray(token_ids)
    x = {
        "token_ids": np.concatenate([[0], token_ids[:-1]])[None].astype("int32"),
        "padding_mask": np.ones((1, len(token_ids)), "bool"),
    }
    logits = golden_cases.run(lm, x, training=False)[0][0].astype("float64")
    chosen = logits[np.arange(len(token_ids)), token_ids]
    return chosen - np.log(np.exp(logits).sum(-1))


def bytes_of(text):
    return np.frombuffer(text.encode(), "uint8").astype("int32") + 2


def assert_close(actual, wanted):
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


def assert_same(actual, wanted):
    """Asserts that two scores agree."""
    assert_close(actual.log_likelihoods, wanted.log_likelihoods)
    np.testing.assert_array_equal(actual.token_ids, wanted.token_ids)


def test_a_text_scores_what_the_logits_say(lm, compiled):
    text = "a cat, a mat"
    result = lm.score(text)
    wanted = expected(lm, bytes_of(text))
    assert_close(result.log_likelihoods, wanted)
    assert result.tokens == tuple(text)
    assert result.token_ids.tolist() == bytes_of(text).tolist()
    assert result.offsets.tolist() == [[i, i + 1] for i in range(12)]
    assert result.num_tokens == result.num_bytes == 12
    assert result.num_words == 4
    assert result.routing_scope == "full"
    assert result.num_left_out == 0
    assert result.misaligned_prefix_length is None
    assert_close(result.log_likelihood, wanted.sum())
    assert_close(result.loss, -wanted.mean())
    assert_close(result.perplexity, np.exp(-wanted.mean()))
    assert_close(result.bits_per_byte, -wanted.sum() / np.log(2) / 12)
    assert_close(result.perplexity_per_word, np.exp(-wanted.sum() / 4))


def test_reductions(lm):
    texts = ["one", "another one"]
    targets = ["one", [(0, 3), None]]
    scores = lm.score(texts, targets)
    for reduction in ("mean", "sum"):
        first, (second, third) = lm.score(texts, targets, reduction=reduction)
        for number, score in zip((first, second, third), (scores[0], *scores[1])):
            assert isinstance(number, float)
            assert_close(number, getattr(np, reduction)(score.log_likelihoods))
    assert_close(lm.score("one", reduction="sum"), first)


def test_a_batch_scores_as_its_texts_alone(lm):
    texts = ["the cat sat on the mat", "a", "no dog", "the end of it"]
    results = lm.score(texts, batch_size=3)
    assert len(results) == 4
    for text, result in zip(texts, results):
        assert_close(result.log_likelihoods, expected(lm, bytes_of(text)))
        assert_same(lm.score(text), result)


@pytest.mark.parametrize(
    "changes", [{"num_cluster_strided_heads": 2, "key_dim": 4}, {"routing": "hashed"}]
)
def test_prefixes_need_heads_without_a_leak(changes):
    lm = language_model(compatibility="trained", **changes)
    message = "'prefix'.*compatibility='trained'"
    with pytest.raises(ValueError, match=message):
        lm.score("the cat", routing_scope="prefix")


def test_spans_of_characters(lm):
    text = "the cat sat"
    whole = lm.score(text).log_likelihoods
    cat, rest, everything = lm.score(text, [(4, 7), (7, 11), None])
    assert_close(cat.log_likelihoods, whole[4:7])
    assert "".join(cat.tokens) == "cat"
    assert cat.num_bytes == 3 and cat.num_words == 1
    assert_close(rest.log_likelihoods, whole[7:])
    assert_close(everything.log_likelihoods, whole)
    assert_same(lm.score(text, (4, 7)), cat)
    (first,), second = lm.score([text, text], [[(4, 7)], np.array([7, 11])])
    assert_same(first, cat)
    assert_same(second, rest)


def test_spans_of_unicode_text(lm):
    text = "naïve 🙂 x"
    ids = bytes_of(text)
    whole = expected(lm, ids)
    smile, vowel = lm.score(text, [(6, 7), "ï"])
    assert_close(smile.log_likelihoods, whole[7:11])
    assert smile.offsets.tolist() == [[6, 7]] * 4
    assert smile.num_bytes == 4 and smile.num_tokens == 4
    assert_close(vowel.log_likelihoods, whole[2:4])
    assert lm.score(text).num_bytes == len(ids) == 13


def test_of_a_repeated_sub_string_the_last_is_scored(lm):
    text = "the cat, the cat sat"
    result = lm.score(text, "the cat")
    assert result.misaligned_prefix_length == 0
    assert result.offsets[[0, -1]].tolist() == [[9, 10], [15, 16]]
    assert_same(lm.score(text, (9, 16)), result)


def test_a_sub_string_that_is_not_there(lm):
    for part in ("dog", "Zcat", "", "cat sat on"):
        with pytest.raises(ValueError, match=f"Received: {part!r}"):
            lm.score("the cat sat", part)


def subwords(lm, text):
    return np.asarray(lm.preprocessor.tokenizer.tokenize(text))


@pytest.mark.parametrize(
    "text",
    [*CORPUS[:2], " the  cat ", "cat\n\nsat", "\\u _x", "10 é½🙂 cat 🙂", "a b", "_"],
)
def test_characters_of_subwords(subword_lm, text):
    tokenizer = subword_lm.preprocessor.tokenizer
    ids = subwords(subword_lm, text)
    offsets = token_offsets(tokenizer, text, ids)
    starts, ends = offsets.T
    assert (starts < ends).all()
    assert (np.diff(starts) >= 0).all() and (np.diff(ends) >= 0).all()
    assert starts[0] == 0 and ends[-1] == len(text)
    assert (starts[1:] <= ends[:-1]).all()
    # Tokens that end where one of them begins are those of that part of the text.
    places = np.flatnonzero(starts[1:] == ends[:-1]) + 1
    parts = tokenizer.detokenize([ids[:place].tolist() for place in places])
    for place, part in zip(places, parts):
        assert part.rstrip(" ") == text[: starts[place]].rstrip(" ")


def with_these_first(*tokens):
    """A tokenizer of subwords with these and all characters that it needs."""
    characters = "\\u;0123456789theca<pd>EOS"
    return tokenizers.SubwordTokenizer(["<pad>_", "<EOS>_", *tokens, *characters])


def test_the_rule_for_subwords():
    tokenizer = with_these_first("the_", "cat", "_", ".")
    text = "the cat. 🙂"
    ids = tokenizer.tokenize(text).numpy()
    names = [tokenizer.id_to_token(id) for id in ids]
    assert names[:6] == ["the_", "cat", "_", ".", "\\", "3"]
    offsets = token_offsets(tokenizer, text, ids).tolist()
    # A space that is left out; an end of a word alone; written-out characters.
    assert offsets[:4] == [[0, 4], [4, 7], [6, 7], [7, 8]]
    assert set(map(tuple, offsets[4:])) == {(8, 9), (9, 10)}


def test_spans_of_subwords(subword_lm):
    text = "the cat sat on the mat"
    ids = subwords(subword_lm, text)
    whole = expected(subword_lm, ids)
    offsets = token_offsets(subword_lm.preprocessor.tokenizer, text, ids)
    for span in ((4, 7), (5, 6), (0, 22), (15, 20)):
        result = subword_lm.score(text, span)
        overlap = (offsets[:, 0] < span[1]) & (offsets[:, 1] > span[0])
        assert_close(result.log_likelihoods, whole[overlap])
        covered = text[offsets[overlap].min() : offsets[overlap].max()]
        assert result.num_bytes == len(covered)
        assert result.num_words == len(covered.split())


def test_misaligned_prefix(subword_lm):
    text = "the cat sat, a cat"
    aligned = subword_lm.score(text, "cat sat")
    assert aligned.misaligned_prefix_length == 0
    assert aligned.offsets[0, 0] == 4
    # On its own, the space in front is a word; in the text it is left out.
    result = subword_lm.score(text, " cat sat")
    dropped = len(subwords(subword_lm, " cat sat")) - aligned.num_tokens
    assert result.misaligned_prefix_length == dropped > 0
    assert_same(result, aligned)
    # The rest alone stands elsewhere too, behind another prefix.
    other = subword_lm.score("the cat, 2 cat, the dog", "e cat")
    assert other.misaligned_prefix_length > 0
    assert other.offsets[0, 0] == 4
    with pytest.raises(ValueError, match="Received: 'the ca'"):
        subword_lm.score(text, "the ca")


def test_a_token_that_ends_a_word_does_not_stand_for_another_word():
    tokenizer = with_these_first("cat", "_", ".")
    lm = language_model(tokenizer, num_layers=1, num_routed_heads=0)
    # Both end with the token "_".
    assert subwords(lm, "ca")[-1] == subwords(lm, "cat.")[1] == 3
    with pytest.raises(ValueError, match="Received: 'ca'"):
        lm.score("cat.", "ca")
    assert lm.score("cat cat.", "cat").offsets.tolist() == [[4, 7], [6, 7]]


def test_words(word_lm):
    text = " the  cat sat on\n the mug "
    newline = word_lm.preprocessor.tokenizer.newline_token_id is not None
    ids = word_lm.preprocessor.tokenizer.encode(text)
    result = word_lm.score(text)
    assert_close(result.log_likelihoods, expected(word_lm, ids))
    names = ["the", "cat", "sat", "on", *["<newline>"] * newline, "the", "<unk>"]
    assert result.tokens == tuple(names)
    assert result.offsets[:3].tolist() == [[0, 6], [6, 10], [10, 14]]
    assert (result.num_bytes, result.num_words) == (len(text), 6)
    twice = scoring.join([result, result])
    assert (result.num_unknown, twice.num_unknown, twice.bits_per_byte) == (1, 2, None)
    assert word_lm.score("the <unk> sat").bits_per_byte > 0
    per_word = np.exp(-result.log_likelihood / 6)
    assert_close(result.perplexity_per_word, per_word)
    cut = word_lm.score(text * 5, too_long="cut")
    assert cut.num_tokens == LIMIT and cut.num_left_out == 5 * len(ids) - LIMIT
    assert cut.offsets[-1, 1] == cut.num_bytes
    padded = tokenizers.WordTokenizer(
        word_lm.preprocessor.tokenizer.get_vocabulary(), sequence_length=8
    )
    with pytest.raises(ValueError, match="`token_ids`.* 8 .* 3 "):
        token_offsets(padded, "the", padded.tokenize("the").numpy())


@pytest.mark.parametrize(
    "part, span",
    [
        ("the", (20, 23)),
        ("cat", (7, 10)),
        ("cat  ", (7, 10)),
        (" \tcat", (7, 10)),
        ("cat  sat", (7, 15)),
        ("sat\u3000", (12, 15)),
        ("mug", (24, 27)),
        ("mug ", (24, 27)),
        ("  the \tcat", (2, 10)),
        ("the \tcat", (2, 10)),
    ],
)
def test_words_as_sub_strings(word_lm, part, span):
    text = "  the \tcat  sat\u3000\n \n the mug \n"
    result = word_lm.score(text, part)
    same = word_lm.score(text, span)
    assert_same(result, same)
    np.testing.assert_array_equal(result.offsets, same.offsets)
    assert text[slice(*span)].split() == part.split()
    assert result.num_tokens == len(part.split())
    assert result.misaligned_prefix_length == 0


def test_sub_strings_of_parts_of_words(word_lm):
    text = "the cat sat, a dog"
    # Both are unknown words, as are "sat," and "dog".
    for part in ("at,", "do", "og", " "):
        with pytest.raises(ValueError, match=f"Received: {part!r}"):
            word_lm.score(text, part)
    for part in ("the  cat", "cat\nsat,", "cat a", "unheard"):
        with pytest.raises(ValueError, match=re.escape(f"Received: {part!r}")):
            word_lm.score(text, part)
    result = word_lm.score(text, "e cat sat,")
    assert result.misaligned_prefix_length == 1
    assert_same(result, word_lm.score(text, "cat sat,"))


def test_too_long(lm):
    text = "0123456789" * 3
    ids = bytes_of(text)
    with pytest.raises(ValueError, match=f"`texts`.* {LIMIT} .*Received: 30 .* 1\\."):
        lm.score(["a", text])
    cut = lm.score(text, too_long="cut")
    assert cut.num_left_out == 30 - LIMIT
    assert_close(cut.log_likelihoods, expected(lm, ids[:LIMIT]))
    assert cut.num_bytes == LIMIT
    windows = lm.score(text, too_long="windows", batch_size=1)
    assert windows.num_left_out == 0
    wanted = [expected(lm, ids[:LIMIT]), expected(lm, ids[LIMIT:])]
    assert_close(windows.log_likelihoods, np.concatenate(wanted))
    assert_same(
        lm.score(text, (LIMIT - 2, LIMIT + 2), too_long="windows"),
        lm.score(text, "2345", too_long="windows"),
    )


def test_spans_and_cuts(lm):
    text = "0123456789" * 3
    result = lm.score(text, (20, 30), too_long="cut")
    assert result.num_tokens == 4 and result.num_left_out == 6
    assert lm.score(text, "89", too_long="cut").offsets[0, 0] == 18
    with pytest.raises(ValueError, match=r" 24\. .*\(25, 30\)"):
        lm.score(text, (25, 30), too_long="cut")
    with pytest.raises(ValueError, match="'abc'.* 24 "):
        lm.score(f"{text}abc", "abc", too_long="cut")
    # Whole characters are kept.
    result = lm.score("x" * (LIMIT - 1) + "é", too_long="cut")
    assert result.num_tokens == LIMIT - 1 and result.num_left_out == 2


def test_the_shorter_of_two_limits():
    lm = language_model(num_layers=1, num_routed_heads=0, truncate_length=8)
    assert lm.score("0123456789", too_long="cut").num_tokens == 8


def test_prefixes_of_local_heads_are_the_text(local_lm):
    texts = ["the cat sat on the mat, and off", "a"]
    options = {"too_long": "windows", "batch_size": 5}
    full = local_lm.score(texts, **options)
    prefix = local_lm.score(texts, routing_scope="prefix", **options)
    for one, other in zip(full, prefix):
        assert_same(one, other)
        assert (one.routing_scope, other.routing_scope) == ("full", "prefix")


def test_prefixes_of_one_routed_layer_are_prefixes_alone():
    # With one routed layer nothing else changes when the prefix grows.
    lm = language_model()
    text = "the cat"
    ids = bytes_of(text)
    by_hand = [expected(lm, ids[: end + 1])[-1] for end in range(len(ids))]
    result = lm.score(text, routing_scope="prefix", batch_size=4)
    assert_close(result.log_likelihoods, by_hand)
    difference = np.abs(result.log_likelihoods - lm.score(text).log_likelihoods)
    assert difference.max() > 1e-3  # or the scopes would not matter
    span = lm.score(text, (2, 4), routing_scope="prefix")
    assert_close(span.log_likelihoods, by_hand[2:4])


@small_models.FURTHER
def test_the_scope_is_that_of_the_hyperparameters():
    text = "the cat sat"
    options = {"routing_scope": "prefix", "prefix_block_size": 5}
    trained_in_prefix = language_model(**options)
    (heads,) = [
        layer
        for layer in layers_inside(trained_in_prefix)
        if isinstance(layer, layers.RoutedHeads)
    ]
    assert heads.prefix_block_size == 5
    result = trained_in_prefix.score(text)
    assert result.routing_scope == "prefix"
    assert_same(result, trained_in_prefix.score(text, routing_scope="prefix"))
    assert_close(result.log_likelihoods, expected(trained_in_prefix, bytes_of(text)))
    assert language_model().score(text).routing_scope == "full"


def test_ids_without_a_tokenizer():
    lm = small_models.language_model(num_layers=1)
    ids = [[3, 4, 5, 6], [7, 8]]
    results = lm.score(ids)
    for row, result in zip(ids, results):
        assert_close(result.log_likelihoods, expected(lm, row))
        assert result.tokens is None
        assert result.bits_per_byte is None
        assert result.perplexity_per_word is None
    assert_same(lm.score(np.array(ids[0])), results[0])
    padded = {
        "token_ids": np.array([[3, 4, 5, 6], [7, 8, 0, 0]]),
        "padding_mask": np.array([[1, 1, 1, 1], [1, 1, 0, 0]], "bool"),
    }
    for one, other in zip(lm.score(padded), results):
        assert_same(one, other)
    span = lm.score(ids[0], (1, 3))
    assert_close(span.log_likelihoods, results[0].log_likelihoods[1:3])
    with pytest.raises(ValueError, match="Received: 'a'"):
        lm.score(ids[0], "a")
    with pytest.raises(ValueError, match="preprocessor"):
        lm.score("a")
    with pytest.raises(ValueError, match="`vocabulary_size`.*Received: 3 .* 31 .* 1$"):
        lm.score([[1], [3, 31]])


@helpers.further_on_jax
def test_places_of_packed_rows(lm):
    ids, segments = np.array([[0, 3, 4, 0, 5, 6, 0, 0]]), [[1, 1, 1, 2, 2, 2, 0, 0]]
    inputs = {
        "token_ids": ids,
        "padding_mask": np.array(segments) > 0,
        "segment_ids": np.array(segments),
    }
    packed = lm.score(token_ids=ids, segment_ids=segments)
    assert_close(packed, golden_cases.run(lm, inputs)[0])
    assert_close(packed[:, 3:6], lm.score(token_ids=ids[:, 3:6], segment_ids=[[1] * 3]))


def test_words_as_the_papers_count_them(lm):
    text = "the cat sat"
    result = lm.score(text, num_words=5)
    assert_close(result.perplexity_per_word, np.exp(-result.log_likelihood / 5))
    first, second = lm.score([text, " "], num_words=[5, None])
    assert (first.num_words, second.num_words) == (5, 0)
    assert second.perplexity_per_word is None
    for options in ({"targets": "cat"}, {"too_long": "cut"}):
        with pytest.raises(ValueError, match="`num_words`.*num_words=5"):
            lm.score(text * 3, num_words=5, **{"too_long": "windows", **options})


def test_scores_together(lm):
    scores = lm.score(["the cat", "é"])
    total = scoring.join(scores)
    assert total.num_tokens == 9 and total.num_bytes == 9 and total.num_words == 3
    assert_close(total.log_likelihood, sum(s.log_likelihood for s in scores))
    assert total.misaligned_prefix_length is None
    assert total.tokens == scores[0].tokens + scores[1].tokens
    with pytest.raises(ValueError, match=r"`scores`.*Received: 0 .*\[\]"):
        scoring.join([])


IDS = np.ones((1, 4), "int32")
BY_IDS = {"texts": None, "token_ids": IDS}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"targets": (3, 3)}, r" 11, .*\(3, 3\)"),
        ({"targets": (3, 12)}, r"Received: \(3, 12\)"),
        ({"targets": 3}, "`targets`.*Received: 3"),
        ({"texts": ["a", ""]}, "`texts`.*Received: .* 1$"),
        ({"texts": ["a", [1]]}, r"`texts`.*\['list', 'str'\]"),
        ({"texts": [1.5]}, r"`texts`.*`token_ids`.*\(\[1\.5\]\)"),
        ({"texts": ["a", "b"], "targets": ["a"]}, "`targets`.*Received: 1 .* 2 "),
        ({"reduction": "max"}, "`reduction`.*reduction='max'"),
        ({"routing_scope": "past"}, "`routing_scope`.*routing_scope='past'"),
        ({"too_long": "no"}, "`too_long`.*too_long='no'"),
        ({"batch_size": 0}, "`batch_size`.*batch_size=0"),
        ({"num_words": 0}, "`num_words`.*num_words=0"),
        ({"texts": None}, r"`texts`.*Received: \w+$"),
        ({"texts": b"a cat"}, r"`texts`.*Received: \w+$"),
        (
            {"texts": {"token_ids": [[9, 9]], "padding_mask": [[True]]}},
            r"`padding_mask`.*`token_ids`.*\[\(1,\)\] .*\[\(2,\)\]",
        ),
        (
            {"texts": {"token_ids": [[9, 9]], "segment_ids": [[1, 2]]}},
            r"`texts`.*Received: .* token_ids, segment_ids\.",
        ),
        ({"texts": {"ids": [[9, 9]]}}, "`texts`.*`padding_mask`.*segment_ids="),
        # As keras_hub's models are scored.
        ({"token_ids": IDS}, "`texts`.*`token_ids`.*Received: both"),
        ({**BY_IDS, "targets": [(0, 1)]}, r"`targets`.*targets=\[\(0, 1\)\]"),
        ({"targets": [(0, 1)], "padding_mask": IDS}, "`targets`.*targets="),
        ({"padding_mask": IDS}, "`token_ids`.*Received: str"),
        ({"texts": None, "padding_mask": IDS}, "`token_ids`.*Received: NoneType"),
        ({**BY_IDS, "scoring_mode": "loss"}, "`target_ids`.*target_ids=None"),
        ({**BY_IDS, "scoring_mode": "bits"}, "`scoring_mode`.*scoring_mode='bits'"),
        ({**BY_IDS, "routing_scope": "all"}, "`routing_scope`.*routing_scope='all'"),
    ],
)
def test_refused(lm, arguments, message):
    with pytest.raises(ValueError, match=message):
        lm.score(**{"texts": "the cat sat", **arguments})


def test_a_character_that_does_not_fit_is_refused():
    lm = language_model(max_sequence_length=3, num_layers=1, num_routed_heads=0)
    with pytest.raises(ValueError, match="`texts`.*Received: '🎉🎉'"):
        lm.score("\U0001f389\U0001f389", too_long="cut")


def test_probabilities_must_be_finite():
    lm = language_model(num_layers=1, num_routed_heads=0)
    lm.logits_dense.bias.assign(np.full(lm.logits_dense.bias.shape, np.nan))
    with pytest.raises(ValueError, match="Received: log-likelihoods"):
        lm.score("a cat")
