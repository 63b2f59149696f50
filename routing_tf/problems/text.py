"""Text as bytes, from files that are already there."""

import csv
import functools
import glob
import hashlib
import io
import itertools
import os
import pathlib
import platform
import sysconfig

import numpy as np

from routing_tf.problems import packing
from routing_tf.problems import raw_files
from routing_tf.problems.arguments import SPLITS
from routing_tf.problems.problem import Problem
from routing_tf.problems.problem import Tokens
from routing_tf.problems.registry import register
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import byte_tokenizer

PACKINGS = ("stream", "release")
# Percent of the data in each held-out split.
HELD_OUT_SHARE = 5
# With fewer files than this, a split by file would leave too much to chance.
MIN_FILES_TO_SPLIT_BY_FILE = 20


class TextProblem(Problem):
    """Texts as tokens, packed into windows.

    A subclass says in `texts` which texts a split has and in `encode` what their ids
    are. In the packing "stream" an end id follows each text and windows are cut from
    the sequence of all of them, so that held-out windows hold every token once, the
    last one included. In the packing "release" windows are those of the release's
    problem of this name; those without a rule of their own take the one for PG-19:
    lines, stripped of white space at both ends, fill a window up to the next line that
    makes it as long as `sequence_length` or longer; then the end id closes it.

    Args:
        packing: string, "stream" (the default) or "release".
        **options: arguments of `Problem`.

    Raises:
        ValueError: if there is no such packing.

    Example:
    ```python
    from routing_tf.problems import text


    class Alphabet(text.BytesProblem):
        def texts(self, split):
            return [b"abcdefghijklmnopqrstuvwxyz"] * 10


    Alphabet(sequence_length=54).ids("test")[:27]  # 99, 100, ..., 124, 1
    ```
    """

    def __init__(self, packing="stream", **options):
        super().__init__(**options)
        if packing not in PACKINGS:
            raise ValueError(
                f"`packing` must be one of {PACKINGS}. Received: packing={packing!r}"
            )
        self.packing = packing

    def texts(self, split):
        """Returns the texts of a split; to be written by subclasses.

        Args:
            split: string, "train", "validation" or "test".

        Returns:
            An iterable of what `encode` takes.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define texts(split), which returns the texts "
            f"of one of the splits {SPLITS}."
        )

    def encode(self, text):
        """Returns the ids of a text, a NumPy array, without an end id."""
        raise NotImplementedError(
            f"{type(self).__name__} must define encode(text), which returns ids."
        )

    def release_rule(self, split):
        """Returns the rule of `packing` by which the release packs a split."""
        return packing.WholeLines(self.sequence_length)

    def release_lines(self, text):
        """Yields the ids of the lines of a text, as the release encodes them."""
        newline = b"\n" if isinstance(text, bytes) else "\n"
        for line in text.split(newline):
            yield self.encode(line.strip())

    def load_split(self, split):
        if self.packing == "release":
            lines = (
                line for text in self.texts(split) for line in self.release_lines(text)
            )
            return Tokens(*packing.pack(self.release_rule(split), lines))
        end = np.array([byte_tokenizer.END_ID], "uint16")
        parts = [(self.encode(text), end) for text in self.texts(split)]
        return np.concatenate([np.zeros(0, "uint16"), *itertools.chain(*parts)])


class BytesProblem(TextProblem):
    """Texts as bytes. Empty texts add nothing.

    A subclass says in `texts` which texts a split has, as `bytes`, or in `read_texts`
    those of all splits. Takes the arguments of `TextProblem`.
    """

    vocabulary_size = byte_tokenizer.NUM_IDS

    @functools.cached_property
    def tokenizer(self):
        return ByteTokenizer()

    def read_texts(self):
        """Reads the texts; to be written by subclasses that read all at once.

        Returns:
            A dictionary from split to a list of `bytes`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define texts(split), which returns the texts "
            f"of one of the splits {SPLITS}, or read_texts(), which returns all."
        )

    @functools.cached_property
    def _texts(self):
        return {
            split: [text for text in texts if text]
            for split, texts in self.read_texts().items()
        }

    def texts(self, split):
        return self._texts[split]

    def encode(self, text):
        return byte_ids(text)

    def describe_split(self, split):
        texts = self.texts(split)
        files = "file" if len(texts) == 1 else "files"
        return f"{sum(map(len, texts)):,} bytes of {len(texts)} {files}"


