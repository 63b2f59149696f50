"""What commands write: all of it, or beside the place where it belongs."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import stat
import sys

PARTIAL = ".partial"


@contextlib.contextmanager
def open_output(path):
    """Opens a file for text, which takes its place when it is complete.

    Until then it is beside it, as `PATH.partial`, and an earlier file stays. If an
    exception ends the block, what there is remains, and a line on stderr says where.
    What a killed command has left there is kept, as `PATH.partial.1` and so on.

    Args:
        path: the path; None for no file. What is no regular file, such as a pipe, is
            written at once.

    Yields:
        The file, or None.
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

    Until then it is in a folder inside, `PATH/.partial`. Files of the same names in
    `PATH` are replaced, all others there stay.

    Args:
        path: the folder, which is made.

    Yields:
        The path of the folder inside, to be filled.
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


class Lines:
    """Writes texts as lines of JSON, in their order, as soon as they are done.

    Args:
        samples: list of `TextSample`.
        file: the file; None for none.
    """

    def __init__(self, samples, file):
        self._samples, self._file = samples, file
        self._num_written = 0

    def follow(self, parts):
        """Passes on what `Continuation.run` yields."""
        for part in parts:
            yield part
            self._write_done()

    def _write_done(self):
        first = self._num_written
        while first < len(self._samples) and self._samples[first].is_done:
            first += 1
        self._write(self._samples[self._num_written : first])
        self._num_written = first

    def write_rest(self):
        """Writes those that are not done or wait for others, if they have begun."""
        rest = self._samples[self._num_written :]
        self._write([sample for sample in rest if sample.num_tokens])
        self._num_written = len(self._samples)

    def _write(self, samples):
        if self._file is None or not samples:
            return
        for sample in samples:
            line = json.dumps(sample.to_dict(), ensure_ascii=False)
            self._file.write(f"{line}\n")
        self._file.flush()
