"""Tests of text files whose ids lie on disk: the same as in memory, made once."""

import gzip
import os
import pathlib

import numpy as np
import pytest

from routing_tf import models
from routing_tf import problems
from routing_tf.files.names import SPLITS
from routing_tf.problems import array_store
from routing_tf.problems.datasets import own_texts
from routing_tf.problems.text import WholeLines
from routing_tf.problems.text import joined
from routing_tf.training import run_folder
from tests.problems.prepared import write_vocabulary

LENGTH = 16
SPACES = (" ", "  ", "\n", "\n\n", ". ")
WORDS = (*["one", "Fish", "été", "2", "_", "\\", "漢字", "。"], *SPACES)


class Stopped(Exception):
    """As if the process had been killed."""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.subwords"
    write_vocabulary(path, ["one fish été", "two Fish"])
    return str(path)


@pytest.fixture(
    params=[
        {},
        pytest.param({"packing": "release"}, marks=pytest.mark.thorough),
        pytest.param({"vocabulary": True}, marks=pytest.mark.thorough),
        {"vocabulary": True, "packing": "release"},
    ],
    ids=str,
)
def options(request, vocabulary):
    own = {"vocabulary": vocabulary} if "vocabulary" in request.param else {}
    return {**request.param, **own}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(own_texts, "CHUNK_SIZE", 50)


@pytest.fixture
def on_disk(monkeypatch):
    monkeypatch.setattr(own_texts, "MAX_BYTES_IN_MEMORY", 0)


