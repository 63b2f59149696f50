"""Tests of the problems of summarization."""

import json

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
def raw(raw, monkeypatch):
    for name in ("arxiv", "pubmed"):
        files = {}
        for split, size in SIZES.items():
            lines = [json.dumps(paper(name, n)) + "\n" for n in range(size)]
            files[f"{name}-dataset/{split}.txt"] = "".join(lines)
        prepared.write_zip(raw / f"{name}-dataset.zip", files)
    prepared.trust(monkeypatch, tfds.builder_cls("scientific_papers"), raw)
    return raw


@pytest.mark.parametrize("name", ["arxiv", "pubmed"])
def test_pairs(name, tmp_path, raw):
    problem = prepared.get(name, tmp_path, raw, vocabulary="bytes")
    for split, file in FILES.items():
        assert set(prepared.texts_of(problem, split)) == {
            (article(name, n), abstract(name, n)) for n in range(SIZES[file])
        }
