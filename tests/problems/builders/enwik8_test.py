import pathlib
import re
from unittest import mock

import numpy as np
import pytest
import tensorflow_datasets as tfds

from routing_tf.problems import builders
from tests.problems.prepared import write_zip

DUMMY_DATA = pathlib.Path(__file__).parent / "dummy_data"
SPLIT_SIZES = {"train": 1800, "validation": 100, "test": 100}
# Not UTF-8 anywhere, with zeros at ends of pieces, and no two pieces alike.
START = b"<mediawiki"
STREAM = START + np.random.default_rng(0).bytes(1990)
STREAM = STREAM[:63] + b"\0" + STREAM[64:127] + b"\0" + STREAM[128:]


class BytesTest(tfds.testing.DatasetBuilderTestCase):
    DATASET_CLASS = builders.Enwik8
    BUILDER_CONFIG_NAMES_TO_TEST = ["bytes"]
    EXAMPLE_DIR = DUMMY_DATA / "enwik8_bytes"
    SPLITS = {"train": 4, "validation": 1, "test": 1}

    def setUp(self):
        super().setUp()
        sizes = {"SPLIT_SIZES": SPLIT_SIZES, "CHUNK_SIZE": 512}
        patch = mock.patch.multiple(builders.Enwik8, **sizes)
        patch.start()
        self.patchers.append(patch)


class IntegersTest(tfds.testing.DatasetBuilderTestCase):
    DATASET_CLASS = builders.Enwik8
    BUILDER_CONFIG_NAMES_TO_TEST = ["integers"]
    EXAMPLE_DIR = DUMMY_DATA / "enwik8_integers"
    SPLITS = {"train": 4, "validation": 2, "test": 1}


def write(folder, content, zipped):
    """Writes the original file, or the zip file that it comes in."""
    path = folder / ("enwik8.zip" if zipped else "enwik8")
    if zipped:
        write_zip(path, {"enwik8": content})
    else:
        path.write_bytes(content)
    return path


class TestBytes:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(builders.Enwik8, "SPLIT_SIZES", SPLIT_SIZES)
        monkeypatch.setattr(builders.Enwik8, "CHUNK_SIZE", 64)

    @pytest.fixture
    def builder(self, data):
        return builders.Enwik8(data_dir=data, config="bytes")

    def read(self, builder, split):
        return [e["text"] for e in builders.read_in_order(builder, split)]

    @pytest.mark.parametrize("zipped", [False, True])
    def test_every_byte_survives(self, raw, builder, zipped):
        write(raw, STREAM, zipped)
        builders.prepare(builder, raw)
        pieces = self.read(builder, "train")
        assert {len(piece) for piece in pieces[:-1]} == {64}
        assert pieces[0].endswith(b"\0") and pieces[1].endswith(b"\0")
        assert b"".join(pieces) == STREAM[:1800]
        assert b"".join(self.read(builder, "validation")) == STREAM[1800:1900]
        assert b"".join(self.read(builder, "test")) == STREAM[1900:]

    def test_it_is_downloaded_if_there_is_nothing(self, tmp_path, raw, builder):
        download = mock.Mock(return_value=write(tmp_path, STREAM, zipped=True))
        with mock.patch.object(tfds.download.DownloadManager, "download", download):
            builders.prepare(builder, raw)
        download.assert_called_once_with("http://mattmahoney.net/dc/enwik8.zip")
        assert builder.info.splits["train"].num_examples == 29

    def test_other_files_are_no_reason_to_download(self, raw, builder, refusal):
        (raw / "enwik9").write_bytes(STREAM)
        message = refusal(builder, raw)
        assert "one of enwik8, enwik8.zip. Received:" in message
        assert "'enwik9'" in message and str(raw) in message

    @pytest.mark.parametrize("zipped", [False, True])
    @pytest.mark.parametrize(
        "content, rule",
        [
            (STREAM[:-1], "exactly 2,000 bytes; it has too few bytes.*1,999 bytes"),
            (STREAM + b"\n", "exactly 2,000 bytes; it has too many bytes.*2,001 bytes"),
            (b"", "too few bytes. Received: 0 bytes"),
            (b"x" + STREAM[1:], "must begin with b'<mediawiki'. Received: b'xmed"),
        ],
    )
    def test_another_file(self, raw, builder, refusal, content, rule, zipped):
        path = write(raw, content, zipped)
        message = refusal(builder, raw)
        assert str(path) in message
        assert re.search(rule, message)

    def test_damaged_zip_files_and_a_second_attempt(self, raw, builder, refusal):
        path = write(raw, STREAM, zipped=True)
        good = path.read_bytes()
        # In the last split: the others have been written when it is found.
        place = good.index(STREAM[1950:1960])
        path.write_bytes(good[:place] + b"\xff\x00" + good[place + 2 :])
        assert "member 'enwik8' must be readable and undamaged" in refusal(builder, raw)
        path.write_bytes(b"<html>moved</html>")
        assert "not a zip file" in refusal(builder, raw)
        write_zip(path, {"enwik9": STREAM})
        message = refusal(builder, raw)
        assert "member 'enwik8'" in message and "'enwik9'" in message
        path.write_bytes(good)
        builders.prepare(builder, raw)
        assert b"".join(self.read(builder, "test")) == STREAM[1900:]


