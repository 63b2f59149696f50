"""Folders to write into."""

import fnmatch
import os
import pathlib


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