@pytest.fixture
def files(tmp_path):
    """Texts with everything that is hard to cut."""
    generator, paths = np.random.default_rng(0), [str(tmp_path / x) for x in "ab"]
    for path in paths:
        text = "".join(generator.choice(WORDS, 200)).encode()
        # Neither UTF-8 nor a place to cut.
        text += b"\xff\xe6\xbc" + b"x" * 120 + b"\xe6\n y " * 3
        pathlib.Path(path).write_bytes(text + text[: len(text) // 2])
    return paths


def get(files, vocabulary=None, **options):
    options = {"sequence_length": LENGTH, **options}
    return problems.get("text_files", files=files, vocabulary=vocabulary, **options)


def cut(path):
    """The parts of a file by split."""
    text = pathlib.Path(path).read_bytes()
    share = len(text) * 5 // 100
    places = {"train": (0, -2 * share), "validation": (-2 * share, -share)}
    return {s: text[slice(*places.get(s, (-share, None)))] for s in SPLITS}


def test_pieces_have_the_ids_of_whole_texts(files, options):
    problem = get(files, **options)
    for split in SPLITS:
        texts = [cut(path)[split] for path in files]
        if problem.packing == "stream":
            parts = [part for text in texts for part in (problem.encode(text), [1])]
            expected, windows = np.concatenate(parts), None
        else:
            lines = [line for text in texts for line in problem.release_lines(text)]
            rule = WholeLines(LENGTH)
            packed = [*map(rule.add, lines), rule.finish()]
            expected, windows = joined(packed).values()
        np.testing.assert_array_equal(problem.ids(split), expected)
        assert problem.ids(split).dtype == "uint16"
        if windows is not None:
            np.testing.assert_array_equal(problem.tokens(split).windows, windows)


def test_on_disk_all_is_as_in_memory(files, tmp_path, monkeypatch, options):
    here = get(files, **options)
    here.prepare()
    monkeypatch.setattr(own_texts, "MAX_BYTES_IN_MEMORY", 0)
    there = get(files, data_dir=str(tmp_path / "data"), **options)
    for split in SPLITS:
        assert isinstance(there.ids(split), np.memmap)
        assert not isinstance(here.ids(split), np.memmap)
        np.testing.assert_array_equal(there.ids(split), here.ids(split))
        assert there.ids(split).dtype == here.ids(split).dtype
    assert there.describe(*SPLITS) == here.describe(*SPLITS)
    for split in ("train", "test"):
        batches = [
            next(iter(p.dataset(split, 2, seed=3, start_step=1))) for p in (here, there)
        ]
        for a, b in zip(batches[0][1:], batches[1][1:]):
            np.testing.assert_array_equal(a, b)


def test_ids_are_made_once(files, tmp_path, on_disk, monkeypatch):
    first = get(files, data_dir=tmp_path / "data").ids("train")

    monkeypatch.setattr(own_texts.TextFiles, "encode", None)  # not called again
    again = get(files, data_dir=tmp_path / "data")
    np.testing.assert_array_equal(again.ids("train"), first)


@pytest.mark.parametrize("change", ["content", "held_out"])
def test_other_data_is_noticed(files, tmp_path, on_disk, change):
    get(files, data_dir=tmp_path / "data").ids("train")
    options = {} if change == "content" else {"test_files": files[1]}
    if change == "content":
        path = pathlib.Path(files[0])
        path.write_bytes(path.read_bytes().swapcase())
        os.utime(path, ns=(0, 0))
    again = get(files, data_dir=tmp_path / "data", **options)
    expected = get(files, **options).ids("train")
    np.testing.assert_array_equal(again.ids("train"), expected)
    stores = list((tmp_path / "data" / "routing_tf" / "text_files").iterdir())
    assert len(stores) == (1 if change == "content" else 2)


@pytest.mark.parametrize("packing", ["stream", "release"])
@pytest.mark.parametrize("stop", [0, 5, 17])
def test_work_that_was_stopped_goes_on(
    files, tmp_path, on_disk, monkeypatch, packing, stop
):
    expected = get(files, packing=packing).tokens("train")
    monkeypatch.setattr(array_store, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    problem = get(files, data_dir=tmp_path / "data", packing=packing)
    parts, seen = problem.parts, []

    def stopping(*arguments):
        for part in parts(*arguments):
            if len(seen) == stop:
                raise Stopped
            seen.append(part)
            yield part

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(problem, "parts", stopping)
        problem.ids("train")
    tokens = problem.tokens("train")
    np.testing.assert_array_equal(tokens.ids, expected.ids)
    if packing == "release":
        np.testing.assert_array_equal(tokens.windows, expected.windows)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_gzip_is_the_text_it_holds(files, tmp_path, monkeypatch, where):
    if where == "disk":
        monkeypatch.setattr(own_texts, "MAX_BYTES_IN_MEMORY", 0)
    packed = []
    for path in files:
        content = pathlib.Path(path).read_bytes()
        packed.append(f"{path}.gz")
        halves = content[:99], content[99:]
        pathlib.Path(packed[-1]).write_bytes(b"".join(map(gzip.compress, halves)))
    plain, problem = get(files), get(packed, data_dir=str(tmp_path / "data"))
    for split in SPLITS:
        np.testing.assert_array_equal(problem.ids(split), plain.ids(split))
    assert problem.describe(*SPLITS) == plain.describe(*SPLITS)


def test_files_that_are_no_text_are_named(tmp_path, caplog, monkeypatch):
    contents = {
        "plain": "été ".encode() * 100,
        "latin": "été ".encode("latin-1") * 100,
        "wide": "été ".encode("utf-16") * 100,
        "wider": "été ".encode("utf-32") * 100,
        "nul.gz": gzip.compress(b"a" * 100_400 + b"\0"),
        "random": bytes(range(1, 256)) * 2,
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    problem = get(f"{tmp_path}/*")
    # As many bytes as before.
    size = sum(map(len, contents.values())) - len(contents["nul.gz"]) + 100_401
    assert sum(map(problem.source.num_bytes, SPLITS)) == size
    [record] = caplog.records
    reasons = {
        "latin": "byte 0xe9 at 0, as in Latin-1",
        "nul.gz": "NUL bytes",
        "random": "byte 0x80 at 127",
        "wide": "UTF-16",
        "wider": "UTF-32",
    }
    named = ", ".join(f"{tmp_path}/{name} ({why})" for name, why in reasons.items())
    assert f": {named}. Convert them, as with `iconv -f ENCOD" in record.getMessage()
    caplog.clear()
    monkeypatch.setattr(own_texts, "START_SIZE", 1)  # inside of a character
    get(f"{tmp_path}/p*").prepare()
    assert not caplog.records


def test_little_text_leaves_nothing_behind(files, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    problem = get(files, data_dir=tmp_path)
    problem.work_dir = str(tmp_path / "run")
    problem.prepare()
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_folder_all_is_in_memory(files, tmp_path, on_disk, monkeypatch):
    assert not isinstance(get(files).ids("train"), np.memmap)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    problem = get(files, data_dir=tmp_path / "data")
    assert not isinstance(problem.ids("train"), np.memmap)


def test_ids_lie_beside_the_run(files, tmp_path, on_disk):
    h = models.preset_hyperparameters("byte_tiny").replace(max_sequence_length=LENGTH)
    options = {"files": ",".join(files)}
    _, problem = run_folder.configure(
        "text_files", h, model_dir=tmp_path / "run", problem_options=options
    )
    assert isinstance(problem.ids("train"), np.memmap)
    assert (tmp_path / "run" / "data" / "routing_tf" / "text_files").is_dir()


def test_what_was_made_of_a_folder_is_no_text_of_it(files, tmp_path, on_disk):
    problems_of_it = [
        problems.get("text_files", data_dir=str(tmp_path), sequence_length=LENGTH)
        for _ in range(2)
    ]
    first, second = (problem.ids("train") for problem in problems_of_it)
    assert (tmp_path / "routing_tf").is_dir()
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, get(files).ids("train"))


def test_datagen_prepares_text_of_any_size(files, tmp_path):
    problem = get(files, data_dir=str(tmp_path / "data"))
    assert [line.split(":")[0] for line in problem.generate()] == list(SPLITS)
    again = get(files, data_dir=str(tmp_path / "data"))
    assert isinstance(again.ids("test"), np.memmap)
    np.testing.assert_array_equal(again.ids("test"), get(files).ids("test"))
    with pytest.raises(ValueError, match="`files`.*raw_dir="):
        list(problem.generate(tmp_path))
