"""Writes data sets of tensorflow-datasets to their folders, and reads them back."""

import contextlib
import json
import sys
import time

import tensorflow as tf
import tensorflow_datasets as tfds

from routing_tf.files import named_files
from routing_tf.files import raw_files
from routing_tf.files.names import SPLITS

# A download that has not grown for this long belongs to a killed process.
SECONDS_UNTIL_GIVEN_UP = 3600.0

# A file next to those of tfds: the raw files from which it was written.
SIZES_FILE = "raw_files.json"

WrongChecksum = tfds.download.download_manager.NonMatchingChecksumError
FAILURES = (OSError, tf.errors.OpError, tfds.download.DownloadError, WrongChecksum)


def prepare(builder, raw_dir=None):
    r"""Writes a data set to the folder of its builder, unless it exists already.

    With `raw_dir`, nothing is downloaded: raw files are taken from there. If they have
    further splits, an existing data set is written again; if that fails, nothing
    changes. Raises a `ValueError` if the sizes of raw files are not those of the
    existing data.
    """
    if raw_dir is not None:
        raw_dir = tfds.core.Path(raw_dir).expanduser()
        if not raw_dir.is_dir():
            raise ValueError(
                "`raw_dir` must be a folder with raw files. Received: "
                f"raw_dir={str(raw_dir)!r}, which is not a folder"
            )
    clear(builder)
    if not builder.data_path.exists():
        _write(builder, raw_dir)
    elif _has_more_splits(builder, raw_dir):
        with set_aside(builder.data_path):
            _write(builder, raw_dir)
    else:
        _check_same_files(builder, raw_dir)


def read_in_order(builder, split):
    r"""Reads a split of a prepared data set in the order in which it was written.

    `split` may be a part of one, such as "train[:100]". Examples are nested
    dictionaries of NumPy arrays and `bytes`.
    """
    if not builder.data_path.exists():
        raise ValueError(
            "`builder` must be prepared; call `prepare(builder)`. Received: "
            f"{_name(builder)} without data in {builder.data_dir!r}"
        )
    dataset = builder.as_dataset(
        split=split,
        shuffle_files=False,
        # One shard after the other; and a stream that is read once needs no cache.
        read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
    )
    return iter(tfds.as_numpy(dataset))


def _find_files(builder, raw_dir):
    """The raw files of each split, if they are known."""
    if raw_dir is None or not hasattr(builder, "find_files"):
        return {}
    return builder.find_files(raw_dir)


def _has_more_splits(builder, raw_dir):
    """Whether there are raw files for splits that the prepared data set lacks."""
    prepared, found = set(builder.info.splits), set(_find_files(builder, raw_dir))
    if prepared.issuperset(SPLITS) or found <= prepared:
        return False
    if prepared - found:
        raise ValueError(
            "`raw_dir` must hold the files of all splits, because they are written "
            f"together. Received: raw_dir={str(raw_dir)!r} with {sorted(found)}, but "
            f"{builder.data_dir!r} already has {sorted(prepared)}. Put all files into "
            "one folder, or use another data_dir."
        )
    return True


def _sizes(builder, raw_dir):
    """Names and sizes of the raw files of each split, if they are known."""
    return {
        split: [named_files.place(path, member), raw_files.file_size(path, member)]
        for split, (path, member) in _find_files(builder, raw_dir).items()
    }


def _check_same_files(builder, raw_dir):
    """Raises a `ValueError` if the data set was written from other raw files."""
    noted = builder.data_path / SIZES_FILE
    if not noted.exists():
        return
    there, here = json.loads(noted.read_text()), _sizes(builder, raw_dir)
    for split in here.keys() & there.keys():
        if here[split][1] != there[split][1]:
            raise ValueError(
                "`data_dir` must not hold the data of other raw files. Received: "
                f"{here[split][0]} has {here[split][1]:,} bytes, but "
                f"{str(builder.data_path)!r} was written from {there[split][0]} of "
                f"{there[split][1]:,}. Use another data_dir, or remove that folder and "
                "everything made from it"
            )


def _write(builder, raw_dir):
    """Runs tfds, and turns its errors into clear messages."""
    # Data prepared by Google is in the order of tfds, and not made from the raw files.
    wants_raw_files = raw_dir is not None or builder.info.disable_shuffling
    config = tfds.download.DownloadConfig(
        manual_dir=raw_dir, try_download_gcs=not wants_raw_files
    )
    if raw_dir is not None:
        _refuse_downloads(builder, raw_dir)
    tfds.display_progress_bar(sys.stderr.isatty())
    with none_left(builder):
        try:
            builder.download_and_prepare(download_config=config)
            sizes = json.dumps(_sizes(builder, raw_dir), indent=2)
            (builder.data_path / SIZES_FILE).write_text(sizes)
        except AssertionError as error:
            # How tfds says that its own builders find nothing in the folder.
            if "Manual directory" not in str(error):
                raise
            raise _failure(builder, raw_dir, error) from error
        except FAILURES as error:
            raise _failure(builder, raw_dir, error) from error


def _refuse_downloads(builder, raw_dir):
    """Makes it an error if a builder of tfds needs a file that is not in a folder."""
    make = builder._make_download_manager

    def make_without_network(**options):
        manager = make(**options)
        manager._download = refuse
        return manager

    def refuse(resource):
        known = (builder.url_infos or {}).get(resource.url)
        name = (known and known.filename) or resource.url.rpartition("/")[2]
        raise ValueError(
            f"`raw_dir` must hold the file {name!r} for {_name(builder)}, which is "
            f"published as {resource.url}; without raw_dir it is downloaded. Received: "
            f"raw_dir={str(raw_dir)!r} with "
            f"{raw_files.listing(sorted(path.name for path in raw_dir.iterdir()))}"
        )

    # tfds has no setting for it.
    builder._make_download_manager = make_without_network


def _failure(builder, raw_dir, error):
    """Returns the error that says what went wrong and which files to put where."""
    wrong = isinstance(error, WrongChecksum)
    reason = f"a file is not the one expected. {error}" if wrong else error
    folder = None if raw_dir is None else str(raw_dir)
    return ValueError(
        f"The data set {_name(builder)} could not be downloaded or written to "
        f"{builder.data_dir!r}: {reason}\n{_way_out(builder)}\n"
        f"Received: raw_dir={folder!r}"
    )


def _way_out(builder):
    """Instructions about the raw files that a builder reads."""
    instructions = (builder.MANUAL_DOWNLOAD_INSTRUCTIONS or "").strip()
    known = [instructions] if instructions else []
    if not hasattr(builder, "find_files"):  # ours say it all in the instructions
        urls = builder.url_infos or {}
        known += [f"{info.filename} from {url}" for url, info in urls.items()]
    if not known:
        return "It needs a network, because its builder takes no raw files."
    heading = (
        "To prepare it without a network, put its raw files into a folder and pass "
        "that as `raw_dir`:"
    )
    return "\n".join([heading, *known])


def _name(builder):
    parts = builder.name, builder.builder_config and builder.builder_config.name
    return "/".join(filter(None, parts))


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
