"""Files and folders written completely or not at all, and by one process at a time."""

import contextlib
import fcntl
import itertools
import os
import pathlib
import shutil
import stat
import sys

PARTIAL = ".partial"


@contextlib.contextmanager
def whole(path):
    """Yields `PATH.partial` to write to, which then replaces the file."""
    partial = pathlib.Path(f"{path}{PARTIAL}")
    yield partial
    partial.replace(path)


def write_whole(path, text):
    """Writes a text like `whole`; an `OSError` names the file."""
    with told_where(path), whole(path) as partial:
        partial.write_text(text)


@contextlib.contextmanager
def told_where(path):
    """Names the file that could not be written."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{str(path)!r} must be written; is the disk full? Received: "
            f"{error.strerror or error}"
        ) from error


@contextlib.contextmanager
def open_output(path):
    """Opens a file for text, which appears when it is complete.

    Until then it is `PATH.partial`, and an earlier file stays. If an exception ends the
    block, the partial file remains, and a line on stderr names it. The partial file of
    a killed command is kept as `PATH.partial.1` and so on. Other files than regular
    ones, such as pipes, are written directly. Without a path, this yields `None`.
    """
    if path is None:
        yield None
        return
    # A link still leads to the file.
    path = pathlib.Path(os.path.realpath(path))
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        with open_text(path) as file:
            yield file
        return
    partial = path.with_name(f"{path.name}{PARTIAL}")
    if partial.exists() and partial.stat().st_size:
        kept = _free_name(partial)
        partial.replace(kept)
        print(f"the partial file of an earlier command is now {kept}", file=sys.stderr)
    try:
        with open_text(partial) as file:
            yield file
    except BaseException:
        if partial.exists() and partial.stat().st_size:
            print(f"not complete; the partial file is {partial}", file=sys.stderr)
        else:
            partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def _free_name(path):
    names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


@contextlib.contextmanager
def fill_folder(path):
    """Makes a folder whose content appears when it is complete.

    Until then the content is in `PATH/.partial`, whose path is yielded. It replaces
    files of the same names in `PATH`; all others stay.
    """
    folder = pathlib.Path(path)
    partial = folder / PARTIAL
    is_new = not folder.exists()
    # A killed command may have left one.
    shutil.rmtree(partial, ignore_errors=True)
    with told_where(folder):
        partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(folder if is_new else partial)
        raise
    paths = sorted(partial.rglob("*"))  # folders before what is in them
    for source in filter(pathlib.Path.is_dir, paths):
        (folder / source.relative_to(partial)).mkdir(exist_ok=True)
    # Files at the top, such as a graph, come after the files that they read.
    files = [path for path in paths if not path.is_dir()]
    for source in sorted(files, key=lambda path: -len(path.parts)):
        source.replace(folder / source.relative_to(partial))
    shutil.rmtree(partial)


def is_empty(folder):
    """Returns whether a folder is empty, except for files of a killed command."""
    return all(path.name == PARTIAL for path in pathlib.Path(folder).iterdir())


def open_text(path):
    """Opens a file to write text of any characters."""
    return open(path, "w", encoding="utf-8", errors="replace", newline="\n")


@contextlib.contextmanager
def locked(folder, wait=True):
    """Lets one process at a time work in an existing folder.

    If `wait` is False and another process holds the lock, raises `BlockingIOError`.
    On file systems without locks, such as some network mounts, it does nothing;
    `filelock` fails on most of them, and leaves a file of its own in the folder.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(lock)
