"""Removes files that tfds leaves when it fails or is killed."""

import contextlib
import time

import tensorflow as tf

# A download that has not grown for this long belongs to a killed process.
SECONDS_UNTIL_GIVEN_UP = 3600.0


def clear(builder):
    """Removes the files of a killed process."""
    path = builder.data_path
    aside = _aside(path)
    if aside.exists():
        if path.exists():
            aside.rmtree()
        else:
            aside.rename(path)
    if path.parent.exists():
        for left in path.parent.glob(f"incomplete.*_{path.name}"):
            left.rmtree()
    for left in _unfinished(builder.data_dir_root / "downloads" / builder.name):
        if _seconds_since_change(left) > SECONDS_UNTIL_GIVEN_UP:
            left.rmtree()


def _aside(path):
    return path.parent / f"{path.name}.earlier"


@contextlib.contextmanager
def set_aside(path):
    """Renames a folder, and restores its name if the body fails."""
    aside = _aside(path)
    path.rename(aside)
    try:
        yield
    except BaseException:
        aside.rename(path)
        raise
    aside.rmtree()


@contextlib.contextmanager
def none_left(builder):
    """Removes the files that tfds leaves when it fails, except complete downloads."""
    root = builder.data_dir_root
    downloads = root / "downloads"
    is_new = not (root / builder.name).exists()
    before = set(_unfinished(downloads / builder.name))
    try:
        yield
    except BaseException:
        for path in set(_unfinished(downloads / builder.name)) - before:
            path.rmtree()
        config = root / builder.name / ".config"
        if is_new and config.exists():
            config.rmtree()
        for path in (
            builder.data_path.parent,
            root / builder.name,
            downloads / builder.name,
            downloads / "extracted",
            downloads,
            root,
        ):
            # Threads of tfds may still write there, and would hide the error.
            with contextlib.suppress(OSError, tf.errors.OpError):
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
        raise


def _seconds_since_change(folder):
    paths = [folder, *folder.iterdir()]
    return time.time() - max(path.stat().mtime for path in paths)


def _unfinished(folder):
    """The folders of downloads that are not complete."""
    return folder.glob("*.tmp.*") if folder.exists() else ()
