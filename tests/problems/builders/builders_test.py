import pathlib
import re
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core import shuffle

from routing_tf.problems import builders
from routing_tf.problems.builders import preparation

RELEASE_FILES = {"train": "train.txt", "validation": "valid.txt", "test": "test.txt"}


def integers(folder):
    return builders.Enwik8(data_dir=folder, config="integers")


def write_lines(folder, split, count=3, first=0):
    folder.mkdir(exist_ok=True)
    lines = "".join(f"{n} {n + 1}\n" for n in range(first, first + count))
    (folder / RELEASE_FILES[split]).write_text(lines)


def first_ids(builder, split):
    return [int(e["ids"][0]) for e in builders.read_in_order(builder, split)]


def times(folder):
    """When everything in a folder was written."""
    return {path: path.stat().st_mtime_ns for path in pathlib.Path(folder).glob("**/*")}


@pytest.fixture
def raw(raw):
    write_lines(raw, "train")
    return raw


class TestOrder:
    @pytest.mark.thorough
    def test_several_shards(self, raw, data):
        write_lines(raw, "train", count=1000)
        builder = integers(data)
        config = tfds.download.DownloadConfig(manual_dir=raw, num_shards=7)
        builder.download_and_prepare(download_config=config)
        assert builder.info.splits["train"].num_shards == 7
        assert first_ids(builder, "train") == list(range(1000))
        assert first_ids(builder, "train[250:600]") == list(range(250, 600))

    def test_more_than_tfds_sorts_in_memory(self, raw, data, monkeypatch):
        monkeypatch.setattr(shuffle, "MAX_MEM_BUFFER_SIZE", 1000)
        write_lines(raw, "train", count=1000)
        builders.prepare(integers(data), raw)
        assert first_ids(integers(data), "train") == list(range(1000))

    @pytest.mark.thorough
    def test_shuffled_builders_of_tfds_are_read_shard_after_shard(self, data):
        class Shuffled(tfds.core.GeneratorBasedBuilder, skip_registration=True):
            VERSION = tfds.core.Version("1.0.0")

            def _info(self):
                features = tfds.features.FeaturesDict({"number": np.int64})
                return tfds.core.DatasetInfo(builder=self, features=features)

            def _split_generators(self, dl_manager):
                return {"train": self._generate_examples()}

            def _generate_examples(self):
                for number in range(200):
                    yield number, {"number": number}

        builder = Shuffled(data_dir=data)
        config = tfds.download.DownloadConfig(num_shards=4)
        builder.download_and_prepare(download_config=config)
        shards = [
            [int(e["number"]) for e in builders.read_in_order(builder, part)]
            for part in tfds.even_splits("train", 4)
        ]
        together = [int(e["number"]) for e in builders.read_in_order(builder, "train")]
        assert sorted(together) == list(range(200))
        assert together == sum(shards, [])

    def test_read_before_prepare(self, data):
        with pytest.raises(ValueError, match="`builder`.*enwik8/integers"):
            builders.read_in_order(integers(data), "train")

    def test_read_a_split_that_is_not_there(self, raw, data):
        builder = integers(data)
        builders.prepare(builder, raw)
        with pytest.raises(ValueError, match="'test'"):
            builders.read_in_order(builder, "test")


class TestPrepare:
    def test_only_the_data_dir_is_written_to(self, raw, data, tmp_path):
        before = times(raw)
        builders.prepare(integers(data), raw)
        assert times(raw) == before
        assert set(tmp_path.iterdir()) == {raw, data}

    def test_what_is_there_is_left_alone(self, raw, data):
        builders.prepare(integers(data), raw)
        before = times(data)
        builders.prepare(integers(data), raw)
        builders.prepare(integers(data))
        assert times(data) == before
        assert first_ids(integers(data), "train") == [0, 1, 2]

    def test_other_files_need_another_folder(self, raw, data):
        builders.prepare(integers(data), raw)
        write_lines(raw, "train", first=50)
        with pytest.raises(ValueError, match=r"`data_dir`.*train\.txt' .* 18 "):
            builders.prepare(integers(data), raw)
        assert first_ids(integers(data), "train") == [0, 1, 2]

    @pytest.mark.parametrize("whole", [True, False])
    def test_what_a_killed_process_has_left(self, raw, data, whole):
        builder = integers(data)
        builders.prepare(builder, raw)
        path = builder.data_path
        before = sorted(p.name for p in path.parent.iterdir())
        (path.parent / f"incomplete.ABC_{path.name}").mkdir()
        earlier = path.parent / f"{path.name}.earlier"
        if whole:
            earlier.mkdir()
        else:
            path.rename(earlier)
        builders.prepare(integers(data), raw)
        assert first_ids(integers(data), "train") == [0, 1, 2]
        assert sorted(p.name for p in path.parent.iterdir()) == before

    def test_files_for_more_splits(self, raw, data):
        builder = integers(data)
        builders.prepare(builder, raw)
        write_lines(raw, "test", first=9)
        builders.prepare(builder, raw)
        for each in (builder, integers(data)):
            assert first_ids(each, "train") == [0, 1, 2]
            assert first_ids(each, "test") == [9, 10, 11]
        assert [p.name for p in builder.data_path.parent.iterdir()] == ["1.0.0"]

    def test_files_for_fewer_splits(self, raw, data):
        write_lines(raw, "test")
        builders.prepare(integers(data), raw)
        for name in ("train.txt", "test.txt"):
            (raw / name).unlink()
            builders.prepare(integers(data), raw)
            assert first_ids(integers(data), "train") == [0, 1, 2]

    def test_damaged_files_for_more_splits_change_nothing(self, raw, data):
        builder = integers(data)
        builders.prepare(builder, raw)
        before = times(builder.data_path)
        (raw / "test.txt").write_text("1 2\nx\n")
        with pytest.raises(ValueError, match="test.txt"):
            builders.prepare(builder, raw)
        assert times(builder.data_path) == before
        assert [p.name for p in builder.data_path.parent.iterdir()] == ["1.0.0"]
        for each in (builder, integers(data)):
            assert first_ids(each, "train") == [0, 1, 2]
            assert list(each.info.splits) == ["train"]

    def test_files_for_other_splits(self, raw, data, tmp_path):
        builders.prepare(integers(data), raw)
        write_lines(tmp_path / "other", "test")
        with pytest.raises(ValueError, match="`raw_dir`.*raw_dir='.*'test'.*'train'"):
            builders.prepare(integers(data), tmp_path / "other")
        assert first_ids(integers(data), "train") == [0, 1, 2]

    @pytest.mark.parametrize("name", ["missing", "train.txt"])
    def test_no_folder(self, raw, data, refusal, name):
        assert "`raw_dir` must be a folder" in refusal(integers(data), raw / name)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, AssertionError])
    def test_other_errors_are_not_hidden(self, raw, data, monkeypatch, error):
        generate = mock.Mock(side_effect=error("self._a_mistake"))
        monkeypatch.setattr(builders.Enwik8, "_generate_examples", generate)
        with pytest.raises(error, match="_a_mistake"):
            builders.prepare(integers(data), raw)
        assert not data.exists()


