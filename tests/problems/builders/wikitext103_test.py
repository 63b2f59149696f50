import os
import pathlib
import zipfile
from unittest import mock

import pytest
import tensorflow_datasets as tfds

from routing_tf.files.names import SPLITS
from routing_tf.problems import builders
from routing_tf.problems.builders import wikipedia
from tests.problems.prepared import write_zip

DUMMY_DATA = pathlib.Path(__file__).parent / "dummy_data"
REFERENCE = os.environ.get("ROUTING_TF_REFERENCE_DIR")
FIRST = " \n = Anchor = \n \n Of iron . \n \n = = Use = = \n \n At sea . \n \n"
SECOND = " = Bell = \n \n It rings . \n \n"


class BuilderTest(tfds.testing.DatasetBuilderTestCase):
    DATASET_CLASS = builders.Wikitext103
    BUILDER_CONFIG_NAMES_TO_TEST = ["tokens"]
    EXAMPLE_DIR = DUMMY_DATA / "wikitext103_tokens"
    SPLITS = {"train": 3, "validation": 1, "test": 2}


def make(data, config="tokens"):
    return builders.Wikitext103(data_dir=data, config=config)


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(builder, split):
    return [e["text"].decode() for e in builders.read_in_order(builder, split)]


class TestArticles:
    @pytest.mark.parametrize(
        "articles",
        [
            [FIRST, SECOND],
            [FIRST.lstrip(" \n"), SECOND],
            ["A preface . \n" + FIRST, SECOND],
            [FIRST + " \n \n", SECOND],
            [FIRST, SECOND.rstrip("\n")],
            [FIRST, " = E = m c = \n \n", SECOND],
            ["No title . \n = = Use = = \n \n"],
            [FIRST.replace("Of iron", "Čoḱ 鐵 \r\x0b\x0c\x1c\x85\u2028 iron")],
            [FIRST.replace("\n", "\r\n"), SECOND.replace("\n", "\r\n")],
            # Written by programs that strip lines.
            [FIRST.replace(" \n", "\n").replace("\n ", "\n"), "= B =\n\nb\n"],
            # A formula in a paragraph looks like a title, but for its neighbours.
            [FIRST + " It is \n = 1 <unk> = \n 2 . \n"],
            [FIRST + " It is \n = 1 <unk> = \n \n"],
            [FIRST + " = 1 <unk> = \n 2 . \n"],
        ],
    )
    def test_cut_at_titles_and_nowhere_else(self, raw, articles):
        path = write(raw, "wiki", "".join(articles))
        assert list(wikipedia.read_articles(path)) == articles

    @pytest.mark.skipif(not REFERENCE, reason="needs $ROUTING_TF_REFERENCE_DIR")
    def test_real_files(self, data):
        folder = pathlib.Path(REFERENCE, "data", "wikitext")
        builder = make(data)
        builders.prepare(builder, folder)
        for split, name in (("validation", "valid.txt"), ("test", "test.txt")):
            articles = read(builder, split)
            assert "".join(articles).encode() == (folder / name).read_bytes()
            # As many as the authors count. Two lines of the test file, parts of
            # formulas, would be titles if empty lines around them were not needed.
            assert len(articles) == 60
            assert not articles[0].startswith(" = ")
            assert all(article.startswith(" = ") for article in articles[1:])


class TestFiles:
    @pytest.mark.parametrize(
        "config, names",
        [
            ("tokens", ["wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"]),
            ("tokens", ["train.txt", "valid.txt", "test.txt"]),
            ("tokens", ["wikitext-103/wiki.train.tokens"]),
            ("tokens", ["wikitext-103/valid.txt", "wikitext-103/test.txt"]),
            ("raw", ["wiki.train.raw", "wiki.valid.raw", "wiki.test.raw"]),
            ("raw", ["train.txt", "test.txt"]),
            ("raw", ["wikitext-103-raw/wiki.test.raw"]),
            ("raw", ["wikitext-103-raw/valid.txt"]),
        ],
    )
    def test_names(self, raw, data, config, names):
        for name in names:
            write(raw, name, f"{FIRST} = {name} = \n \n")
        builder = make(data, config)
        builders.prepare(builder, raw)
        for split in SPLITS:
            name = [name for name in names if split.removesuffix("ation") in name]
            assert (split in builder.info.splits) == bool(name)
            if name:
                assert read(builder, split) == [FIRST, f" = {name[0]} = \n \n"]

    @pytest.mark.parametrize(
        "config, name, members",
        [
            ("tokens", "wikitext-103-v1.zip", "wikitext-103/wiki.{}.tokens"),
            ("raw", "wikitext-103-raw-v1.zip", "wikitext-103-raw/wiki.{}.raw"),
            ("raw", "wikitext-103-raw-v1.zip", "wiki.{}.raw"),
        ],
    )
    @pytest.mark.parametrize("downloaded", [False, True])
    def test_zip_files(self, raw, data, tmp_path, config, name, members, downloaded):
        path = (tmp_path / "download") if downloaded else raw / name
        parts = ("train", "valid", "test")
        files = {members.format(part): FIRST + SECOND + part for part in parts}
        write_zip(path, files, zipfile.ZIP_DEFLATED)
        builder = make(data, config)
        download = mock.Mock(return_value=tfds.core.Path(path))
        with mock.patch.object(tfds.download.DownloadManager, "download", download):
            builders.prepare(builder, raw)
        assert read(builder, "validation") == [FIRST, SECOND + "valid"]
        assert read(builder, "test") == [FIRST, SECOND + "test"]
        url = f"https://s3.amazonaws.com/research.metamind.io/wikitext/{name}"
        assert download.mock_calls == ([mock.call(url)] if downloaded else [])
        assert url in builders.Wikitext103.url_infos

    def test_files_come_before_zip_files(self, raw, data):
        write(raw, "wikitext-103-v1.zip", "not opened")
        write(raw, "wikitext-103/wiki.test.tokens", FIRST)
        builder = make(data)
        builders.prepare(builder, raw)
        assert read(builder, "test") == [FIRST]

    @pytest.mark.parametrize(
        "config, found",
        [
            ("tokens", "wiki.train.raw"),
            ("raw", "wiki.train.tokens"),
            ("raw", "wikitext-103/train.txt"),
            ("tokens", "wikitext-103-raw-v1.zip"),
        ],
    )
    def test_other_files_are_no_reason_to_download(
        self, raw, data, refusal, config, found
    ):
        write(raw, found, FIRST)
        message = refusal(make(data, config), raw)
        folder = "wikitext-103-raw" if config == "raw" else "wikitext-103"
        for part in (
            f"wikitext103/{config}",
            f"{folder}-v1.zip, wiki.train.{config}, wiki.valid.{config}",
            "train.txt, valid.txt, test.txt",
            repr(found.partition("/")[0]),
        ):
            assert part in message

    def test_zip_file_of_something_else(self, raw, data, refusal):
        write_zip(raw / "wikitext-103-v1.zip", {"wikitext-2/wiki.train.raw": FIRST})
        message = refusal(make(data), raw)
        assert "wiki.train.tokens" in message
        assert "'wikitext-2/wiki.train.raw'" in message

    def test_files_of_integers_are_those_of_another_data_set(self, raw, data, refusal):
        write(raw, "train.txt", "\n12 13 255\n7 8\n")
        message = refusal(make(data), raw)
        assert "line 2 must have words" in message and "'12 13 255'" in message
