import numpy as np
import pytest

from routing_tf import problems
from routing_tf.problems import builders
from tests.problems import prepared

SIZES = {"train": 900, "validation": 50, "test": 50}
LENGTH = 16


@pytest.fixture
def original(raw, monkeypatch):
    """A folder with a file like the original, a thousand bytes of it."""
    monkeypatch.setattr(builders.Enwik8, "SPLIT_SIZES", SIZES)
    monkeypatch.setattr(builders.Enwik8, "CHUNK_SIZE", 64)
    content = b"<mediawiki" + np.random.default_rng(0).bytes(990)
    (raw / "enwik8").write_bytes(content)
    return content


@pytest.fixture
def integers(raw):
    """A folder with files as the release reads them."""
    rng = np.random.default_rng(1)
    lines = {}
    for split, name in (("train", "train"), ("validation", "valid"), ("test", "test")):
        lines[split] = [rng.integers(0, 256, size).tolist() for size in (9, 16, 3, 20)]
        rows = [" ".join(map(str, line)) for line in lines[split]]
        (raw / f"{name}.txt").write_text("\n\n".join(rows) + " \n")
    return lines


def get(tmp_path, raw, name="enwik8", **options):
    return prepared.get(name, tmp_path, raw, **{"sequence_length": LENGTH, **options})


def test_bytes_of_the_original_file(tmp_path, raw, original):
    problem = get(tmp_path, raw)
    starts = {"train": 0, "validation": 900, "test": 950}
    for split, size in SIZES.items():
        part = original[starts[split] : starts[split] + size]
        assert problem.ids(split).tolist() == [*(byte + 2 for byte in part), 1]
        assert problem.ids(split).dtype == "uint16"
    assert [len(row) for row in prepared.rows_of(problem, "test")] == [16, 16, 16, 3]
    assert problem.vocabulary_size == 258
    assert problem.tokenizer.detokenize(problem.ids("train")[:10]) == "<mediawiki"
    assert problem.metric_name == "bits per byte"
    assert problem.metric(np.log(4), "test") == pytest.approx(2)
    assert "train 900 bytes, validation 50 bytes" in problem.describe()


def test_integers_are_the_ids(tmp_path, raw, integers):
    problem = get(tmp_path, raw)
    for split, expected in integers.items():
        assert problem.ids(split).tolist() == [id for line in expected for id in line]
    assert problem.tokenizer is None
    assert problem.vocabulary_size == 258
    assert "train 48 integers" in problem.describe()


@pytest.mark.thorough
def test_release_packing_makes_each_line_a_window(tmp_path, raw, integers):
    problem = get(tmp_path, raw, packing="release")
    for split, (first, second, third, long) in integers.items():
        expected = [first, second, third, long[:LENGTH], long[LENGTH:]]
        assert prepared.rows_of(problem, split) == expected


def test_ids_may_be_larger_than_bytes(tmp_path, raw):
    for name in ("train", "valid"):
        (raw / f"{name}.txt").write_text("1 2 3 70000 4 5\n" * 5)
    (raw / "test.txt").write_text("80000 1\n" * 5)
    problem = get(tmp_path, raw)
    # Also that of the test split, so that it can be scored.
    assert problem.vocabulary_size == 80001
    assert problem.ids("train")[3] == 70000


def test_a_missing_file_is_an_error_when_it_is_asked_for(tmp_path, raw, integers):
    (raw / "train.txt").unlink()
    problem = get(tmp_path, raw, train_split="validation", eval_split="test")
    problem.prepare()
    assert problem.num_tokens("test") == sum(map(len, integers["test"]))
    with pytest.raises(ValueError, match="'train'.*enwik8.*--problem=enwik8"):
        problem.prepare("train")


def test_all_lengths_read_the_same_arrays(tmp_path, raw, original):
    get(tmp_path, raw, name="enwik8_length8k")
    get(tmp_path, None, name="enwik8_length12k", sequence_length=32).prepare()


def test_the_way_out_names_all_that_matters(tmp_path):
    with pytest.raises(ValueError, match="`data_dir`.*--problem=enwik8.*data_dir=None"):
        problems.get("enwik8").prepare()
    problem = get(tmp_path, None, packing="release", sequence_length="9")
    with pytest.raises(ValueError, match="'train'.*--raw_dir=FOLDER") as error:
        problem.prepare()
    assert "--problem_option=packing=release" in str(error.value)
    assert "--problem_option=sequence_length=9" in str(error.value)
    problem = get(tmp_path, None, train_split="test")
    assert problem.command.endswith("--train_split=test")
