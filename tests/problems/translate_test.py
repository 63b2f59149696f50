"""Tests of the problems of translation."""

import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.translate import wmt14

from routing_tf import problems
from routing_tf.files.names import SPLITS
from routing_tf.problems import array_store
from routing_tf.problems.datasets.pairs import WmtProblem
from tests.problems import prepared
from tests.problems.prepared import texts_of

# The sentences of each corpus, in English; in German they are in capitals.
EUROPARL = [f"Sentence number {n} is here." for n in range(30)]
CRAWL = ["One page", "", '"Two" pages!', "...", "A third page (3)"]
NEWS = [f"{n} news" for n in range(6)]
TRAIN = [*EUROPARL, *(text for text in CRAWL if text), *NEWS]
NEWS_FILE = "training/news-commentary-v9.de-en"
VALIDATION = ["The first of 2013.", "The second, of 2013"]
TEST = ["Of 2014: one", "Of 2014: two", "Of 2014: three"]


def german(text):
    return text.upper()


def sgm(sentences):
    segments = [f'<seg id="{n}">{text}</seg>\n' for n, text in enumerate(sentences, 1)]
    return "<doc>\n" + "".join(segments) + "</doc>\n"


def parallel(name, sentences):
    return {
        f"{name}.en": "\n".join(sentences),
        f"{name}.de": "\n".join(map(german, sentences)),
    }


def archives():
    europarl = parallel("training/europarl-v7.de-en", EUROPARL)
    return {
        "training-parallel-europarl-v7.tgz": europarl,
        "training-parallel-commoncrawl.tgz": parallel("commoncrawl.de-en", CRAWL),
        "training-parallel-nc-v9.tgz": parallel(NEWS_FILE, NEWS),
        "dev.tgz": {
            "dev/newstest2013-src.de.sgm": sgm(map(german, VALIDATION)),
            "dev/newstest2013-ref.en.sgm": sgm(VALIDATION),
            "dev/newstest2013.de": "\n".join(map(german, VALIDATION)),
            "dev/newstest2013.en": "\n".join(VALIDATION),
            "dev/newstest2014-deen-src.de.sgm": sgm(map(german, TEST)),
            "dev/newstest2014-deen-ref.en.sgm": sgm(TEST),
        },
    }


@pytest.fixture
def raw(raw, monkeypatch):
    """A folder of raw files, which tfds takes for the originals."""
    for name, content in archives().items():
        encoded = {file: text.encode() for file, text in content.items()}
        prepared.write_tar(raw / name, encoded)
    prepared.trust(monkeypatch, wmt14.Wmt14Translate, raw)
    return raw


def get(tmp_path, raw=None, name="translate_ende_wmt14", **options):
    """A problem of bytes, its data prepared if there are raw files."""
    return prepared.get(name, tmp_path, raw, **{"vocabulary": "bytes", **options})


def documents(sentences, length):
    """Sentences joined to documents of at most `length` bytes, without the end id."""
    found = []
    for sentence in sentences:
        if found and len(found[-1]) + 1 + len(sentence) < length:
            found[-1] += f" {sentence}"
        else:
            found.append(sentence)
    return [(text, german(text)) for text in found]


