"""Reading raw files of text, with errors that name the place of damage."""

import contextlib
import io
import zipfile
import zlib

import tensorflow_datasets as tfds

from routing_tf.files.named_files import check_regular
from routing_tf.files.named_files import place
from routing_tf.files.named_files import unpacked

# Largest number of reported files of a folder.
NUM_NAMES_SHOWN = 20
# 90 million integers, the training data of enwik8, may be one line.
MAX_LINE_BYTES = 1 << 29
DAMAGED = (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)


def read_lines(path, member=None, keep_ends=False):
    r"""Yields the number, from 1, and the text of each line of a file in UTF-8.

    Lines end only at "\n": "\r" and the other characters at which `str.splitlines`
    would break stay inside their line. Only one line at a time is in memory, of at most
    `MAX_LINE_BYTES`. Raises a `ValueError` if the file has no text, is not UTF-8, has
    NUL characters or is an HTML page.

    Example:
    ```python
    import pathlib
    from routing_tf.files import raw_files

    pathlib.Path("poem.txt").write_text("one\ntwo\n")
    list(raw_files.read_lines("poem.txt"))  # [(1, "one"), (2, "two")]
    ```
    """
    only_spaces = True
    with open_file(path, member) as stream:
        lines = iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, 1):
            check_line_length(line, path, member, number)
            if only_spaces and not line.isspace():
                only_spaces = False
                check_not_html(line, path, member)
            text = decode(line, path, member, number)
            if number == 1:
                text = text.removeprefix("\ufeff")  # marks the encoding
            yield number, text if keep_ends else text.removesuffix("\n")
    if only_spaces:
        raise ValueError(
            f"{place(path, member)} must not be empty. Received: a file of "
            f"{file_size(path, member)} bytes without any text"
        )


def read_chunks(path, member=None, start=0, size=None, chunk_size=1 << 20):
    """Yields the bytes of a file from `start` on, in pieces; all if `size` is `None`.

    Raises a `ValueError` if the file ends before `start + size`.

    Example:
    ```python
    import pathlib
    from routing_tf.files import raw_files

    pathlib.Path("ten").write_bytes(b"0123456789")
    list(raw_files.read_chunks("ten", start=5, chunk_size=3))  # [b"567", b"89"]
    ```
    """
    if size is None:
        size = file_size(path, member) - start
    end = start + size
    with open_file(path, member) as stream:
        stream.seek(start)
        while start < end:
            chunk = stream.read(min(chunk_size, end - start))
            if not chunk:
                raise ValueError(
                    f"{place(path, member)} must have at least {end:,} bytes; it has "
                    f"too few bytes. Received: {start:,} bytes"
                )
            start += len(chunk)
            yield chunk


def file_size(path, member=None):
    """Returns the unpacked size of a file, or of a member of a zip file, in bytes."""
    with open_file(path, member) as stream:
        return stream.seek(0, 2)


def members(path):
    """Returns the names of the files in a zip file, as a list."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(readable(path))
        stream = stack.enter_context(tfds.core.Path(path).open("rb"))
        archive = stack.enter_context(zipfile.ZipFile(stream))
        return [info.filename for info in archive.infolist() if not info.is_dir()]


@contextlib.contextmanager
def open_file(path, member=None):
    """Opens a file, or a member of a zip file, for reading its bytes.

    A gzip file is unpacked, its members one after the other. While it is open, errors
    of reading it become `ValueError`.
    """
    if member is not None and member not in (there := members(path)):
        raise ValueError(
            f"The file {str(path)!r} must have the member {member!r}. Received: a zip "
            f"file of {listing(there)}"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(readable(path, member))
        check_regular(path)
        stream = stack.enter_context(tfds.core.Path(path).open("rb"))
        if member is None:
            stream = unpacked(stream, path)
        else:
            archive = stack.enter_context(zipfile.ZipFile(stream))
            # Only a buffer reads lines of limited length fast.
            stream = io.BufferedReader(stack.enter_context(archive.open(member)))
        yield stream


@contextlib.contextmanager
def readable(path, member=None):
    """Turns errors of reading a file into `ValueError`."""
    try:
        yield
    except DAMAGED as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{place(path, member)} must be readable and undamaged. Received: {reason}"
        ) from error


def check_line_length(line, path, member, number):
    """Refuses a line that needs too much memory."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(
            f"{place(path, member, number)} must have at most {MAX_LINE_BYTES:,} "
            "bytes. Received: more, without a newline among them"
        )


def decode(line, path, member, number):
    """Turns one line of a file from bytes into a string, if it is text."""
    where = place(path, member, number)
    # NUL is valid UTF-8, but occurs only in UTF-16 and binary files.
    if b"\0" in line:
        raise ValueError(
            f"{where} must be text in UTF-8. Received: a NUL character at byte "
            f"{line.index(0)} of the line, as in binary files and in UTF-16"
        )
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} must be valid UTF-8. Received: 0x{line[error.start]:02x} at "
            f"byte {error.start} of the line ({error.reason})"
        ) from error


def check_not_html(line, path, member=None):
    """Refuses a web page that was saved instead of the file that it links to."""
    start = line.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.lower().startswith((b"<!doctype html", b"<html")):
        raise ValueError(
            f"{place(path, member)} must be the data itself. Received: a web page "
            f"that begins with {start[:40]!r}; download the file that it links to"
        )


def listing(names):
    """Returns names as text, shortened if there are many."""
    names = [str(name) for name in names]
    shown = ", ".join(map(repr, names[:NUM_NAMES_SHOWN])) or "no files"
    more = len(names) - NUM_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def given_folder(dl_manager):
    """Returns the folder of raw files of a tfds builder; `None` if nothing is in it."""
    try:
        return dl_manager.manual_dir
    except AssertionError:  # what tfds raises
        return None


def no_files_error(builder, folder, names):
    """Returns the error for a folder of raw files (or `None`) that lacks some."""
    found = "no folder, or an empty one"
    if folder is not None:
        found = (
            f"{str(folder)!r} with {listing(sorted(p.name for p in folder.iterdir()))}"
        )
    config = builder.builder_config.name
    return ValueError(
        f"The folder of raw files (`raw_dir`) for {builder.name}/{config} must hold "
        f"one of {', '.join(names)}. Received: {found}"
    )