@register("python_source")
class PythonSource(BytesProblem):
    """The source code of the running Python's standard library; no download.

    All `*.py` files in the order of their paths, without installed packages
    (`site-packages`, `dist-packages`), folders named `test` or `tests`, and files
    that cannot be read. Each file belongs to one split, chosen by a hash of its
    path inside the library: about 90 % are for training, 5 % for validation and
    5 % for testing. The same Python version gives the same data.

    Args:
        **options: arguments of `TextProblem`; `data_dir` is not used.

    Raises:
        ValueError: from `prepare`, if this Python has no source files, or too few.

    Example:
    ```python
    from routing_tf import problems

    problem = problems.get("python_source", sequence_length=256)
    inputs, targets, weights = next(iter(problem.dataset("train", batch_size=2)))
    print(problem.tokenizer.detokenize(targets[0]))
    ```
    """

    ignored_folders = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}

    def read_texts(self):
        library = pathlib.Path(sysconfig.get_path("stdlib"))
        texts = {split: [] for split in SPLITS}
        for path in self._source_files(library):
            try:
                text = path.read_bytes()
            except OSError:
                continue
            texts[split_of_file(path.relative_to(library).as_posix())].append(text)
        sizes = {split: sum(map(len, texts[split])) for split in SPLITS}
        if min(sizes.values()) < self.sequence_length:
            raise ValueError(
                "The problem 'python_source' needs the source files of Python's "
                f"standard library. Found in {str(library)!r}, in bytes: {sizes} for "
                f"windows of {self.sequence_length}. Use the problem 'text_files' "
                "with files of your own, or a shorter sequence_length."
            )
        return texts

    def _source_files(self, library):
        """The paths of all files that belong to the corpus, in order."""
        paths = []
        for folder, subfolders, names in os.walk(library):
            subfolders[:] = set(subfolders) - self.ignored_folders
            paths += [pathlib.Path(folder, n) for n in names if n.endswith(".py")]
        return sorted(paths, key=lambda path: path.relative_to(library).as_posix())

    def describe(self, *splits):
        python = platform.python_version()
        return f"{super().describe(*splits)}; library of Python {python}"


def byte_ids(text):
    """Turns bytes into ids.

    Args:
        text: `bytes`.

    Returns:
        NumPy uint16 array of shape `(len(text),)`.
    """
    ids = np.frombuffer(text, "uint8").astype("uint16")
    ids += byte_tokenizer.BYTE_OFFSET
    return ids


def split_of_file(name, held_out=("validation", "test")):
    """Chooses the split of a file by a hash of its name, the same everywhere.

    Args:
        name: string, a path with "/" between folders.
        held_out: the splits that get a share of the files besides "train", which
            has the rest.

    Returns:
        "train", "validation" or "test".
    """
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    percentile = int.from_bytes(digest[:8], "big") % 100
    # Fixed places: a file stays where it is whichever splits take part.
    places = ("validation", "test")
    place = percentile // HELD_OUT_SHARE
    if place < len(places) and places[place] in held_out:
        return places[place]
    return "train"


def share_out(paths, held_out):
    """Shares files out between the splits.

    Args:
        paths: list of strings.
        held_out: the splits that get a share of the files besides "train", which
            has the rest.

    Returns:
        A dictionary from split to a list of triples: path of a file, the first byte
        that belongs to the split, and how many do.
    """
    found = {split: [] for split in SPLITS}
    if len(paths) >= MIN_FILES_TO_SPLIT_BY_FILE:
        folder = os.path.commonpath([os.path.dirname(path) for path in paths])
        for path in paths:
            name = pathlib.Path(path).relative_to(folder).as_posix()
            split = split_of_file(name, held_out)
            found[split].append((path, 0, file_size(path)))
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


def find_files(option, patterns):
    """Finds the files that an option names.

    Args:
        option: string, the option's name, for the message.
        patterns: list of paths or glob patterns, a string of them as `split_paths`
            takes it, or `None`.

    Returns:
        A list of absolute paths, each once.

    Raises:
        ValueError: if a pattern matches no file, or a pipe or a device.
    """
    if isinstance(patterns, (str, os.PathLike)):
        patterns = split_paths(os.fspath(patterns))
    try:
        patterns = [os.path.expanduser(os.fspath(p).strip()) for p in patterns or []]
    except TypeError as error:
        raise ValueError(
            f"`{option}` must be paths: a string or a list of strings. Received: "
            f"{option}={patterns!r}"
        ) from error
    found = []
    for pattern in filter(None, patterns):
        # A file whose own name looks like a pattern is meant literally.
        exists = os.path.isfile(pattern)
        matches = [pattern] if exists else glob.glob(pattern, recursive=True)
        # Anything but a folder counts, so that a broken link is an error later on.
        paths = [path for path in matches if not os.path.isdir(path)]
        for path in paths:
            raw_files.check_regular(path)
        if not paths:
            raise ValueError(
                f"`{option}` must name existing files; to take all files of a folder "
                f"write 'folder/*' or 'folder/**'. Received: {pattern!r}, which "
                f"matches no file in the working directory {os.getcwd()!r}"
            )
        found += sorted(os.path.abspath(path) for path in paths)
    return list(dict.fromkeys(found))


def split_paths(paths):
    """Splits a string of paths at its commas.

    Args:
        paths: string. Double quotes around a path keep its commas, and a double quote
            inside of them is written twice, as in a file of comma-separated values.

    Returns:
        A list of strings, none of them empty.

    Raises:
        ValueError: if quotes do not end in front of a comma.

    Example:
    ```python
    from routing_tf.problems import text

    text.split_paths('one.txt, "two, three.txt"')  # ["one.txt", "two, three.txt"]
    ```
    """
    try:
        rows = list(csv.reader([paths], skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise ValueError(
            "Double quotes must be around a whole path, as in 'one.txt,\"two, "
            f"three.txt\"'. Received: {paths!r}"
        ) from error
    return [path.strip() for row in rows for path in row if path.strip()]


def join_paths(paths):
    """Joins paths to a string that `split_paths` splits again."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(paths)
    return line.getvalue()


def file_size(path):
    """Returns the bytes of a file; a `ValueError` names one that cannot be read."""
    try:
        return os.path.getsize(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def read_file(path):
    """Reads a file as `bytes`; a `ValueError` names the file that cannot be read."""
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path, error):
    return ValueError(f"`files` must be readable. Received: {path!r}: {error.strerror}")
