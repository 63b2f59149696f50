"""The sources of examples (tfds, or own files) and of subword vocabularies."""

import contextlib
import functools
import hashlib
import itertools
import os
import pathlib
import shutil
import tempfile
import threading

import tensorflow_datasets as tfds

from routing_tf.files import atomic
from routing_tf.files.named_files import identity
from routing_tf.files.names import SPLITS
from routing_tf.files.raw_files import file_size
from routing_tf.problems import builders
from routing_tf.tokenizers import SubwordTokenizer

VOCABULARY_SIZE = 1 << 15
# Size of the training texts, evenly spread, from which a vocabulary is learned.
VOCABULARY_BYTES = 50_000_000

# Percent of the data in each held-out split.
HELD_OUT_SHARE = 5
# With fewer files than this, a split by file would leave too much to chance.
MIN_FILES_TO_SPLIT_BY_FILE = 20

_TEMPDIR_LOCK = threading.Lock()


class Source:
    """Examples that a function returns.

    Args:
        load: function from a split to an iterable of its examples.

    Attributes:
        is_direct: boolean, whether examples can be read at once, without `prepare`.
    """

    is_direct = True

    def __init__(self, load=None):
        self._load = load

    def prepare(self):
        """Prepares the examples, so that they can be read."""

    def is_prepared(self):
        """Returns whether examples can be read."""
        return True

    def splits(self):
        """Returns the splits that exist, prepared or as raw files."""
        return list(SPLITS)

    def examples(self, split, start):
        """Returns an iterator over the examples of a split, without the first ones."""
        return itertools.islice(self._load(split), start, None)

    def num_examples(self, split):
        """Returns the number of examples of a split, for a progress bar; or None."""
        return None

    def identity(self, split):
        """Returns a dictionary that changes with the examples, as JSON takes it."""
        return {}


class TfdsSource(Source):
    """The examples of a data set of tensorflow-datasets, or of a builder here.

    Args:
        names: list of names of builders, the best one first, such as "mnist" or
            "wmt14_translate/de-en".
        data_dir: path of the folder with the data.
        raw_dir: string, the folder with the raw files. Defaults to `None`: they are
            downloaded, if there is a way.
        splits: dictionary from split to its split of the builder, in the notation of
            tensorflow-datasets. Defaults to the same names.
    """

    is_direct = False

    def __init__(self, names, data_dir, raw_dir=None, splits=None):
        super().__init__()
        self.names = names
        self.data_dir = data_dir
        self.raw_dir = raw_dir
        self.split_of = splits or dict(zip(SPLITS, SPLITS))

    @functools.cached_property
    def builder(self):
        """The first builder with raw files, or else with data."""
        found = [_make_builder(name, self.data_dir) for name in self.names]
        if len(found) == 1:
            return found[0]
        with_data = [builder for builder in found if _is_written(builder)]
        with_files = [b for b in found if self.raw_dir and b.find_files(self.raw_dir)]
        return [*with_files, *with_data, *found][0]

    @property
    def form(self):
        """The name of the builder's config."""
        return self.builder.builder_config.name

    def prepare(self):
        builders.prepare(self.builder, self.raw_dir)

    def is_prepared(self):
        return _is_written(self.builder)

    def splits(self):
        known = self.builder.info.splits
        return [s for s in SPLITS if self.split_of[s].split("[")[0] in known]

    def examples(self, split, start):
        examples = builders.read_in_order(self.builder, self.split_of[split])
        return itertools.islice(examples, start, None)

    def num_examples(self, split):
        return self.builder.info.splits[self.split_of[split]].num_examples


def _make_builder(name, data_dir):
    """Returns a builder of this package or of tensorflow-datasets."""
    name, _, config = name.partition("/")
    own = {"enwik8": builders.Enwik8, "wikitext103": builders.Wikitext103}
    options = {"data_dir": str(data_dir), "config": config or None}
    with _temporary_folders_removed():
        if name in own:
            return own[name](**options)
        return tfds.builder(name, **options)


@contextlib.contextmanager
def _temporary_folders_removed():
    """Removes the empty folder that each builder without data leaves."""
    with _TEMPDIR_LOCK, tempfile.TemporaryDirectory() as folder:
        earlier, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield
        finally:
            tempfile.tempdir = earlier


def _is_written(builder):
    # `is_prepared` of tfds warns if there is nothing yet.
    return (builder.data_path / "dataset_info.json").exists()


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


def given_vocabulary(path, raw_dir):
    """Returns the path of the vocabulary of this name among raw files; or None."""
    given = raw_dir and pathlib.Path(raw_dir, path.name)
    return given if given and given.is_file() else None


def make_vocabulary(path, raw_dir, texts):
    """Copies the vocabulary among the raw files, or learns one from `texts()`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if given := given_vocabulary(path, raw_dir):
        with atomic.whole(path) as partial:
            shutil.copyfile(given, partial)
    else:
        tokens = SubwordTokenizer.build_vocabulary(texts(), VOCABULARY_SIZE)
        SubwordTokenizer(tokens).save_vocabulary(path)


def digest(tokenizer, size=8):
    """Returns a few characters that identify a vocabulary."""
    content = "\n".join(tokenizer.get_vocabulary()).encode("utf-8")
    return hashlib.sha256(content).hexdigest()[:size]
