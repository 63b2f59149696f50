"""Arrays that grow on disk until they are complete, and are then read in place.

A store is a folder of `.npy` files and an `info.json`. While it is written, its name
ends in `.incomplete`: stopped work continues from its last checkpoint, and nobody
mistakes an incomplete store for a complete one. Neither tensorflow-datasets nor
ArrayRecord continues stopped work, or maps all records as one array.
"""

import contextlib
import json
import os
import pathlib
import shutil
import time

import numpy as np
from absl import logging

from routing_tf.files import atomic

SECONDS_BETWEEN_CHECKPOINTS = 10.0
# Version of the states in `progress.json`: work of another version begins again.
FORMAT = 2


def is_complete(folder):
    """Returns whether a folder is a complete store."""
    return pathlib.Path(folder, "info.json").is_file()


def read(folder, dtypes=None):
    """Opens a complete store: a dictionary from name to array on disk (`numpy.memmap`).

    `dtypes`, as for `write`, are those that the arrays must have; `None` skips the
    check. Raises a `ValueError` if the store is damaged or incomplete.
    """
    folder = pathlib.Path(folder)
    with _whole(folder):
        lengths = _read_info(folder)["lengths"]
        arrays = {name: _map(folder, name, length) for name, length in lengths.items()}
        for name, dtype in (dtypes or {}).items():
            item = np.dtype(dtype)
            found = np.dtype((arrays[name].dtype, arrays[name].shape[1:]))
            if found != item:
                raise ValueError(f"{name}.npy has entries of {found} instead of {item}")
    return arrays


def identity_of(folder):
    """Returns the identity with which a complete store was written, see `write`."""
    folder = pathlib.Path(folder)
    with _whole(folder):
        return _read_info(folder)["identity"]


@contextlib.contextmanager
def _whole(folder):
    """Turns the errors of a damaged store into `ValueError`."""
    try:
        yield
    # NumPy reads the header of a file as Python, so damage may raise any error.
    except Exception as error:
        raise ValueError(
            "The prepared data must be complete. Received: "
            f"{str(folder)!r}: {error}. Remove that folder and prepare it again with "
            "`python -m routing_tf.datagen`"
        ) from error


def _read_info(folder):
    info = json.loads((folder / "info.json").read_text())
    if not isinstance(info, dict) or not all(
        isinstance(info.get(key), dict) for key in ("lengths", "identity")
    ):
        raise ValueError("info.json has no lengths and identity of arrays")
    return info


def _map(folder, name, length):
    # Mapped, it takes no memory and cannot be longer than the file.
    array = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    if array.ndim == 0 or len(array) != length:
        raise ValueError(
            f"{name}.npy has the shape {array.shape} instead of {length} entries"
        )
    return array


def write(folder, dtypes, identity, parts):
    """Writes a store, or continues earlier work on it.

    `dtypes` maps the name of each array to its data type, such as `("int64", (2,))` for
    pairs. `identity` describes the source of the arrays, as JSON takes it: stopped work
    continues only with the same identity; a complete store with the same identity is
    kept, and another one is replaced. `parts` is a function of a state, `None` at
    first, that returns an iterable of pairs: a dictionary from name to the next entries
    of that array, and the state from which to continue after them, as JSON takes it.

    If `parts` raises a `ValueError`, no files remain; if the disk is full, work can
    continue later.
    """
    folder, identity = pathlib.Path(folder), json.loads(json.dumps(identity))
    with alone(folder.parent):
        if is_complete(folder):  # by another process, meanwhile
            if identity_of(folder) == identity:
                return
            shutil.rmtree(folder)
        partial = folder.with_name(f"{folder.name}.incomplete")
        try:
            with contextlib.closing(_Writer(partial, dtypes, identity)) as writer:
                for arrays, state in parts(writer.state):
                    writer.append(arrays)
                    writer.checkpoint(state)
                writer.finish()
        except ValueError:
            shutil.rmtree(partial)
            raise
        except OSError as error:
            raise ValueError(
                f"The folder {str(folder.parent)!r} must have room and must be "
                f"writable. Received: {error}. Free some, and the same command "
                "continues where it stopped"
            ) from error
        os.replace(partial, folder)


@contextlib.contextmanager
def alone(folder):
    """Lets one process at a time work in a folder, which is made if missing.

    A folder inside it has its own lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(atomic.locked(folder, wait=False))
        except BlockingIOError:
            logging.warning("waiting for another process that writes to %s", folder)
            stack.enter_context(atomic.locked(folder))
        except OSError as error:
            raise ValueError(
                f"The folder {str(folder)!r} must be writable. Received: {error}"
            ) from error
        yield


class _Writer:
    """The files of a store while it is written: a header and the entries so far."""

    def __init__(self, folder, dtypes, identity):
        self._folder, self._identity, self._files = folder, identity, {}
        self._dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        self._last_checkpoint = time.monotonic()
        try:
            self._begin(**json.loads((folder / "progress.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            self.close()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._begin(FORMAT, identity, dict.fromkeys(dtypes, 0), None)

    def _begin(self, format, identity, lengths, state):
        if (format, identity) != (FORMAT, self._identity):
            raise ValueError("the existing data was made from another source")
        self._lengths, self.state = lengths, state
        for name, item in self._dtypes.items():
            path = self._folder / f"{name}.npy"
            self._files[name] = file = path.open("r+b" if path.exists() else "w+b")
            end = _write_header(file, item, 0) + lengths[name] * item.itemsize
            if file.seek(0, os.SEEK_END) < end:
                raise ValueError(f"{path.name} is shorter than it was")
            # Entries after the last checkpoint are made once more.
            file.seek(end)
            file.truncate()

    def append(self, arrays):
        for name, values in arrays.items():
            item = self._dtypes[name]
            values = np.asarray(values).reshape(-1, *item.shape)
            limits = np.iinfo(item.base)
            if values.size and not (
                limits.min <= values.min() and values.max() <= limits.max
            ):
                raise ValueError(
                    f"The values of `{name}` must fit into {item.base}. Received: "
                    f"{values.min()} to {values.max()}"
                )
            values.astype(item.base).tofile(self._files[name])
            self._lengths[name] += len(values)

    def checkpoint(self, state):
        self.state = state
        if time.monotonic() - self._last_checkpoint > SECONDS_BETWEEN_CHECKPOINTS:
            self._write("progress.json", format=FORMAT, state=state)
            self._last_checkpoint = time.monotonic()

    def finish(self):
        for name, file in self._files.items():
            _write_header(file, self._dtypes[name], self._lengths[name])
        self._write("info.json")
        (self._folder / "progress.json").unlink(missing_ok=True)

    def _write(self, name, **content):
        """Writes the description of the arrays once they are on the disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        content = {"identity": self._identity, "lengths": self._lengths, **content}
        with atomic.whole(self._folder / name) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n")

    def close(self):
        for file in self._files.values():
            file.close()


def _write_header(file, item, length):
    """Writes the header of an array, whose size is fixed; returns the size."""
    file.seek(0)
    shape, descr = (length, *item.shape), np.lib.format.dtype_to_descr(item.base)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()
