"""Files and folders that users name: patterns and lists of paths."""

import collections
import csv
import fnmatch
import glob
import gzip
import io
import itertools
import os
import pathlib
import zlib

# The first bytes of every gzip file, and of no text.
GZIP_START = b"\x1f\x8b\x08"


def make_folder(option, path):
    """Makes a folder, if it is missing, and returns its `pathlib.Path`."""
    folder = pathlib.Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`{option}` must be a folder that can be written. Received: "
            f"{str(path)!r}: {error.strerror}"
        ) from error
    return folder


def check_no_pattern(option, path):
    """Raises a `ValueError` if TensorFlow takes a path of checkpoints for a pattern."""
    path = str(path)
    if "\\" in path or not fnmatch.fnmatchcase(path, path):
        raise ValueError(
            "Weights must be in a folder whose path has no backslash and nothing in "
            "square brackets, because TensorFlow takes these for a pattern of names. "
            f"Received: {option}={path!r}. Use another name"
        )


def check_exists(flag, path):
    """Raises a `ValueError` that names a flag if its path does not exist."""
    if not os.path.exists(path):
        raise ValueError(
            f"`--{flag}` must exist. Received: --{flag}={path!r}, which does not"
        )


def find_files(option, patterns):
    """Returns the absolute paths of the files that an option names, each file once."""
    return each_once(named_paths(option, patterns))


def named_paths(option, patterns):
    """Returns the absolute paths that an option of `find_files` names.

    `patterns` are paths or glob patterns, a string of them for `split_paths`, or None.
    A file with several paths, or named several times, occurs several times.
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
        # A file whose name looks like a pattern is meant literally.
        exists = os.path.isfile(pattern)
        matches = [pattern] if exists else _matches(pattern)
        # Everything except folders counts, so that a broken link is an error later.
        paths = [path for path in matches if not os.path.isdir(path)]
        for path in paths:
            check_regular(path)
        if not paths:
            raise ValueError(
                f"`{option}` must name existing files; for all files of a folder, "
                f"write 'folder/*' or 'folder/**'. Received: {pattern!r}, which "
                f"matches no file in the working directory {os.getcwd()!r}"
            )
        found += sorted({os.path.abspath(path) for path in paths})
    return found


def _matches(pattern):
    """The matches of a glob pattern; `**` visits each visible folder once."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return glob.glob(pattern)
    first = parts.index("**")
    base = os.sep.join(parts[:first]) or (os.sep if first else os.curdir)
    behind = itertools.dropwhile("**".__eq__, parts[first:])
    rest = os.sep.join(behind) or "*"
    return [
        path
        for start in filter(os.path.isdir, glob.glob(base))
        for folder in folders_below(start)
        for path in _matches(os.path.join(glob.escape(folder), rest))
    ]


def folders_below(folder, ignored=()):
    """Yields a folder and those below it, each once, except hidden ones.

    Folders with a name in `ignored`, and all below them, are left out. Links come last,
    so that a folder is found by its own name if possible.
    """
    seen, waiting = set(), collections.deque([os.fspath(folder)])
    while waiting:
        folder = waiting.popleft()
        if identity(folder) in seen:
            continue
        seen.add(identity(folder))
        yield folder
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*", ""))):
            path = path.removesuffix(os.sep)
            if os.path.basename(path) in ignored:
                continue
            if os.path.islink(path):
                waiting.append(path)
            else:
                waiting.appendleft(path)


def each_once(paths):
    """Returns paths in their order, without other names of the same file.

    Of several names, one with the fewest links is kept.
    """
    names = {}
    for path in paths:
        names.setdefault(identity(path), []).append(path)
    return [
        found[0] if len(found) == 1 else min(found, key=_num_links)
        for found in names.values()
    ]


def identity(path):
    """Returns the identity of a file, whatever links lead to it."""
    try:
        found = os.stat(path)
    except OSError:  # reading it says what is wrong
        return os.path.abspath(path)
    return found.st_dev, found.st_ino


def _num_links(path):
    return sum(map(os.path.islink, (path, *pathlib.Path(path).parents)))


def split_paths(paths):
    """Splits a string of paths at its commas; leaves empty ones out.

    Double quotes around a path keep its commas, and a double quote inside them is
    doubled, as in a CSV file: `'a.txt, "b, c.txt"'`.
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


def read_file(path, option="files"):
    """Reads a file as `bytes`, and unpacks a gzip file.

    A `ValueError` names the file that cannot be read, and the option that names it.
    """
    try:
        with open(path, "rb") as stream:
            return unpacked(stream, path).read()
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"`{option}` must be readable. Received: {path!r}: {reason}"
        ) from error


def unpacked(stream, path):
    """Returns an unpacked stream of a gzip file; other streams do not change."""
    start = stream.read(len(GZIP_START))
    stream.seek(0)
    if start == GZIP_START or os.fspath(path).endswith(".gz"):
        return gzip.GzipFile(fileobj=stream, mode="rb")
    return stream


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
