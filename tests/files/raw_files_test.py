import gzip
import os
import re
import zipfile

import pytest

from routing_tf.files import named_files
from routing_tf.files import raw_files


def write(folder, content, name="file.txt"):
    path = folder / name
    path.write_bytes(content)
    return path


def write_zip(folder, content, member="inside.txt"):
    path = folder / "archive.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return path


def refusal(action, *args, **options):
    with pytest.raises(ValueError) as refused:
        list(action(*args, **options))
    return str(refused.value)


class TestReadLines:
    @pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "of the encoding"])
    def test_lines_and_their_numbers(self, tmp_path, mark):
        path = write(tmp_path, f"{mark}one\n\ntwo\n".encode())
        for each in (path, str(path)):
            lines = list(raw_files.read_lines(each))
            assert lines == [(1, "one"), (2, ""), (3, "two")]

    def test_lines_end_at_newlines_only(self, tmp_path):
        line = "a\rb\x0bc\x0cd\x1ce\x85f\u2028g\u2029h\ufeffi\r"
        path = write(tmp_path, f"{line}\nlast".encode())
        assert list(raw_files.read_lines(path)) == [(1, line), (2, "last")]

    @pytest.mark.parametrize("name", ["a.gz", "a.txt"])
    def test_gzip(self, tmp_path, name):
        content = gzip.compress("ä\nb".encode()) + gzip.compress(b"c\nd\n")
        path = write(tmp_path, content, name)
        lines = [line for _, line in raw_files.read_lines(path)]
        assert lines == ["ä", "bc", "d"]
        assert raw_files.file_size(path) == 8
        chunks = raw_files.read_chunks(path, start=3, size=4, chunk_size=3)
        assert list(chunks) == [b"bc\n", b"d"]

    @pytest.mark.parametrize(
        "damage, reason",
        [
            (lambda content: content[:-9], "before the end-of-stream marker"),
            (lambda content: content[:20] + b"\xff\xff" + content[22:], "Error"),
            (lambda content: content[:-8] + b"\0" + content[-7:], "CRC check failed"),
            (lambda content: content + b"more", "Not a gzipped file"),
            (lambda content: b"plain text", "Not a gzipped file"),
        ],
    )
    def test_damaged_gzip(self, tmp_path, damage, reason):
        whole = gzip.compress(bytes(range(97, 123)) * 9)
        path = write(tmp_path, damage(whole), "a.gz")
        for action in (raw_files.read_lines, raw_files.read_chunks):
            message = refusal(action, path)
            assert "a.gz' must be readable and undamaged" in message
            assert reason in message
        with pytest.raises(ValueError, match="`files`.*/a.gz'"):
            named_files.read_file(path)

    @pytest.mark.parametrize("in_zip", [False, True])
    def test_a_line_that_is_too_long(self, tmp_path, monkeypatch, in_zip):
        monkeypatch.setattr(raw_files, "MAX_LINE_BYTES", 10)
        make, member = (write_zip, "inside.txt") if in_zip else (write, None)
        path = make(tmp_path, b"012345678\n" * 3)
        assert len(list(raw_files.read_lines(path, member))) == 3
        path = make(tmp_path, b"012345678\n0123456789\n")
        message = refusal(raw_files.read_lines, path, member)
        assert "line 2 must have at most 10 bytes" in message

    def test_a_pipe(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        message = refusal(raw_files.read_lines, tmp_path / "pipe")
        assert "pipe' must be a regular file. Received: a pipe" in message

    def test_only_one_line_is_read_ahead(self, tmp_path):
        path = write(tmp_path, b"good\n" * 100_000 + b"\xff\n")
        lines = raw_files.read_lines(path)
        for _ in range(100_000):
            assert next(lines)[1] == "good"
        with pytest.raises(ValueError, match=r"file\.txt', .* 100001 .*0xff"):
            next(lines)

    @pytest.mark.parametrize(
        "content, rule",
        [
            (b"", " must not be empty.*0 bytes"),
            (b"\n", " must not be empty.*1 bytes"),
            (b" \r\n\t\n", " must not be empty.*5 bytes"),
            (b"a\nbc\xffd\n", ", line 2 must be valid UTF-8.*0xff at byte 2"),
            (b"a\nb\xc3", ", line 2 must be valid UTF-8.*0xc3 at byte 1"),
            (b"a\n\xed\xa0\x80\n", ", line 2 must be valid UTF-8.*0xed at byte 0"),
            (b"a\nb\0\n", ", line 2 must be text in UTF-8.*a NUL char.* at byte 1"),
            ("\na".encode("utf-16-be")[1:], ", line 2 must.*a NUL char.* at byte 0"),
            (b"<!DOCTYPE html><body>", ".*a web page"),
            (b"<html><body>Sign in</body>", ".*a web page"),
            (b"\n <!doctype HTML><body>\n", ".*a web page"),
            ("\ufeff<html<body>".encode(), ".*a web page"),
        ],
    )
    def test_not_text(self, tmp_path, content, rule):
        path = write(tmp_path, content)
        message = refusal(raw_files.read_lines, path)
        assert re.match(f"The file {re.escape(repr(str(path)))}{rule}", message)

    def test_text_about_html_is_no_web_page(self, tmp_path):
        path = write(tmp_path, b"It says\n<html>\n")
        assert len(list(raw_files.read_lines(path))) == 2

    def test_missing_file_and_folder(self, tmp_path):
        path = tmp_path / "missing.txt"
        message = refusal(raw_files.read_lines, path)
        assert str(path) in message and "No such file" in message
        message = refusal(raw_files.read_lines, tmp_path)
        assert str(tmp_path) in message and "directory" in message


class TestZipFiles:
    """What else is wrong with them is refused in the tests of the builders."""

    def test_members_are_the_files(self, tmp_path):
        path = tmp_path / "archive.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.mkdir("folder")
            archive.writestr("folder/a", "1")
            archive.writestr("b", "2")
        assert raw_files.members(path) == ["folder/a", "b"]

    def test_cut_off_zip_file(self, tmp_path):
        path = write_zip(tmp_path, "0123456789" * 1000)
        path.write_bytes(path.read_bytes()[:-30])
        assert str(path) in refusal(raw_files.read_lines, path, "inside.txt")


class TestReadChunks:
    content = bytes(range(256)) * 4

    @pytest.mark.parametrize("zipped", [False, True])
    @pytest.mark.parametrize("start, size", [(0, None), (5, None), (10, 500), (3, 0)])
    def test_chunks_add_up(self, tmp_path, zipped, start, size):
        path, member = write(tmp_path, self.content), None
        if zipped:
            path, member = write_zip(tmp_path, self.content), "inside.txt"
        chunks = list(raw_files.read_chunks(path, member, start, size, chunk_size=100))
        end = None if size is None else start + size
        assert b"".join(chunks) == self.content[start:end]
        assert all(len(chunk) == 100 for chunk in chunks[:-1])

    def test_too_short(self, tmp_path):
        path = write(tmp_path, self.content)
        message = refusal(raw_files.read_chunks, path, start=1000, size=100)
        assert str(path) in message
        assert re.search("at least 1,100 bytes.*Received: 1,024 bytes", message)


def test_listing_is_cut_short():
    assert raw_files.listing([]) == "no files"
    assert raw_files.listing(["a", "b"]) == "'a', 'b'"
    assert raw_files.listing(range(50)).endswith("'19' and 30 more")
