import math
import os

import pytest

from routing_tf import problems
from routing_tf.problems import array_store
from routing_tf.problems.datasets import pg19
from tests.problems import prepared
from tests.problems.packing_test import closed_lines

BOOKS = {
    "train": {
        "10.txt": "The Fish\n\n  one fish two fish \nred fish\n",
        "2.txt": "The Bird\nblue bird, red bird\n" * 3,
        "notes.md": "not a book",
    },
    "validation": {"7.txt": "a blue\tfish\n"},
    "test": {"3.txt": "no fish at all\r\nnone\n", "1.txt": "A last one"},
}
LENGTH = 12


@pytest.fixture
def raw_dir(tmp_path):
    for split, books in BOOKS.items():
        (tmp_path / "raw" / split).mkdir(parents=True)
        for name, text in books.items():
            (tmp_path / "raw" / split / name).write_text(text, newline="")
    return tmp_path / "raw"


@pytest.fixture
def vocabulary(raw_dir):
    texts = [text for books in BOOKS.values() for text in books.values()]
    prepared.write_vocabulary(raw_dir / pg19.VOCABULARY_FILE, texts, 80)


def get(tmp_path, raw_dir, **options):
    options = {"sequence_length": LENGTH, **options}
    return prepared.get("pg19_length8k", tmp_path, raw_dir, **options)


def lines_of(problem, text):
    tokenizer = problem.tokenizer
    return [tokenizer.tokenize(x.strip()).numpy().tolist() for x in text.split("\n")]


def test_stream_of_sorted_books(tmp_path, raw_dir, vocabulary):
    problem = get(tmp_path, raw_dir)
    for split, books in BOOKS.items():
        expected = []
        for name in sorted(name for name in books if name.endswith(".txt")):
            expected += [*sum(lines_of(problem, books[name]), []), 1]
        assert problem.ids(split).tolist() == expected
    assert sum(prepared.rows_of(problem, "test"), []) == problem.ids("test").tolist()


def test_release_packing_in_the_order_of_the_listing(
    tmp_path, raw_dir, vocabulary, monkeypatch
):
    listing = {"train": ["2.txt", "notes.md", "10.txt"], "test": ["3.txt", "1.txt"]}
    true_listdir = os.listdir
    monkeypatch.setattr(
        os,
        "listdir",
        lambda path: listing.get(os.path.basename(path)) or true_listdir(path),
    )
    problem = get(tmp_path, raw_dir, packing="release")
    books = [lines_of(problem, BOOKS["train"][name]) for name in ("2.txt", "10.txt")]
    assert prepared.rows_of(problem, "train") == closed_lines(sum(books, []), LENGTH)
    # The log perplexity per subword times 1.248.
    assert problem.metric(2.0, "test") == pytest.approx(math.exp(2 * 1.248))


def test_perplexity_is_that_of_words(tmp_path, raw_dir, vocabulary):
    problem = get(tmp_path, raw_dir)
    assert problem.tokens("test").num_words == 4 + 1 + 3
    nats = 0.5 * problem.num_tokens("test")
    assert problem.metric(0.5, "test") == pytest.approx(math.exp(nats / 8))
    assert problem.metric_name == "perplexity per word"
    assert "of 3 words" in problem.describe("validation")


def test_vocabulary_is_learned_without_one(tmp_path, raw_dir):
    problem = get(tmp_path, raw_dir)
    assert (tmp_path / "data" / pg19.VOCABULARY_FILE).is_file()
    ids = problem.ids("train")[:-1]
    books = " ".join(BOOKS["train"][name] for name in ("10.txt", "2.txt"))
    found = problem.tokenizer.detokenize(ids[ids != 1])
    assert found.replace(" ", "") == "".join(books.split())


@pytest.mark.parametrize("packing", ["stream", "release"])
def test_goes_on_behind_the_last_book(
    tmp_path, raw_dir, vocabulary, monkeypatch, packing
):
    monkeypatch.setattr(array_store, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    for name in ("a.txt", "b.txt"):
        (raw_dir / "train" / name).write_text("more fish\n")
    whole = get(tmp_path / "whole", raw_dir, packing=packing)
    read = pg19.Pg19Length8k.text_of
    seen = []

    def stop_at_the_third(self, example):
        seen.append(os.path.basename(example["path"]))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return read(self, example)

    monkeypatch.setattr(pg19.Pg19Length8k, "text_of", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, raw_dir, packing=packing)
    first, third = seen[0], seen[2]
    problem = get(tmp_path, raw_dir, packing=packing)
    # One book is read ahead, and read again; the first is not.
    assert first not in seen[3:]
    assert third in seen[3:]
    for split in BOOKS:
        assert problem.ids(split).tolist() == whole.ids(split).tolist()
        assert prepared.rows_of(problem, split) == prepared.rows_of(whole, split)


def test_a_damaged_book(tmp_path, raw_dir, vocabulary):
    (raw_dir / "train" / "5.txt").write_bytes(b"good\nbad \xff\n")
    with pytest.raises(ValueError, match=r"5\.txt', .* 2 .*0xff"):
        get(tmp_path, raw_dir)
    left = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert [path.name for path in left] == [pg19.VOCABULARY_FILE]


def test_other_books_need_another_folder(tmp_path, raw_dir, vocabulary):
    get(tmp_path, raw_dir)
    get(tmp_path, raw_dir)
    (raw_dir / "test" / "5.txt").write_text("a new one")
    with pytest.raises(ValueError, match="`data_dir`.*Received: '/"):
        get(tmp_path, raw_dir)


def test_missing(tmp_path, raw_dir, vocabulary):
    with pytest.raises(ValueError, match="`vocabulary`.*--problem=.*vocabulary=None"):
        problems.get("pg19_length8k", data_dir=str(tmp_path)).prepare()
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="`raw_dir`.*raw_dir='.*empty'"):
        get(tmp_path, empty)
    with pytest.raises(ValueError, match="`vocabulary`.*vocabulary='nowhere'"):
        get(tmp_path, raw_dir, vocabulary="nowhere")
    for name in BOOKS["train"]:
        (raw_dir / "train" / name).unlink()
    problem = get(tmp_path, raw_dir)
    with pytest.raises(ValueError, match="'train'.*pg19_length8k.*data_dir="):
        problem.prepare("train")
