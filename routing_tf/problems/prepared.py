"""Problems made from examples: in memory, or prepared once in `data_dir`."""

import contextlib
import functools
import pathlib
import sys

import numpy as np
import tqdm

from routing_tf.files.names import SPLITS
from routing_tf.problems import array_store
from routing_tf.problems.problem import Problem
from routing_tf.problems.sources import Source
from routing_tf.problems.sources import TfdsSource
from routing_tf.problems.windows import extent

# Number and size of the blocks of ids in which a split is checked.


class PreparedProblem(Problem):
    """A problem whose splits are arrays made from examples.

    A kind of problem defines in `parts` the arrays of examples, and in `tokens_of`
    their windows. Your own problem returns the examples of a split from `load_split`,
    and its arrays are in memory. Or it names a `builder` of tensorflow-datasets (or
    returns another `Source` from `make_source`) and a `storage`, to which `generate`
    writes its arrays. Takes the arguments of `Problem`.

    Attributes:
        storage: string, the folder in `data_dir` with the arrays; problems that cut the
            same arrays into other windows share it. `None` (the default) for arrays in
            memory.
        builder: string, name of a builder of tensorflow-datasets such as "mnist" or
            "wmt14_translate/de-en", or of one here; `None` if there is none.
        sources: dictionary from split to its split of the builder, in the notation of
            tensorflow-datasets.
        unit: string, what `num_examples` counts, for a progress bar.
        work_dir: string, a folder for arrays if there is no `data_dir`, such as that of
            a run; `None` (the default) for none.
        needs_train_split: boolean, whether arrays depend on the split to train on.
        id_arrays: names of the arrays whose ids are those of the tokenizer.
    """

    builder = None
    sources = dict(zip(SPLITS, SPLITS))
    unit = " examples"
    needs_train_split = False
    id_arrays = ()
    raw_dir = None
    work_dir = None

    @property
    def storage_dir(self):
        """The folder of arrays; `None` if there is none."""
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
        """Name of the folder below `storage`, which says what else arrays depend on."""
        return "arrays"

    def folder(self, split):
        """The folder of the arrays of a split, a `pathlib.Path`."""
        return self.data_path / "routing_tf" / self.storage / self.variant / split

    def make_source(self, raw_dir):
        """Returns the `Source` of the examples, in `raw_dir` or downloaded."""
        if self.builder is None:
            return Source(self._examples_of)
        names = self.builder_names()
        return TfdsSource(names, self.data_path, raw_dir, self.sources)

    def _examples_of(self, split):
        examples = self.load_split(split)
        if isinstance(examples, (str, bytes)):
            raise ValueError(
                f"`load_split` of {self.name} must return an iterable of examples. "
                f"Received: one {type(examples).__name__} for the split {split!r}. "
                "Put it into a list"
            )
        return examples

    def builder_names(self):
        """Returns names of builders of tensorflow-datasets, the best one first."""
        return [self.builder]

    @functools.cached_property
    def source(self):
        """The `Source` of the examples."""
        return self.make_source(self.raw_dir)

    def available_splits(self):
        """Returns the splits with a source: prepared data, or raw files."""
        return self.source.splits()

    def examples(self, split, start):
        """Returns the examples of a split, without the first `start`."""
        return self.source.examples(split, start)

    @property
    def vocabulary_size(self):
        return self.tokenizer.vocabulary_size()

    def ids_dtype(self):
        """Returns the data type of the ids on disk."""
        return "uint16" if self.vocabulary_size <= 1 << 16 else "int32"

    def dtypes(self):
        """Returns a dictionary from name to data type of the arrays."""
        raise NotImplementedError

    def parts(self, split, state):
        """Yields `(arrays, state)` for each example; resumes after a `state`."""
        raise NotImplementedError

    def tokens_of(self, split, arrays):
        """Returns the `Tokens` of a split, given its arrays by name."""
        raise NotImplementedError

    def load_tokens(self, split):
        return self.tokens_of(split, self.read_split(split))

    def identity(self, split):
        """Returns the source of the arrays of a split, as JSON takes it."""
        return {
            "problem": self.storage,
            "variant": self.variant,
            **self.source.identity(split),
        }

    def is_made(self, split):
        """Returns whether there are arrays of a split, made from the current examples.

        Arrays made from raw files are not compared, because these may be gone.
        """
        if not (self.storage and self.storage_dir):
            return False
        folder = self.folder(split)
        return array_store.is_complete(folder) and (
            not self.source.is_direct
            or array_store.identity_of(folder) == self.identity(split)
        )

    def generate(self, raw_dir=None):
        """Prepares the data of all splits with a source, and yields lines for a log.

        Raw files are downloaded without `raw_dir`. Stopped work continues; this waits
        for other processes with the same folder.
        """
        folder = array_store.alone(self.data_path) if self.storage_dir else None
        with folder or contextlib.nullcontext():
            yield from self._generate(raw_dir)

    def _generate(self, raw_dir):
        self.raw_dir = raw_dir
        self.source = self.make_source(raw_dir)
        self.prepare_source()
        splits = self.available_splits()
        if self.needs_train_split and self.train_split not in splits:
            yield (
                f"{', '.join(splits)}: ready; arrays need a vocabulary, which is "
                f"learned from the split {self.train_split!r}, and that is missing. "
                "To train on another split, use --train_split"
            )
            return
        for split in splits:
            if self.is_made(split):
                self._check_identity(split)
                yield f"{split}: there already, {self.describe_split(split)}"
            else:
                self.write_split(split)
                yield f"{split}: {self.describe_split(split)}"
        for split in SPLITS:
            if split not in splits:
                yield f"{split}: missing, because its raw file is missing"

    def _check_identity(self, split):
        """Raises a `ValueError` if a split was made from other files than these."""
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
        """Prepares the source of `examples`, from `raw_dir` or a download."""
        self.source.prepare()

    def write_split(self, split):
        """Writes the arrays of a split to `folder(split)`."""

        def parts(state):
            state = state or {"examples": 0, "last": None}
            progress = tqdm.tqdm(
                self.parts(split, state["last"]),
                desc=f"{self.name}, {split}",
                total=self.source.num_examples(split),
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

        Data prepared by tfds becomes arrays on disk here, if it has not yet. Examples
        that need no preparation become arrays in memory.

        Raises:
            ValueError: if the data is missing or damaged.
        """
        if not self.is_made(split):
            if self.source.is_direct:
                return self._in_memory(split)
            self.check_prepared(split)
            self.write_split(split)
        arrays = array_store.read(self.folder(split), self.dtypes())
        for name in self.id_arrays:
            self.check_ids(split, arrays[name])
        return arrays

    def _in_memory(self, split):
        dtypes = {name: np.dtype(dtype) for name, dtype in self.dtypes().items()}
        parts = {
            name: [np.zeros((0, *dtype.shape), dtype.base)]
            for name, dtype in dtypes.items()
        }
        for arrays, _ in self.parts(split, None):
            for name, values in arrays.items():
                item = dtypes[name]
                values = np.asarray(values, item.base).reshape(-1, *item.shape)
                parts[name].append(values)
        return {name: np.concatenate(values) for name, values in parts.items()}

    def check_ids(self, split, ids):
        """Raises a `ValueError` if an array on disk has ids that the tokenizer lacks.

        Args:
            split: string, the split.
            ids: NumPy array `<int>[num_tokens]`.
        """
        limit = self.vocabulary_size
        least, greatest = extent(ids)
        if least < 0 or greatest >= limit:
            raise ValueError(
                f"The prepared data must have ids of 0 to {limit - 1}, those of "
                f"the vocabulary of {self.name}. Received: {least} to {greatest} in "
                f"{str(self.folder(split))!r}. Remove that folder and prepare it again "
                f"with `{self.command}`"
            )

    def check_prepared(self, split):
        """Raises a `ValueError` if the examples of a split cannot be read."""
        if not self.source.is_prepared() or split not in self.available_splits():
            raise ValueError(
                f"The split {split!r} of {self.name} is not prepared. Received: "
                f"data_dir={self.data_dir!r}. Run `{self.command} --raw_dir=FOLDER` "
                "with the folder of its raw files, or without --raw_dir to download "
                "them; or choose other splits with train_split and eval_split"
            )
