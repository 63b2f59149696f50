"""Tests of a run's folder: its settings, its own tokenizer, its lock."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest

from routing_tf import training
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.training import checkpoints
from routing_tf.training import run_folder
from tests import runs
from tests.problems.prepared import write_vocabulary

HYPERPARAMETERS = runs.settings(f"{runs.HPARAMS},num_routed_heads=1")
ROT13 = str.maketrans("abcdefghijklm", "nopqrstuvwxyz")


def configure(folder, **options):
    """Settings and problem of a run on the files of a folder."""
    files = {"files": str(folder / "text"), "vocabulary": str(folder / "vocabulary")}
    return run_folder.configure(
        "text_files", HYPERPARAMETERS, problem_options=files, **options
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder with a text, a vocabulary and a run on them."""
    folder = tmp_path_factory.mktemp("first")
    words = ["cluster", "token", "head", "routed"]
    chosen = np.random.default_rng(0).integers(0, 4, 3000)
    text = " ".join(words[index] for index in chosen)
    (folder / "text").write_text(text)
    write_vocabulary(folder / "vocabulary", [text, "vwxyz fgjkimnpqs"], 100)
    config, problem = configure(folder)
    lm = training.build_model(config.hyperparameters, problem)
    run_folder.save_run(config, lm, folder / "run")
    return folder


@pytest.fixture
def folder(first, tmp_path):
    """A copy of it."""
    folder = tmp_path / "copy"
    shutil.copytree(first, folder)
    config = run_folder.RunConfig.load(folder / "run")
    files = {
        name: str(folder / pathlib.Path(path).name)
        for name, path in config.problem_options.items()
    }
    dataclasses.replace(config, problem_options=files).save(folder / "run")
    return folder


def reverse(path):
    """Gives other ids to the tokens of a vocabulary."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[:1:-1]))


@pytest.mark.parametrize("change", [reverse, pathlib.Path.unlink, lambda path: None])
def test_the_vocabulary_that_a_run_began_with_counts(folder, change):
    _, before = configure(folder)
    change(folder / "vocabulary")
    earlier = run_folder.RunConfig.load(folder / "run")
    config, problem = configure(folder, model_dir=folder / "run")
    assert config == earlier
    np.testing.assert_array_equal(problem.ids("test"), before.ids("test"))
    own = problem.vocabulary != str(folder / "vocabulary")
    assert own == (change in (reverse, pathlib.Path.unlink))


def test_a_new_run_has_no_vocabulary_of_its_own(folder):
    reverse(folder / "vocabulary")
    shutil.rmtree(folder / "run" / "checkpoints")
    config, problem = configure(folder, model_dir=folder / "run")
    assert problem.vocabulary == str(folder / "vocabulary")
    assert config != run_folder.RunConfig.load(folder / "run")


def test_other_tokenizers_are_refused(first, folder):
    _, problem = configure(first)
    run_folder.check_tokenizer(problem, folder / "run", "text")
    reverse(folder / "vocabulary")
    _, problem = configure(folder)
    with pytest.raises(ValueError, match="Received: text_files .*SubwordTokenizer"):
        run_folder.check_tokenizer(problem, folder / "run", "text")
    problem.tokenizer = ByteTokenizer()
    with pytest.raises(ValueError, match="Received: text_files .*ByteTokenizer"):
        run_folder.check_tokenizer(problem, folder / "run", "text")


def test_changed_data_of_the_same_size_is_noticed(folder):
    text = folder / "text"
    text.write_text(text.read_text().translate(ROT13))
    earlier = run_folder.RunConfig.load(folder / "run")
    config, problem = configure(folder, model_dir=folder / "run")
    # As if it were not noticed by the number of subwords.
    config = dataclasses.replace(config, num_tokens=earlier.num_tokens)
    with pytest.raises(ValueError, match="`model_dir`.*'train' "):
        config.check_continues(earlier, folder / "run")
    for split in "validation", "test":  # nothing is known of the last, but files change
        with pytest.raises(ValueError, match=r"'validation' .*Received: .*\([0-9]+, "):
            earlier.check_data(problem, split)


@pytest.mark.parametrize("name", ["problem_options", "num_tokens", "checksums"])
@pytest.mark.parametrize("value", ["x", 5, [1]])
def test_damaged_settings(folder, name, value):
    path = folder / "run" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(ValueError, match=f"run.json.*`{name}`"):
        run_folder.RunConfig.load(folder / "run")


def test_a_vocabulary_that_is_no_text(folder):
    (folder / "vocabulary").write_bytes(b"\x1f\x8b")
    with pytest.raises(ValueError, match="Received: '[^']*/vocabulary': "):
        configure(folder)


def test_file_systems_without_locks(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError("Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with run_folder.hold(tmp_path / "run"):
        assert checkpoints.folder_of(tmp_path / "run").is_dir()


def test_a_full_disk_is_named(folder, monkeypatch):
    def refuse(self, text):
        raise OSError(27, "/disk/file")

    monkeypatch.setattr(pathlib.Path, "write_text", refuse)
    config = run_folder.RunConfig.load(folder / "run")
    with pytest.raises(OSError, match="run.json' .*/disk/file"):
        config.save(folder / "run")