class TestDownloads:
    @pytest.fixture
    def fail(self, monkeypatch):
        def fail(error):
            def download(self, url):
                # As tfds does, in a folder that it then forgets.
                path = self.download_dir / "enwik8" / "enwik8.tmp.0123"
                path.mkdir(parents=True)
                (path / "part").write_text("half")
                raise error

            monkeypatch.setattr(tfds.download.DownloadManager, "download", download)

        return fail

    @pytest.mark.parametrize(
        "error", [ConnectionError("no route"), tfds.download.DownloadError("no route")]
    )
    def test_no_network(self, data, fail, refusal, error):
        fail(error)
        message = refusal(builders.Enwik8(data_dir=data, config="bytes"))
        for part in ("enwik8/bytes", "no route", "`enwik8.zip`", "`raw_dir`"):
            assert part in message

    def test_complete_downloads_stay(self, data, fail):
        earlier = data / "downloads" / "enwik8" / "enwik8.zip"
        running = data / "downloads" / "enwik8" / "other.tmp.4567" / "part"
        for path in (earlier, running):
            path.parent.mkdir(parents=True)
            path.write_text("content")
        fail(ConnectionError("no route"))
        with pytest.raises(ValueError, match="enwik8/bytes.*/data/"):
            builders.prepare(builders.Enwik8(data_dir=data, config="bytes"))
        files = {path for path in data.glob("**/*") if path.is_file()}
        assert files == {earlier, running}

    def test_downloads_of_a_killed_process_are_removed(self, raw, data, monkeypatch):
        part = data / "downloads" / "enwik8" / "enwik8.tmp.4567" / "part"
        part.parent.mkdir(parents=True)
        part.write_text("half")
        monkeypatch.setattr(preparation, "SECONDS_UNTIL_GIVEN_UP", -1.0)
        builders.prepare(integers(data), raw)
        assert not part.parent.exists()

    @pytest.mark.parametrize(
        "name, missing", [("mnist", "-ubyte.gz"), ("cifar10", "cifar-10-binary.tar.gz")]
    )
    def test_nothing_is_downloaded_where_raw_files_are_named(
        self, raw, data, refusal, name, missing
    ):
        message = refusal(tfds.builder(name, data_dir=data), raw)
        for part in ("must hold the file", missing, "'train.txt'"):
            assert part in message
        assert "\n" not in message

    def test_wrong_checksum_of_a_file_that_tfds_knows(self, raw, data, refusal):
        (raw / "cifar-10-binary.tar.gz").write_text("not the archive")
        message = refusal(tfds.builder("cifar10", data_dir=data), raw)
        for part in ("cifar10", "not the one expected", "cifar-10-binary.tar.gz"):
            assert part in message

    def test_builder_of_tfds_without_its_files(self, data, refusal):
        message = refusal(tfds.builder("imagenet2012", data_dir=data))
        assert "ILSVRC2012_img_train.tar" in message

    def test_builder_of_tfds_that_takes_no_files(self, raw, data, refusal, monkeypatch):
        error = tf.errors.FailedPreconditionError(None, None, "no route")
        builder = tfds.builder("pg19", data_dir=data)
        fail = mock.Mock(side_effect=error)
        monkeypatch.setattr(type(builder), "_split_generators", fail)
        message = refusal(builder, raw)
        assert re.search("pg19.*no route.*no raw files", message, re.DOTALL)

    def test_checksums_are_part_of_the_package(self):
        folder = pathlib.Path(builders.__file__).parent
        for builder in (builders.Enwik8, builders.Wikitext103):
            assert pathlib.Path(builder._checksums_path) == folder / "checksums.tsv"
            names = [info.filename for info in builder.url_infos.values()]
            assert "enwik8.zip" in names
            assert "wikitext-103-v1.zip" in names and "wikitext-103-raw-v1.zip" in names
