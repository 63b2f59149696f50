"""The user's own files as a source, divided among the splits."""

import hashlib
import os
import pathlib

from routing_tf.files.named_files import identity
from routing_tf.files.raw_files import file_size
from routing_tf.files.splits import SPLITS
from routing_tf.problems.sources import Source

# Percent of the data in each held-out split.
HELD_OUT_SHARE = 5
# With fewer files than this, a split by file would leave too much to chance.
MIN_FILES_TO_SPLIT_BY_FILE = 20


class OwnFiles(Source):
    """Examples of files that the user names, and may change."""

    def files_of(self, split):
        """Returns the paths of the files of a split."""
        raise NotImplementedError

    def identity(self, split):
        return {"files": fingerprint(self.files_of(split))}


def check_no_raw_dir(problem, raw_dir, options):
    """Raises a `ValueError` if files are named that a problem does not use."""
    if raw_dir:
        raise ValueError(
            f"{problem.name} names its files with {options}. Received: "
            f"raw_dir={raw_dir!r}; leave it out"
        )


def separate(named, options, identity_of=identity):
    """Removes held-out files, by any of their names, from the training files.

    Args:
        named: dictionary from split to a list of paths, or of entries read together.
        options: function from a split to the options that name its files, for messages.
        identity_of: function from an entry to its identity.

    Returns:
        The same dictionary, without entries of "train" that are in another split.
    """
    known = {split: set(map(identity_of, entries)) for split, entries in named.items()}
    both = known["validation"] & known["test"]
    if both:
        shared = [name for name in named["validation"] if identity_of(name) in both]
        raise ValueError(
            f"{options('validation')} and {options('test')} must not share files, by "
            "any of their names; name each file for one of them. Received for both: "
            f"{sorted(shared)}"
        )
    held_out = known["validation"] | known["test"]
    kept = [name for name in named["train"] if identity_of(name) not in held_out]
    return {**named, "train": kept}


def fingerprint(paths):
    """Returns a digest of paths, sizes and times of files, not of their contents."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            found = os.stat(path)
        except OSError as error:
            raise ValueError(
                f"The file {str(path)!r} must be readable. Received: {error.strerror}"
            ) from error
        about = f"{path}\0{found.st_size}\0{found.st_mtime_ns}\0"
        digest.update(about.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def split_of_file(name, held_out=("validation", "test")):
    """Chooses the split of a file by a hash of its name, the same everywhere.

    Splits in `held_out` get a share, "train" the rest. `name` has "/" between folders.
    """
    percentile = int.from_bytes(_digest(name)[:8], "big") % 100
    # Fixed places, so that a file keeps its split whichever splits take part.
    places = ("validation", "test")
    place = percentile // HELD_OUT_SHARE
    if place < len(places) and places[place] in held_out:
        return places[place]
    return "train"


def splits_of_files(sizes, held_out):
    """Chooses the splits of files, a dict from names to bytes, by `split_of_file`.

    A held-out split to which no byte comes gets a file of the others: of more files the
    same one, or a new one, so none that was trained on.
    """
    splits = {name: split_of_file(name, held_out) for name in sizes}
    for split in held_out:
        if any(sizes[name] for name, own in splits.items() if own == split):
            continue
        others = [name for name, own in splits.items() if own == "train"]
        others = [name for name in others if sizes[name]]
        if len(others) > 1:
            splits[min(others, key=lambda name: _digest(f"{split} {name}"))] = split
    return splits


def _digest(name):
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def share_out(paths, held_out):
    """Divides files: `{split: [(path, first byte, number of bytes)]}`.

    Splits in `held_out` get a share, "train" the rest: whole files if there are many,
    else the ends of all files.
    """
    found = {split: [] for split in SPLITS}
    if len(paths) >= MIN_FILES_TO_SPLIT_BY_FILE:
        folder = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = {
            pathlib.Path(path).relative_to(folder).as_posix(): path for path in paths
        }
        sizes = {name: file_size(path) for name, path in names.items()}
        for name, split in splits_of_files(sizes, held_out).items():
            found[split].append((names[name], 0, sizes[name]))
        return found
    for path in paths:
        end = file_size(path)
        share = end * HELD_OUT_SHARE // 100
        for split in ("test", "validation"):
            if split in held_out:
                end -= share
                found[split].append((path, end, share))
        found["train"].append((path, 0, end))
    return found