def test_the_usual_splits():
    sizes = builders.Enwik8.SPLIT_SIZES
    assert list(sizes.items()) == [
        ("train", 90_000_000),
        ("validation", 5_000_000),
        ("test", 5_000_000),
    ]
    assert builders.Enwik8.CHUNK_SIZE == 2**20


class TestIntegers:
    @pytest.fixture
    def builder(self, data):
        return builders.Enwik8(data_dir=data, config="integers")

    def test_each_line_with_integers_is_an_example(self, raw, builder):
        (raw / "train.txt").write_text("\n3 1  4\r\n \n15\t92\n2147483647 00")
        (raw / "test.txt").write_text("0\n")
        builders.prepare(builder, raw)
        assert set(builder.info.splits) == {"train", "test"}
        examples = list(builders.read_in_order(builder, "train"))
        assert all(example["ids"].dtype == np.int32 for example in examples)
        ids = [example["ids"].tolist() for example in examples]
        assert ids == [[3, 1, 4], [15, 92], [2147483647, 0]]
        (example,) = builders.read_in_order(builder, "test")
        assert example["ids"].tolist() == [0]

    def test_no_files(self, raw, builder, refusal):
        names = "one of train.txt, valid.txt, test.txt"
        assert names in refusal(builder, None)
        assert names in refusal(builder, raw)
        (raw / "validation.txt").write_text("1")
        message = refusal(builder, raw)
        assert names in message and "'validation.txt'" in message

    @pytest.mark.parametrize(
        "content, line, rule",
        [
            (b"1 2\n3 x\n", 2, "all must be integers. Received: 'x'"),
            (b"1 2.0\n", 1, "all must be integers. Received: '2.0'"),
            (b"1\n\n+2\n", 3, "all must be integers. Received: '+2'"),
            (b"1_000\n", 1, "all must be integers. Received: '1_000'"),
            ("1\n2 ٣\n".encode(), 2, "all must be integers. Received: '٣'"),
            (b"1,2\n", 1, "all must be integers. Received: '1,2'"),
            (b"1\n2 -3\n", 2, "all must be not negative. Received: '-3'"),
            (b"1\n2147483648\n", 2, "at most 2147483647. Received: 2147483648"),
            (b"1\n" + b"9" * 5000, 2, "at most 2147483647"),
            (b"1\n\xff\n", 2, "must be valid UTF-8"),
        ],
    )
    def test_damaged_lines(self, raw, builder, refusal, content, line, rule):
        (raw / "train.txt").write_text("1 2\n")
        (raw / "test.txt").write_bytes(content)
        message = refusal(builder, raw)
        assert message.startswith(f"The file {str(raw / 'test.txt')!r}, line {line} ")
        assert rule in message
