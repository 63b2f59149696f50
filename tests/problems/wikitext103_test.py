import collections
import math

import numpy as np
import pytest

from routing_tf.problems.text import OverlappingLines
from routing_tf.problems.text import joined
from tests.problems import prepared

FILES = {
    "train": (
        " \n = One fish = \n \n red fish blue fish \n a  fish\u00a0and a <unk> \n"
        " \n = Two = \n \n the fish \n = = Part = = \n a red one \n"
    ),
    "valid": " \n = Three = \n \n red cats and blue fish \n",
    "test": " \n = Four = \n \n a fish \n \n = Five = \n \n the one \n",
}
SPLITS = {"train": "train", "validation": "valid", "test": "test"}


@pytest.fixture
def raw_dir(raw):
    return write(raw, FILES)


def write(folder, files, ending="tokens"):
    for name, text in files.items():
        (folder / f"wiki.{name}.{ending}").write_bytes(text.encode("utf-8"))
    return folder


def get(tmp_path, raw_dir, name="wikitext103", **options):
    return prepared.get(name, tmp_path, raw_dir, **{"sequence_length": 8, **options})


def words_of(problem, ids):
    return [problem.tokenizer.id_to_token(int(id)) for id in ids]


def rows_of(problem, split):
    """The words of each held-out window."""
    return [words_of(problem, ids) for ids in prepared.rows_of(problem, split)]


def line_words(text):
    """Words and line ends of a text."""
    lines = text.split("\n")
    words = [[*line.split(), "<newline>"] for line in lines[:-1]]
    return [word for line in [*words, lines[-1].split()] for word in line]


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    (folder / "raw").mkdir()
    return get(folder, write(folder / "raw", FILES))


class TestWords:
    def test_ids_are_words_line_ends_and_ends_of_articles(self, problem):
        first, second = FILES["train"].split(" = Two")
        # The empty line before a title belongs to the article before it.
        expected = [*line_words(first), "<EOS>", *line_words(" = Two" + second)]
        assert words_of(problem, problem.ids("train")) == [*expected, "<EOS>"]
        assert problem.metric_name == "perplexity per word"

    def test_vocabulary_by_count_and_then_by_word(self, problem):
        counts = collections.Counter(FILES["train"].split())
        words = sorted(counts, key=lambda word: (-counts[word], word))
        tokens = [problem.tokenizer.id_to_token(i) for i in range(2 + len(words))]
        assert tokens == ["<pad>", "<EOS>", *words]
        assert problem.vocabulary_size == len(words) + 3  # <newline>

    def test_words_that_training_has_not_seen_are_unknown(self, problem):
        words = words_of(problem, problem.ids("validation"))
        assert words == [
            *("<newline>", "=", "<unk>", "=", "<newline>", "<newline>"),
            *("red", "<unk>", "and", "blue", "fish", "<newline>", "<EOS>"),
        ]
        assert "validation 12 words, 16.67% of them <unk>" in problem.describe()

    def test_perplexity_is_that_of_words_and_line_ends(self, problem):
        for split, name in SPLITS.items():
            num_words = len(line_words(FILES[name]))
            assert problem.tokens(split).num_words == num_words
            nats = 1.5 * problem.num_tokens(split)
            expected = math.exp(nats / num_words)
            assert problem.metric(1.5, split) == pytest.approx(expected)
        assert problem.metric(1e6, "test") == math.inf

    def test_raw_release(self, tmp_path, raw):
        problem = get(tmp_path, write(raw, FILES, "raw"))
        assert problem.variant.startswith("words-raw")
        assert problem.num_tokens("test")
        with pytest.raises(ValueError, match="'test' .*wikitext103.*--problem_option"):
            get(tmp_path, None, form="tokens").ids("test")

    def test_unknown_words_have_an_id_without_the_mark(self, tmp_path, raw):
        files = {name: text.replace("<unk>", "dog") for name, text in FILES.items()}
        problem = get(tmp_path, write(raw, files, "raw"))
        assert "<unk>" in words_of(problem, problem.ids("validation"))


class TestDamage:
    def test_a_changed_vocabulary(self, tmp_path, raw_dir):
        problem = get(tmp_path, raw_dir)
        problem.ids("test")
        path = problem.folder("test").parent / "vocabulary.words"
        content = path.read_text()
        path.write_text(content.replace("fish", "fisj"))
        with pytest.raises(ValueError, match=r"vocabulary\.words'"):
            get(tmp_path, None).ids("test")
        path.write_text(content)
        again = get(tmp_path, None).ids("test")
        np.testing.assert_array_equal(again, problem.ids("test"))

    def test_ids_beyond_the_vocabulary(self, tmp_path, raw_dir):
        problem = get(tmp_path, raw_dir)
        ids = np.array(problem.ids("test"))
        ids[-1] = 65_000
        np.save(problem.folder("test") / "ids.npy", ids)
        size = problem.vocabulary_size
        with pytest.raises(
            ValueError, match=f" {size - 1}, .*wikitext103.* 65000 .*/test'"
        ):
            get(tmp_path, None).ids("test")


def test_arrays_are_made_when_the_training_split_is_known(tmp_path, raw):
    write(raw, {name: FILES[name] for name in ("valid", "test")})
    (line,) = get(tmp_path, None).generate(str(raw))
    assert "'train', and that is missing" in line
    problem = get(tmp_path, None, train_split="test")
    assert "cats" not in words_of(problem, problem.ids("validation"))


class TestRelease:
    """The rules themselves are tested in packing_test.py."""

    def lines(self, name):
        lines = (line.split() for line in FILES[name].split("\n"))
        return [line for line in lines if line]

    def test_held_out_windows(self, tmp_path, raw_dir):
        problem = get(tmp_path, raw_dir, packing="release")
        # Whole lines, fewer than 8 words; what is behind the last window is lost.
        assert rows_of(problem, "test") == [["=", "<unk>", "=", "a", "fish"]]
        assert problem.metric(2.0, "test") == pytest.approx(math.exp(2))

    def test_training_windows_overlap(self, tmp_path, raw_dir):
        problem = get(tmp_path, raw_dir, packing="release")
        ids = [problem.tokenizer.encode(" ".join(line)) for line in self.lines("train")]
        rule = OverlappingLines(8)
        packed = [*map(rule.add, ids), rule.finish()]
        stream, windows = joined(packed).values()
        expected = [words_of(problem, stream[s : s + n]) for s, n in windows]
        assert rows_of(problem, "train") == expected
        assert (windows[1:, 0] < windows[:-1].sum(axis=1)).any()

    @pytest.mark.thorough
    def test_overlap_variant(self, tmp_path, raw_dir):
        name = "wikitext103_length4k_overlap"
        problem = get(tmp_path, raw_dir, name, packing="release")
        stream = [word for line in self.lines("train") for word in [*line, "<EOS>"]]
        starts = range(0, len(stream) - 8 + 1, 3)
        expected = [stream[start : start + 7] for start in starts]
        assert rows_of(problem, "train") == expected


def test_bytes(tmp_path, raw_dir):
    problem = get(tmp_path, raw_dir, level="bytes")
    text = FILES["valid"].encode("utf-8")
    assert problem.ids("validation").tolist() == [*(b + 2 for b in text), 1]
    assert problem.vocabulary_size == 258
    assert problem.metric_name == "bits per byte"
    assert problem.metric(math.log(2), "test") == pytest.approx(1)
    # Two articles: an end id behind each.
    assert np.count_nonzero(problem.ids("train") == 1) == 2
