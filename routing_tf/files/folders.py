"""Folders to write into."""

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
