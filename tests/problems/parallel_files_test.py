"""Tests of pairs of texts from files of one's own."""

import gzip
import os

import pytest

from routing_tf import problems
from tests.problems.prepared import texts_of as pairs


def write(path, lines):
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@pytest.fixture
def files(tmp_path):
    """A hundred lines; line n of the source is n, that of the target is -n."""
    return {
        "source_files": write(tmp_path / "a.en", range(1, 101)),
        "target_files": write(tmp_path / "a.de", range(-1, -101, -1)),
    }


def all_files(folder):
    return {"source_files": f"{folder}/*.en", "target_files": f"{folder}/*.de"}


def expected(numbers):
    return [(str(n), str(-n)) for n in numbers]


def get(files, **options):
    return problems.get("parallel_files", **files, **options)


def test_the_last_lines_are_held_out(files):
    problem = get(files)
    assert pairs(problem, "train") == expected(range(1, 91))
    assert pairs(problem, "validation") == expected(range(91, 96))
    assert pairs(problem, "test") == expected(range(96, 101))
    assert problem.describe().startswith("parallel_files: train 90 pairs (0 of them")


def test_files_of_each_split(files, tmp_path):
    named = {
        "validation_source_files": write(tmp_path / "v.en.gz", [500, 600]),
        "validation_target_files": write(tmp_path / "v.de.gz", [-500, -600]),
    }
    problem = get(files, **named)
    assert pairs(problem, "validation") == expected([500, 600])
    assert pairs(problem, "train") == expected(range(1, 96))
    assert pairs(problem, "test") == expected(range(96, 101))
    named |= {
        "test_source_files": write(tmp_path / "t.en", [700]),
        "test_target_files": write(tmp_path / "t.de", [-700]),
    }
    problem = get(files, **named)
    assert pairs(problem, "train") == expected(range(1, 101))
    assert pairs(problem, "test") == expected([700])


def test_several_files(files, tmp_path):
    write(tmp_path / "b.en", range(201, 221))
    write(tmp_path / "b.de", range(-201, -221, -1))
    problem = get(all_files(tmp_path))
    # Each file is cut.
    assert pairs(problem, "test") == expected([*range(96, 101), 220])
    assert pairs(problem, "train") == expected([*range(1, 91), *range(201, 219)])


def test_a_pair_of_several_names_is_read_once(files, tmp_path):
    for end in ("en", "de"):
        (tmp_path / f"link.{end}").symlink_to(f"a.{end}")
        os.link(tmp_path / f"a.{end}", tmp_path / f"twin.{end}")
    everything = all_files(tmp_path)
    assert pairs(get(everything), "train") == expected(range(1, 91))
    held_out = {
        f"validation_{side}_files": f"{tmp_path}/link.{end}"
        for side, end in (("source", "en"), ("target", "de"))
    }
    write(tmp_path / "b.en", range(201, 221))
    write(tmp_path / "b.de", range(-201, -221, -1))
    problem = get(everything, **held_out)
    assert pairs(problem, "validation") == expected(range(1, 101))
    assert pairs(problem, "train") == expected(range(201, 220))
    twins = {
        name.replace("validation", "test"): path.replace("link", "twin")
        for name, path in held_out.items()
    }
    with pytest.raises(ValueError, match=r"`validation_source_files`.*link\.en"):
        get(everything, **held_out, **twins).prepare()


def test_a_file_that_is_left_out_moves_no_partner(files, tmp_path):
    # Two sources share a target, and one comes again with another.
    write(tmp_path / "more.de", range(-1001, -1101, -1))
    (tmp_path / "link.de").symlink_to("a.de")
    write(tmp_path / "b.en", range(1, 101))
    sources = [f"{tmp_path}/{name}" for name in ("a.en", "b.en", "a.en")]
    targets = [f"{tmp_path}/{name}" for name in ("a.de", "link.de", "more.de")]
    problem = get({"source_files": sources, "target_files": targets})
    others = [(str(n), str(-1000 - n)) for n in range(1, 91)]
    assert pairs(problem, "train") == 2 * expected(range(1, 91)) + others


def test_pairs_with_an_empty_side_are_left_out(tmp_path, caplog):
    files = {
        "source_files": write(tmp_path / "a", ["1", "", "3", " ", "5"]),
        "target_files": write(tmp_path / "b", ["-1", "-2", "", "", "-5"]),
    }
    problem = get(files)
    assert pairs(problem, "train") == pairs(problem, "train") == expected([1, 5])
    (record,) = caplog.records
    assert record.getMessage().startswith("train: 3 pairs are left out, as a side")


class TestFilesThatDoNotFit:
    def test_other_numbers_of_lines(self, files, tmp_path):
        write(tmp_path / "a.de", range(99))
        with pytest.raises(ValueError, match=r"a\.en' .* 100 .*a\.de' .* 99"):
            get(files).prepare()

    def test_other_numbers_of_files(self, files, tmp_path):
        files["source_files"] += f",{write(tmp_path / 'b.en', range(3))}"
        with pytest.raises(ValueError, match="`source_files`.* 2 .* 1 "):
            get(files).prepare()

    def test_a_missing_file(self, files):
        with pytest.raises(ValueError, match="`target_files`.*'nowhere'"):
            get({**files, "target_files": "nowhere"}).prepare()

    def test_too_few_lines_to_hold_some_out(self, tmp_path):
        files = {
            "source_files": write(tmp_path / "a", range(9)),
            "target_files": write(tmp_path / "b", range(9)),
        }
        problem = get(files)
        problem.prepare("train")
        with pytest.raises(ValueError, match="'validation'.*input_length=256"):
            problem.prepare("validation")


class TestArrays:
    def test_they_are_made_and_taken(self, files, data, monkeypatch):
        lines = list(get(files, data_dir=data, vocabulary="subwords").generate())
        assert lines[2] == "test: 5 pairs (0 of them too long: cut)"
        monkeypatch.setattr(problems.ParallelFiles, "examples", None)
        problem = get(files, data_dir=data, vocabulary="subwords")
        source, target = problem.pair("test", 4)
        assert problem.tokenizer.detokenize(source) == "100"
        assert problem.tokenizer.detokenize(target) == "-100"

    def test_changed_files_are_read_again(self, files, data, tmp_path):
        list(get(files, data_dir=data).generate())
        write(tmp_path / "a.en", range(1001, 1101))
        assert pairs(get(files, data_dir=data), "test")[0] == ("1096", "-96")
        lines = list(get(files, data_dir=data).generate())
        assert not any("there already" in line for line in lines)

    def test_other_splits_are_other_arrays(self, files, data, tmp_path):
        list(get(files, data_dir=data).generate())
        named = {
            "test_source_files": write(tmp_path / "t.en", [700]),
            "test_target_files": write(tmp_path / "t.de", [-700]),
        }
        problem = get(files, data_dir=data, **named)
        assert pairs(problem, "train") == expected(range(1, 96))
        assert pairs(problem, "test") == expected([700])

    def test_no_raw_files(self, files, data, tmp_path):
        problem = get(files, data_dir=data)
        with pytest.raises(ValueError, match="`source_files`.*raw_dir='/"):
            list(problem.generate(str(tmp_path)))