class TestDocuments:
    @pytest.mark.parametrize("lengths", [(100, 120), (120, 90)])
    def test_they_are_in_the_order_of_the_corpora(self, tmp_path, raw, lengths):
        options = dict(zip(("input_length", "sequence_length"), lengths))
        problem = get(tmp_path, raw, **options)
        for split, sentences in zip(SPLITS, (TRAIN, VALIDATION, TEST)):
            # Both sides fit.
            assert texts_of(problem, split) == documents(sentences, min(lengths))
            assert problem.tokens(split).num_too_long == 0

    def test_just_as_many_as_fit(self, tmp_path, raw):
        length = len(" ".join(EUROPARL[:3])) + 1
        options = {"sequence_length": 1000}
        problem = get(tmp_path, raw, input_length=length, **options)
        assert problem.pair("train", 0)[0].size == length
        assert texts_of(problem, "train")[0][0] == " ".join(EUROPARL[:3])
        problem = get(tmp_path, raw, input_length=length - 1, **options)
        assert texts_of(problem, "train")[0][0] == " ".join(EUROPARL[:2])

    @pytest.mark.thorough
    def test_sentences_that_are_too_long(self, tmp_path, raw):
        problem = get(tmp_path, raw, input_length=20, sequence_length=20)
        pairs = texts_of(problem, "train")
        assert pairs == documents(TRAIN, 20)
        number = sum(len(source) >= 20 for source, _ in pairs)
        assert 30 <= number < len(pairs)
        assert f"({number} of them too long: cut)" in problem.describe()

    def test_ids_are_those_of_the_whole_text(self, tmp_path, raw):
        lengths = {"input_length": 60, "sequence_length": 60}
        problem = get(tmp_path, raw, vocabulary="subwords", **lengths)
        assert (tmp_path / "data/vocab.translate_ende_wmt14.32768.subwords").exists()
        number = problem.num_windows("train")
        assert 2 < number < 20
        for n in range(number):
            for ids in problem.pair("train", n):
                assert len(ids) <= 60
                text = problem.tokenizer.detokenize(ids)
                again = problem.tokenizer.tokenize(text).numpy()
                assert again.tolist() == ids[:-1].tolist()

    @pytest.mark.thorough
    def test_stopped_work_goes_on(self, tmp_path, raw, monkeypatch):
        monkeypatch.setattr(array_store, "SECONDS_BETWEEN_CHECKPOINTS", 0)
        monkeypatch.setattr("routing_tf.problems.datasets.pairs.PAIRS_AT_ONCE", 2)
        problem = get(tmp_path, input_length=100, sequence_length=100)
        pairs_of = WmtProblem.pairs
        began_at = []

        def stopped(self, split, start=0):
            began_at.append(start)
            for number, pair in enumerate(pairs_of(self, split, start), start):
                if len(began_at) == 1 and number == 17:
                    raise KeyboardInterrupt
                yield pair

        monkeypatch.setattr(WmtProblem, "pairs", stopped)
        with pytest.raises(KeyboardInterrupt):
            list(problem.generate(raw))
        list(problem.generate(raw))
        assert 0 < began_at[1] < 17
        assert texts_of(problem, "train") == documents(TRAIN, 100)


def test_sentences(tmp_path, raw):
    problem = get(tmp_path, raw, document="false")
    assert texts_of(problem, "train") == [(text, german(text)) for text in TRAIN]
    # The same data has the documents too.
    assert get(tmp_path).num_windows("train") < 5


def test_the_other_direction_takes_the_same_data(tmp_path, raw):
    get(tmp_path, raw, document=False)
    problem = get(tmp_path, name="translate_deen_wmt14", document=False)
    assert texts_of(problem, "test") == [(german(text), text) for text in TEST]


def test_data_in_another_order_has_no_documents(tmp_path, raw):
    builder = tfds.builder("wmt14_translate/de-en", data_dir=tmp_path / "data")
    config = tfds.download.DownloadConfig(manual_dir=raw)
    builder.download_and_prepare(download_config=config)
    with pytest.raises(ValueError, match="document=false") as error:
        get(tmp_path, raw)
    assert "order of tensorflow-datasets" in str(error.value)
    sentences = [text for text, _ in texts_of(get(tmp_path, document=False), "train")]
    assert sorted(sentences) == sorted(TRAIN) and sentences != TRAIN


@pytest.mark.parametrize(
    "name", [name for name in problems.names() if name.startswith("translate_")]
)
def test_names(name, tmp_path):
    problem = get(tmp_path, name=name)
    _, languages, year = name.split("_")
    assert "".join(problem.languages) == languages
    assert problem.builder.startswith(f"{year}_translate/")
    # tfds has such a builder, with these languages.
    pair = problem.source.builder.builder_config.language_pair
    assert set(pair) == set(problem.languages)
    assert set(problem.source.builder.subsets) == set(SPLITS)
