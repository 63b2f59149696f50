"""Files of texts that are written bit by bit, and nothing of them is lost."""

import contextlib
import json
import os
import pathlib
import stat
import sys


@contextlib.contextmanager
def open_output(path):
    """Opens a file for text, which takes its place when it is complete.

    Until then it is beside it, as `PATH.partial`, and an earlier file stays. If an
    exception ends the block, what there is remains, and a line on stderr says where.

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
    partial = path.with_name(f"{path.name}.partial")
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
