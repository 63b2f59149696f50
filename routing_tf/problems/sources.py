"""The sources of examples from which a problem makes arrays."""

import contextlib
import functools
import itertools
import tempfile
import threading

import tensorflow_datasets as tfds

from routing_tf.files.splits import SPLITS
from routing_tf.problems import builders

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
