"""Tests of the problems of summarization."""

import json
import zipfile

import pytest
import tensorflow_datasets as tfds

from tests.problems import prepared

SIZES = {"train": 12, "val": 3, "test": 2}
FILES = {"train": "train", "validation": "val", "test": "test"}


def paper(name, number):
    return {
        "article_id": f"{name}{number}",
        "article_text": [f"{name} {number} has", "two  paragraphs ."] * (number + 1),
        "abstract_text": ["<S> it is short . </S>", f"<S> {name} {number} </S>"],
        "section_names": ["introduction"],
    }


def article(name, number):
    return " ".join([f"{name} {number} has two paragraphs ."] * (number + 1))


def abstract(name, number):
    return f"it is short . {name} {number}"


@pytest.fixture
def raw(tmp_path, monkeypatch):
    folder = tmp_path / "raw"
    folder.mkdir()
    for name in ("arxiv", "pubmed"):
        with zipfile.ZipFile(folder / f"{name}-dataset.zip", "w") as archive:
            for split, size in SIZES.items():
                lines = [json.dumps(paper(name, n)) + "\n" for n in range(size)]
                archive.writestr(f"{name}-dataset/{split}.txt", "".join(lines))
    prepared.trust(monkeypatch, tfds.builder_cls("scientific_papers"), folder)
    return folder


def get(name, tmp_path, raw=None, **options):
    return prepared.get(name, tmp_path, raw, **{"vocabulary": "bytes", **options})


@pytest.mark.parametrize("name", ["arxiv", "pubmed"])
def test_pairs(name, tmp_path, raw):
    problem = get(name, tmp_path, raw)
    for split, file in FILES.items():
        found = {
            tuple(problem.tokenizer.detokenize(ids) for ids in problem.pair(split, n))
            for n in range(problem.num_windows(split))
        }
        assert found == {
            (article(name, n), abstract(name, n)) for n in range(SIZES[file])
        }
