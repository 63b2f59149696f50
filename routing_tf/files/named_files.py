"""Files that people name: patterns and lists of paths."""

import csv
import glob
import io
import os
import pathlib


def find_files(option, patterns):
    """Returns the absolute paths, each once, of the files that an option names.

    `patterns` are paths or glob patterns, a string of them as `split_paths` takes it,
    or `None`. Raises a `ValueError` if one matches no file, or a pipe or a device.
    """
    if isinstance(patterns, (str, os.PathLike)):
        patterns = split_paths(os.fspath(patterns))
    try:
        patterns = [os.path.expanduser(os.fspath(p).strip()) for p in patterns or []]
    except TypeError as error:
        raise ValueError(
            f"`{option}` must be paths: a string or a list of strings. Received: "
            f"{option}={patterns!r}"
        ) from error
    found = []
    for pattern in filter(None, patterns):
        # A file whose own name looks like a pattern is meant literally.
        exists = os.path.isfile(pattern)
        matches = [pattern] if exists else glob.glob(pattern, recursive=True)
        # Anything but a folder counts, so that a broken link is an error later on.
        paths = [path for path in matches if not os.path.isdir(path)]
        for path in paths:
            check_regular(path)
        if not paths:
            raise ValueError(
                f"`{option}` must name existing files; to take all files of a folder "
                f"write 'folder/*' or 'folder/**'. Received: {pattern!r}, which "
                f"matches no file in the working directory {os.getcwd()!r}"
            )
        found += sorted(os.path.abspath(path) for path in paths)
    return list(dict.fromkeys(found))


def split_paths(paths):
    """Splits a string of paths at its commas; empty ones are left out.

    Double quotes around a path keep its commas, and a double quote inside of them is
    written twice, as in a file of comma-separated values.

    Example:
    ```python
    from routing_tf.files import named_files

    named_files.split_paths('a.txt, "b, c.txt"')  # ["a.txt", "b, c.txt"]
    ```
    """
    try:
        rows = list(csv.reader([paths], skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise ValueError(
            "Double quotes must be around a whole path, as in 'one.txt,\"two, "
            f"three.txt\"'. Received: {paths!r}"
        ) from error
    return [path.strip() for row in rows for path in row if path.strip()]


def join_paths(paths):
    """Joins paths to a string that `split_paths` splits again."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(paths)
    return line.getvalue()


def read_file(path):
    """Reads a file as `bytes`; a `ValueError` names the file that cannot be read."""
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"`files` must be readable. Received: {path!r}: {error.strerror}"
        ) from error


def check_regular(path):
    """Refuses pipes and devices, whose reading may never end."""
    path = os.fspath(path)
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise ValueError(
            f"{place(path)} must be a regular file. Received: a pipe, a socket or a "
            "device"
        )


def place(path, member=None, line=None):
    """Returns the name of a place in a file, for the beginning of a message."""
    name = f"The file {str(path)!r}"
    if member is not None:
        name += f", member {member!r}"
    if line is not None:
        name += f", line {line}"
    return name
