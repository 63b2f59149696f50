"""Tests of the command that prepares data."""

import functools
import os
import pathlib
import re
import tempfile
from concurrent import futures

import pytest

from routing_tf import models
from routing_tf import problems
from routing_tf.cli import datagen
from routing_tf.cli import train
from tests import command_line

TEXTS = {
    name: "".join(f" \n = Page {i} = \n \n page {i} of {name} \n" for i in range(size))
    for name, size in (("train", 60), ("valid", 20), ("test", 20))
}
run = functools.partial(command_line.run, datagen)


def prepare(tmp_path, problem, *arguments):
    return run(
        f"--problem={problem}",
        f"--data_dir={tmp_path / 'data'}",
        f"--raw_dir={tmp_path / 'raw'}",
        *arguments,
    )


@pytest.fixture
def wikitext(tmp_path):
    (tmp_path / "raw").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "raw" / f"wiki.{name}.tokens").write_text(text)
    return tmp_path


def files_below(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_says_what_it_made(wikitext, capsys):
    assert not prepare(wikitext, "wikitext103")
    out, err = capsys.readouterr()
    assert "\r" not in err  # no progress bar in a file
    assert "train: " in out
    assert "validation: " in out
    assert "words, " in out
    before = files_below(wikitext / "data")
    assert not prepare(wikitext, "wikitext103")
    assert "train: there already" in capsys.readouterr().out
    assert files_below(wikitext / "data") == before


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--raw_dir=nowhere", "`--raw_dir` must be a folder"),
        ("--problem_option=size", "must be name=value. Received: 'size'"),
    ],
)
def test_refuses(tmp_path, refused, argument, message):
    data_dir = f"--data_dir={tmp_path / 'data'}"
    assert message in refused(datagen, "--problem=enwik8", data_dir, argument)


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "data").write_text("a file")
    (tmp_path / "raw").mkdir()
    assert prepare(tmp_path, "enwik8") == 1
    assert "`--data_dir` must be a folder" in capsys.readouterr().err


def test_problems_without_preparation(tmp_path, capsys):
    assert not run("--problem=python_source", f"--data_dir={tmp_path}")
    assert "needs no preparation" in capsys.readouterr().out


def test_what_is_made_is_for_the_splits_of_a_run(wikitext, capsys):
    os.remove(wikitext / "raw" / "wiki.train.tokens")
    assert not prepare(wikitext, "wikitext103", "--train_split=validation")
    out = capsys.readouterr().out
    assert "validation: " in out and "train: missing" in out
    options = {"train_split": "validation", "eval_split": "test"}
    data_dir = str(wikitext / "data")
    assert problems.get("wikitext103", data_dir=data_dir, **options).ids("test").size


def test_subwords_and_paths_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = "".join(f"line {i}\n" for i in range(60))
    (tmp_path / "source").write_text(lines)
    (tmp_path / "target").write_bytes(lines.replace("\n", "\r\n").encode())
    options = {"source_files": "source", "target_files": "target"}
    options |= {"vocabulary": "subwords"}
    arguments = [f"--problem_option={name}={options[name]}" for name in options]
    data_dir = tmp_path / "data"
    assert not run("--problem=parallel_files", f"--data_dir={data_dir}", *arguments)
    assert "train: 54 pairs" in capsys.readouterr().out
    problem = problems.get("parallel_files", data_dir=data_dir, **options)
    target = problem.pair("train", 3)[1]
    assert problem.tokenizer.detokenize(target) == "line 3"


def test_one_command_at_a_time_prepares_a_folder(wikitext):
    def at_once():
        problem = problems.get("wikitext103", data_dir=wikitext / "data")
        lines = list(problem.generate(wikitext / "raw"))
        return [line.split(":")[1].split(",")[0].strip() for line in lines]

    with futures.ThreadPoolExecutor() as pool:
        # The locks are those of files that are open, so threads stand for processes.
        found = [task.result() for task in [pool.submit(at_once) for _ in range(2)]]
    assert sorted(line.startswith("there already") for line in found[0] + found[1]) == (
        [False] * 3 + [True] * 3
    )


def test_no_temporary_folders_are_left(wikitext, monkeypatch):
    (wikitext / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(wikitext / "tmp"))
    assert not prepare(wikitext, "wikitext103", "--problem_option=level=bytes")
    assert list((wikitext / "tmp").iterdir()) == []


ROW = re.compile(
    r"^\| [\w-]+ \| `(?P<datagen>[^`]+)`<br>`(?P<train>[^`]+)` \| `(?P<preset>\w+)` \|",
    re.M,
)


def test_the_documented_recipes_fit():
    page = pathlib.Path(__file__).parents[1] / "docs/data.md"
    rows = list(ROW.finditer(page.read_text()))
    assert len(rows) == 5
    for row in rows:
        prepared = command_line.parse(datagen, *row["datagen"].split()[3:])
        trained = command_line.parse(train, *row["train"].split()[3:])
        assert row["datagen"].startswith("python -m routing_tf.datagen ")
        assert row["train"].startswith("python -m routing_tf.train ")
        assert prepared.problem == trained.problem
        assert prepared.data_dir == trained.data_dir
        problem_class = problems.get_class(trained.problem)
        assert problem_class.default_hparams_set == row["preset"]
        h = models.preset_hyperparameters(row["preset"])
        problem = problems.get(trained.problem, **problem_class.options_for(h))
        problem.check_hyperparameters(h)
        assert problem.sequence_length == h.max_sequence_length
