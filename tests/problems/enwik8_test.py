import numpy as np
import pytest

from routing_tf import problems
from routing_tf.problems import builders
from routing_tf.problems.datasets.enwik8 import Enwik8
from tests.problems import prepared

SIZES = {"train": 900, "validation": 50, "test": 50}
LENGTH = 16


@pytest.fixture
def original(tmp_path, monkeypatch):
    """A folder with a file like the original, a thousand bytes of it."""
    monkeypatch.setattr(builders.Enwik8, "SPLIT_SIZES", SIZES)
    monkeypatch.setattr(builders.Enwik8, "CHUNK_SIZE", 64)
    raw_dir = tmp_path / "raw"
    raw_dir.mkdir()
    rng = np.random.default_rng(0)
    content = b"<mediawiki" + rng.integers(0, 256, 990, "uint8").tobytes()
    (raw_dir / "enwik8").write_bytes(content)
    return raw_dir, content


@pytest.fixture
def integers(tmp_path):
    """A folder with files as the release reads them."""
    raw_dir = tmp_path / "raw"
    raw_dir.mkdir()
    rng = np.random.default_rng(1)
    lines = {}
    for split, name in (("train", "train"), ("validation", "valid"), ("test", "test")):
        lines[split] = [rng.integers(0, 256, size).tolist() for size in (9, 16, 3, 20)]
        rows = [" ".join(map(str, line)) for line in lines[split]]
        (raw_dir / f"{name}.txt").write_text("\n\n".join(rows) + " \n")
    return raw_dir, lines


def get(tmp_path, raw_dir, name="enwik8", sequence_length=LENGTH, **options):
    options["sequence_length"] = sequence_length
    return prepared.get(name, tmp_path, raw_dir, **options)


def test_bytes_of_the_original_file(tmp_path, original):
    raw_dir, content = original
    problem = get(tmp_path, raw_dir)
    starts = {"train": 0, "validation": 900, "test": 950}
    for split, size in SIZES.items():
        part = content[starts[split] : starts[split] + size]
        expected = [*(byte + 2 for byte in part), 1]
        assert problem.ids(split).tolist() == expected
        assert problem.ids(split).dtype == "uint16"
    rows = prepared.rows_of(problem, "test")
    assert [len(row) for row in rows] == [16, 16, 16, 3]
    assert problem.vocabulary_size == 258
    assert problem.tokenizer.detokenize(problem.ids("train")[:10]) == "<mediawiki"
    assert problem.metric_name == "bits per byte"
    assert problem.metric(np.log(4), "test") == pytest.approx(2)
    assert "train 900 bytes, validation 50 bytes" in problem.describe()


def test_integers_are_the_ids(tmp_path, integers):
    raw_dir, lines = integers
    problem = get(tmp_path, raw_dir)
    for split, expected in lines.items():
        assert problem.ids(split).tolist() == [id for line in expected for id in line]
    assert problem.tokenizer is None
    assert problem.vocabulary_size == 258
    assert "train 48 integers" in problem.describe()


@pytest.mark.thorough
def test_release_packing_makes_each_line_a_window(tmp_path, integers):
    raw_dir, lines = integers
    problem = get(tmp_path, raw_dir, packing="release")
    for split, (first, second, third, long) in lines.items():
        expected = [first, second, third, long[:LENGTH], long[LENGTH:]]
        assert prepared.rows_of(problem, split) == expected


def test_ids_may_be_larger_than_bytes(tmp_path):
    raw_dir = tmp_path / "raw"
    raw_dir.mkdir()
    for name in ("train", "valid", "test"):
        (raw_dir / f"{name}.txt").write_text("1 2 3 70000 4 5\n" * 5)
    (raw_dir / "test.txt").write_text("80000 1\n" * 5)
    problem = get(tmp_path, raw_dir)
    # Also that of the test split, so that it can be scored.
    assert problem.vocabulary_size == 80001
    assert problem.ids("train")[3] == 70000


def test_a_missing_file_is_an_error_when_it_is_asked_for(tmp_path, integers):
    raw_dir, lines = integers
    (raw_dir / "train.txt").unlink()
    problem = get(tmp_path, raw_dir, train_split="validation", eval_split="test")
    problem.prepare()
    assert problem.num_tokens("test") == sum(map(len, lines["test"]))
    with pytest.raises(ValueError, match="'train' of enwik8 is not prepared.*datagen"):
        problem.prepare("train")


def test_lengths_in_names(tmp_path, original):
    for name, length in (("enwik8_length8k", 8192), ("enwik8_length12k", 12288)):
        assert problems.get(name).sequence_length == length
    raw_dir, _ = original
    # All lengths read the same arrays.
    get(tmp_path, raw_dir, name="enwik8_length8k")
    problems.get(
        "enwik8_length12k", data_dir=str(tmp_path / "data"), sequence_length=32
    ).prepare()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"form": "text"}, "`form` must be"),
        ({"form": "bytes", "packing": "release"}, "needs the release's files"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        Enwik8(**options)


def test_the_way_out_names_all_that_matters(tmp_path, integers):
    raw_dir, _ = integers
    data = str(tmp_path / "nothing")
    problem = problems.get(
        "enwik8", data_dir=data, packing="release", sequence_length="9"
    )
    with pytest.raises(ValueError) as error:
        problem.prepare()
    assert "--problem_option=packing=release" in str(error.value)
    assert "--problem_option=sequence_length=9" in str(error.value)
    problem = problems.get(
        "enwik8", data_dir=data, train_split="test", sequence_length=9
    )
    assert problem.command.endswith("--train_split=test")


def test_needs_data_dir(tmp_path):
    with pytest.raises(ValueError, match="`data_dir` must name.*datagen --problem"):
        problems.get("enwik8").prepare()
    with pytest.raises(ValueError, match="not prepared.*--raw_dir"):
        problems.get("enwik8", data_dir=str(tmp_path / "nothing")).prepare()
