"""Problems whose data is the user's own files, which need no preparation."""

import hashlib
import os
import shutil

import numpy as np

from routing_tf.choices import SPLITS
from routing_tf.problems import array_store
from routing_tf.problems.prepared import PreparedProblem


class OwnFilesProblem(PreparedProblem):
    """A problem that reads the user's files directly, or arrays made of them.

    Without `generate` the files are read when a split is asked for, into memory.
    Arrays that `generate` has made are taken as long as the files are the same; it
    makes them anew if they are not. Takes the arguments of `PreparedProblem`.
    """

    def files_of(self, split):
        """Returns the paths of the files that a split is made of."""
        raise NotImplementedError(
            f"{type(self).__name__} must define files_of(split), which returns paths."
        )

    def identity(self, split):
        return {**super().identity(split), "files": fingerprint(self.files_of(split))}

    def is_source_prepared(self):
        return True

    def num_examples(self, split):
        return None

    def prepare_source(self):
        super().prepare_source()
        for split in SPLITS:
            if array_store.is_complete(self.folder(split)) and not self.is_made(split):
                shutil.rmtree(self.folder(split))

    def is_made(self, split):
        """Tells whether there are arrays of a split, made of the files as they are."""
        if not self.storage_dir or not array_store.is_complete(self.folder(split)):
            return False
        return array_store.identity_of(self.folder(split)) == self.identity(split)

    def read_split(self, split):
        if self.is_made(split):
            return array_store.read(self.folder(split), self.dtypes())
        dtypes = {name: np.dtype(dtype) for name, dtype in self.dtypes().items()}
        parts = {
            name: [np.zeros((0, *dtype.shape), dtype.base)]
            for name, dtype in dtypes.items()
        }
        for arrays, _ in self.parts(split, 0, None):
            for name, values in arrays.items():
                item = dtypes[name]
                values = np.asarray(values, item.base).reshape(-1, *item.shape)
                parts[name].append(values)
        return {name: np.concatenate(values) for name, values in parts.items()}


def fingerprint(paths):
    """Returns a string that tells whether files are still the same.

    Args:
        paths: list of paths. Contents are not read: a file is the same if its path,
            size and time are.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            found = os.stat(path)
        except OSError as error:
            raise ValueError(
                f"The file {str(path)!r} must be readable. Received: {error.strerror}"
            ) from error
        digest.update(f"{path}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return digest.hexdigest()
