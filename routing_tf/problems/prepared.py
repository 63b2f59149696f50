"""Problems whose data is prepared once, in `data_dir`, and then read in place."""

import contextlib
import functools
import itertools
import pathlib
import sys
import tempfile
import threading

import numpy as np
import tensorflow_datasets as tfds
import tqdm

from routing_tf.choices import SPLITS
from routing_tf.problems import array_store
from routing_tf.problems import builders
from routing_tf.problems.problem import Problem
from routing_tf.problems.problem import Tokens
from routing_tf.problems.text import TextProblem
from routing_tf.tokenizers.base_tokenizer import END_ID

# In how many blocks of how many ids a split is looked through.
IDS_AT_ONCE = 1 << 22
MAX_BLOCKS = 64

_TEMPDIR_LOCK = threading.Lock()


class PreparedProblem(Problem):
    """A problem whose splits are arrays in `data_dir`, made by `generate`.

    A subclass says in `examples` what a split is made of and in `arrays_of` what
    becomes of an example. If its examples come from tensorflow-datasets, it names the
    builder in `builder`. Takes the arguments of `Problem`.

    Attributes:
        storage: string, the folder in `data_dir` that holds the arrays; problems that
            cut the same arrays into other windows share it.
        unit: string, what `num_examples` counts, for a progress bar.
        work_dir: string, a folder where arrays may lie if there is no `data_dir`, such
            as that of a run; `None` (the default) for none.
        builder: string, name of a builder of tensorflow-datasets such as "mnist" or
            "wmt14_translate/de-en", or of one here; `None` if there is none.
        needs_train_split: boolean, whether arrays depend on the split to train on.
    """

    storage = None
    unit = " examples"
    builder = None
    needs_train_split = False
    raw_dir = None
    work_dir = None

    @property
    def storage_dir(self):
        """The folder in which arrays lie; `None` if there is none."""
        return self.data_dir

    @property
    def data_path(self):
        """The folder of the data, a `pathlib.Path`.

        Raises:
            ValueError: if there is none.
        """
        if not self.storage_dir:
            raise ValueError(
                f"`data_dir` must name the folder with the data of {self.name}, which "
                f"`{self.command}` prepares. Received: data_dir={self.data_dir!r}"
            )
        return pathlib.Path(self.storage_dir)

    @property
    def command(self):
        """The command that prepares the data, for messages."""
        words = [
            f"python -m routing_tf.datagen --problem={self.name}",
            f"--data_dir={self.data_dir or 'FOLDER'}",
        ]
        for name, value in self.given_options.items():
            if name == "train_split":
                words.append(f"--train_split={value}")
            elif name not in self.options_without_effect:
                words.append(f"--problem_option={name}={value}")
        return " ".join(words)

    @property
    def options_without_effect(self):
        """Names of options on which the arrays do not depend."""
        return {"eval_split", "min_training_length", "sequence_length", "input_length"}

    @property
    def variant(self):
        """Name of the folder below `storage`: what else the arrays depend on."""
        return "arrays"

    def folder(self, split):
        """The folder of the arrays of a split, a `pathlib.Path`."""
        return self.data_path / "routing_tf" / self.storage / self.variant / split

    def builder_names(self):
        """Returns names of builders of tensorflow-datasets, the best one first."""
        return [self.builder]

    @functools.cached_property
    def tfds_builder(self):
        """The first builder whose data is there, or its raw files; else the first."""
        found = [_make_builder(name, self.data_path) for name in self.builder_names()]
        raw_dir = self.raw_dir
        if len(found) == 1:
            return found[0]
        with_data = [builder for builder in found if _is_written(builder)]
        with_files = [b for b in found if raw_dir and b.find_files(raw_dir)]
        return [*with_files, *with_data, *found][0]

    def available_splits(self):
        """Returns the splits whose source is there: prepared, or raw files."""
        return [split for split in SPLITS if split in self.tfds_builder.info.splits]

    def examples(self, split, start):
        """Returns the examples of a split, without the first `start`."""
        name = self.source_of(split)
        return itertools.islice(
            builders.read_in_order(self.tfds_builder, name), start, None
        )

    def source_of(self, split):
        """Returns the split of the builder that a split is read from."""
        return split

    def num_examples(self, split):
        """Returns the number of examples in a split, for a progress bar; or None."""
        return self.tfds_builder.info.splits[self.source_of(split)].num_examples

    def dtypes(self):
        """Returns a dictionary from name to data type of the arrays."""
        raise NotImplementedError(f"{type(self).__name__} must define dtypes().")

    def parts(self, split, start, state):
        """Yields what examples become, from one of them on; see `array_store.write`.

        Args:
            split: string, the split.
            start: integer, the first example.
            state: what was yielded last before it; `None` at first.

        Yields:
            Pairs of a dictionary from name to array and a state.
        """
        raise NotImplementedError(f"{type(self).__name__} must define parts().")

    def identity(self, split):
        """Returns what the arrays of a split are made of, as JSON takes it."""
        return {"problem": self.storage, "variant": self.variant}

    def generate(self, raw_dir=None):
        """Prepares the data: all splits whose source is there.

        Work that was stopped goes on where it was; what is whole is left alone. If
        another process prepares data in the same folder, it waits for that.

        Args:
            raw_dir: string, folder with the raw files. Defaults to `None`: they are
                downloaded, if there is a way.

        Yields:
            Lines for a log.

        Raises:
            ValueError: if the source is missing, damaged or something else.
        """
        folder = array_store.alone(self.data_path) if self.storage_dir else None
        with folder or contextlib.nullcontext():
            yield from self._generate(raw_dir)

    def _generate(self, raw_dir):
        self.raw_dir = raw_dir
        vars(self).pop("tfds_builder", None)
        self.prepare_source()
        splits = self.available_splits()
        if self.needs_train_split and self.train_split not in splits:
            yield (
                f"{', '.join(splits)}: there; arrays need a vocabulary, which is made "
                f"of the split {self.train_split!r}, and that is missing. To train on "
                "another split, use --train_split"
            )
            return
        for split in splits:
            if array_store.is_complete(self.folder(split)):
                self._check_identity(split)
                yield f"{split}: there already, {self.describe_split(split)}"
            else:
                self.write_split(split)
                yield f"{split}: {self.describe_split(split)}"
        for split in SPLITS:
            if split not in splits:
                yield f"{split}: not there, as its raw file is missing"

    def _check_identity(self, split):
        """Raises a `ValueError` if a split was made of other files than these."""
        here = self.identity(split)
        there = array_store.identity_of(self.folder(split))
        # Earlier versions did not note the vocabulary; reading checks it.
        keys = here.keys() - {"vocabulary"}
        different = sorted(key for key in keys if here[key] != there.get(key))
        if different:
            raise ValueError(
                "`data_dir` must not hold the data of other raw files. Received: "
                f"{str(self.folder(split))!r}, whose {', '.join(different)} differ "
                f"from those in {self.raw_dir!r}. Remove that folder or use another "
                "data_dir"
            )

    def prepare_source(self):
        """Makes the source of `examples` ready, from `raw_dir` or a download."""
        if self.builder is not None:
            builders.prepare(self.tfds_builder, self.raw_dir)

    def write_split(self, split):
        """Writes the arrays of a split to `folder(split)`."""

        def parts(state):
            state = state or {"examples": 0, "last": None}
            progress = tqdm.tqdm(
                self.parts(split, state["examples"], state["last"]),
                desc=f"{self.name}, {split}",
                total=self.num_examples(split),
                initial=state["examples"],
                unit=self.unit,
                disable=not sys.stderr.isatty(),
            )
            for number, (arrays, last) in enumerate(progress, state["examples"] + 1):
                yield arrays, {"examples": number, "last": last}

        array_store.write(
            self.folder(split), self.dtypes(), self.identity(split), parts
        )

    def read_split(self, split):
        """Returns the arrays of a split, a dictionary from name to array.

        What tfds has prepared becomes arrays here if it has not yet.

        Raises:
            ValueError: if the data is missing or damaged.
        """
        folder = self.folder(split)
        if not array_store.is_complete(folder):
            self.check_prepared(split)
            self.write_split(split)
        return array_store.read(folder, self.dtypes())

    def check_ids(self, split, ids):
        """Raises a `ValueError` if an array on disk has ids that the tokenizer has not.

        Args:
            split: string, the split.
            ids: NumPy array `<int>[num_tokens]`. Of more than 268 million
                ids, evenly spaced blocks stand for all.
        """
        limit = self.vocabulary_size
        starts = np.arange(0, len(ids), IDS_AT_ONCE)
        count = min(len(starts), MAX_BLOCKS)
        for start in starts[np.arange(count) * len(starts) // max(1, count)]:
            block = ids[start : start + IDS_AT_ONCE]
            if block.min() < 0 or block.max() >= limit:
                raise ValueError(
                    f"The prepared data must have ids of 0 to {limit - 1}, those of "
                    f"the vocabulary of {self.name}. Received: {block.min()} to "
                    f"{block.max()} in {str(self.folder(split))!r}. Remove that folder "
                    f"and make it anew with `{self.command}`"
                )

    def check_prepared(self, split):
        """Raises a `ValueError` if the examples of a split cannot be read."""
        if not self.is_source_prepared() or split not in self.available_splits():
            raise ValueError(
                f"The split {split!r} of {self.name} is not prepared. Received: "
                f"data_dir={self.data_dir!r}. Run `{self.command} --raw_dir=FOLDER` "
                "with the folder of its raw files, or without --raw_dir to download "
                "them; or choose other splits with train_split and eval_split"
            )

    def is_source_prepared(self):
        """Tells whether `examples` can be read without raw files."""
        return self.builder is not None and _is_written(self.tfds_builder)


class PreparedTextProblem(TextProblem, PreparedProblem):
    """Texts whose ids are prepared once.

    A subclass says in `text_of` what the text of an example is, in `encode` its ids.
    Takes the arguments of `TextProblem`.

    Attributes:
        has_length_in_name: boolean, whether windows are as long as the problem's name
            says, unless the model's sequences are shorter.
    """

    has_length_in_name = False

    @classmethod
    def options_for(cls, hyperparameters):
        options = super().options_for(hyperparameters)
        if cls.has_length_in_name:
            options["sequence_length"] = min(
                cls.default_sequence_length, options["sequence_length"]
            )
        return options

    def text_of(self, example):
        """Returns the text of an example, as `encode` takes it."""
        return example["text"]

    def count_words(self, text):
        """Returns the number of words that the metric counts in a text."""
        return 0

    @property
    def options_without_effect(self):
        names = super().options_without_effect
        return names - {"sequence_length"} if self.packing == "release" else names

    @property
    def packed_name(self):
        """What the arrays depend on if the windows are the release's; else nothing."""
        if self.packing == "stream":
            return "stream"
        return f"release-{self.train_split}-{self.sequence_length}"

    def texts(self, split):
        for example in self.examples(split, 0):
            yield self.text_of(example)

    def ids_dtype(self):
        """Returns the data type of the ids on disk."""
        return "uint16" if self.vocabulary_size <= 1 << 16 else "int32"

    def dtypes(self):
        dtypes = {"ids": self.ids_dtype(), "num_words": "int64"}
        if self.packing == "release":
            dtypes["windows"] = ("int64", (2,))
        return dtypes

    def parts(self, split, start, state):
        texts = map(self.text_of, self.examples(split, start))
        if self.packing == "release":
            return self._packed(texts, self.release_rule(split), state)
        return self._stream(texts)

    def _stream(self, texts):
        for text, is_last in _with_last(texts):
            ids = np.append(self.encode(text), self.ids_behind(is_last)).astype("int64")
            yield {"ids": ids, "num_words": [self.count_words(text)]}, None

    def ids_behind(self, is_last):
        """Returns the ids that follow a text: an end id.

        Args:
            is_last: boolean, whether the text is the last one of its split.
        """
        return [END_ID]

    def _packed(self, texts, rule, state):
        if state is not None:
            rule.state = state
        for text, is_last in _with_last(texts):
            lines = [rule.add(line) for line in self.release_lines(text)]
            if is_last:
                lines.append(rule.finish())
            ids = [np.zeros(0, "int64"), *(line.ids for line in lines)]
            arrays = {
                "ids": np.concatenate([np.asarray(part, "int64") for part in ids]),
                "windows": [window for line in lines for window in line.windows],
                "num_words": [self.count_words(text)],
            }
            yield arrays, rule.state

    def load_split(self, split):
        arrays = self.read_split(split)
        if self.tokenizer is not None:
            self.check_ids(split, arrays["ids"])
        num_words = int(arrays["num_words"].sum()) or None
        return Tokens(arrays["ids"], arrays.get("windows"), num_words)

    def words_per_token(self, split):
        """Returns how many words of the original text there are for each id."""
        return self.tokens(split).num_words / self.num_tokens(split)


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
    """Removes the empty folder that each builder without data makes and forgets."""
    with _TEMPDIR_LOCK, tempfile.TemporaryDirectory() as folder:
        earlier, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield
        finally:
            tempfile.tempdir = earlier


def _is_written(builder):
    # `is_prepared` of tfds warns where there is nothing yet.
    return (builder.data_path / "dataset_info.json").exists()


def _with_last(items):
    """Yields items, each with whether it is the last one."""
    items = iter(items)
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        yield item, following is None
        item = following
