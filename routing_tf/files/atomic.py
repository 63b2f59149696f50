"""Files and folders that are written whole or not at all."""

import contextlib
import itertools
import os
import pathlib
import shutil
import stat
import sys

PARTIAL = ".partial"


@contextlib.contextmanager
def whole(path):
    """Yields `PATH.partial` to write to, which then takes the place of the file."""
    partial = pathlib.Path(f"{path}{PARTIAL}")
    yield partial
    partial.replace(path)


def write_whole(path, text):
    """Writes a text as `whole` does; an `OSError` names the file that failed."""
    with told_where(path), whole(path) as partial:
        partial.write_text(text)


@contextlib.contextmanager
def told_where(path):
    """Names what could not be written."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{str(path)!r} must be written; is the disk full? Received: "
            f"{error.strerror or error}"
        ) from error


@contextlib.contextmanager
def open_output(path):
    """Opens a file for text, which takes its place when it is complete.

    Until then it is beside it, as `PATH.partial`, and an earlier file stays. If an
    exception ends the block, what there is remains, and a line on stderr says where.
    What a killed command has left there is kept, as `PATH.partial.1` and so on. What is
    no regular file, such as a pipe, is written at once. Without a path, `None` is
    yielded.
    """
    if path is None:
        yield None
        return
    # A link goes on to lead to the file.
    path = pathlib.Path(os.path.realpath(path))
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        with open_text(path) as file:
            yield file
        return
    partial = path.with_name(f"{path.name}{PARTIAL}")
    if partial.exists() and partial.stat().st_size:
        kept = _free_name(partial)
        partial.replace(kept)
        print(f"what an earlier command left is now {kept}", file=sys.stderr)
    try:
        with open_text(partial) as file:
            yield file
    except BaseException:
        if partial.exists() and partial.stat().st_size:
            print(f"not complete; what there is: {partial}", file=sys.stderr)
        else:
            partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def _free_name(path):
    names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


@contextlib.contextmanager
def fill_folder(path):
    """Makes a folder whose content takes its place when it is complete.

    Until then it is in a folder inside, `PATH/.partial`, whose path is yielded. Files
    of the same names in `PATH` are replaced, all others there stay.
    """
    folder = pathlib.Path(path)
    partial = folder / PARTIAL
    is_new = not folder.exists()
    # A command that was killed may have left one.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(folder if is_new else partial)
        raise
    paths = sorted(partial.rglob("*"))  # folders before what is in them
    for source in filter(pathlib.Path.is_dir, paths):
        (folder / source.relative_to(partial)).mkdir(exist_ok=True)
    # What is at the top, such as a graph, comes when all that it reads is there.
    files = [path for path in paths if not path.is_dir()]
    for source in sorted(files, key=lambda path: -len(path.parts)):
        source.replace(folder / source.relative_to(partial))
    shutil.rmtree(partial)


def is_empty(folder):
    """Tells whether nothing is in a folder, but what a killed command has left."""
    return all(path.name == PARTIAL for path in pathlib.Path(folder).iterdir())


def open_text(path):
    """Opens a file to write text of any characters."""
    return open(path, "w", encoding="utf-8", errors="replace", newline="\n")
