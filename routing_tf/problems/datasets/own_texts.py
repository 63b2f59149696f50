"""Files of this machine as text: the user's own, or Python's standard library."""

import codecs
import functools
import glob
import hashlib
import os
import pathlib
import platform
import re
import sysconfig

from absl import logging

from routing_tf.files import raw_files
from routing_tf.files.named_files import find_files
from routing_tf.files.named_files import split_paths
from routing_tf.files.names import SPLITS
from routing_tf.problems.registry import register
from routing_tf.problems.sources import OwnFiles
from routing_tf.problems.sources import check_no_raw_dir
from routing_tf.problems.sources import separate
from routing_tf.problems.sources import share_out
from routing_tf.problems.sources import split_of_file
from routing_tf.problems.text import TextProblem
from routing_tf.tokenizers import SubwordTokenizer

# The ids of a split with more bytes of text are on disk, if there is a folder for them.
MAX_BYTES_IN_MEMORY = 64 << 20
# Number of bytes of text that become ids at once: repeated words are matched once.
CHUNK_SIZE = 16 << 20
# So much of a file tells whether it is text, and so many that are none are named.
START_SIZE, NUM_NAMED = CHUNK_SIZE, 5
# How files of other encodings begin; UTF-32 begins as UTF-16 does, and goes on.
BYTE_ORDER_MARKS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
# Bytes of text in Latin-1 and its like: no control characters but white space.
TEXT_BYTES = bytes([*b"\t\n\f\r", *range(0x20, 0x7F), *range(0x80, 0x100)])
# Where a word surely ends: a letter or digit in front of a newline or of punctuation.
WORD_END = re.compile(r"[^\W_](?=[\n\r\t.,:;!?()\[\]\"'\u3001\u3002\uff0c\uff1f])")


@register("text_files")
class TextFiles(TextProblem):
    """Your own files, read as bytes, whatever their encoding.

    Files of gzip are read as the text that they hold. A warning names files whose first
    16 MiB are no text in UTF-8: those in UTF-16, in Latin-1, or with NUL bytes.

    `files` are divided among the splits without their own files. From 20 files on, each
    file belongs to one split, chosen by a hash of its path below the folder that all
    files have in common: about 90 % are for training, 5 % for validation, 5 % for
    testing, but at least one each. Fewer files are cut: the last 5 % of the bytes of
    each are for testing, and the 5 % before them for validation. The end id follows
    every file or piece. Files come in the order in which they are named, those of one
    pattern in the order of their paths.

    A split of up to 64 MiB is held in memory. The ids of a larger one are written once
    to the folder `routing_tf` in `data_dir`, or without a `data_dir` in `data` in the
    folder of the run, and read in place from there, so memory does not depend on their
    number. They are made again when a file's size or time changes. With neither folder,
    everything is in memory.

    Args:
        files: a list of paths or glob patterns, or one string of them separated by
            commas; double quotes keep the commas of a name. `**` stands for folders of
            any depth. Relative paths start at the working directory. Defaults to all
            files in `data_dir` and the folders below it; as in every glob, `*` does not
            stand for names with a leading dot. A file that links give several names is
            read once.
        validation_files: the same, for the validation split. Defaults to `None`, for a
            part of `files`.
        test_files: the same, for the test split. Files that are named here or in
            `validation_files`, by any of their names, are left out of `files`.
        vocabulary: string, path of a subword vocabulary in the release's format. Tokens
            are then its subwords, and files must be UTF-8 (invalid bytes become
            U+FFFD). Defaults to `None`, for bytes as tokens.
        **options: arguments of `TextProblem`; `data_dir` is a folder for ids, and
            contains the files if `files` is not given.

    Raises:
        ValueError: if neither `files` nor `data_dir` is given; from `prepare`, if a
            pattern matches no file, a file cannot be read, a file is named for
            both validation and test, or a split is shorter than a window.

    Example:
    ```python
    import pathlib
    from routing_tf import problems

    pathlib.Path("numbers.txt").write_text(" ".join(map(str, range(2000))))
    problem = problems.get("text_files", files="numbers.txt", sequence_length=64)
    print(problem.describe())
    inputs, targets, weights = next(iter(problem.dataset("test", batch_size=2)))
    ```
    """

    storage = "text_files"
    has_own_files = True
    unit = " pieces"

    def __init__(
        self,
        files=None,
        validation_files=None,
        test_files=None,
        vocabulary=None,
        **options,
    ):
        super().__init__(**options)
        if not files and not self.data_dir:
            raise ValueError(
                "`files` must name the text files, or `data_dir` the folder that "
                f"contains them. Received: files={files!r}, data_dir={self.data_dir!r}"
            )
        self.files = files
        self.validation_files = validation_files
        self.test_files = test_files
        self.vocabulary = vocabulary
        if vocabulary is not None:
            self.metric_name = "bits per subword"
            self.tokenizer = SubwordTokenizer(vocabulary)

    def describe_split(self, split):
        if self.vocabulary is not None:
            return f"{self.num_tokens(split):,} subwords"
        number = len(self.source.places[split])
        files = "file" if number == 1 else "files"
        return f"{self.source.num_bytes(split):,} bytes of {number} {files}"

    @property
    def storage_dir(self):
        """The folder for ids: `data_dir`, or else that of the run; or None."""
        own = self.data_dir and pathlib.Path(self.data_dir)
        if own and ((own / "routing_tf" / self.storage).is_dir() or _is_writable(own)):
            return self.data_dir
        return self.work_dir or self.data_dir

    @property
    def variant(self):
        tokens = "bytes"
        if self.vocabulary is not None:
            tokens = f"subwords-{_digest(self.tokenizer.get_vocabulary())}"
        packed = self.packing
        if packed == "release":
            packed = f"release-{self.sequence_length}"
        named = (self.files, self.validation_files, self.test_files)
        return f"{tokens}-{packed}-{_digest([_absolute(files) for files in named])}"

    def make_source(self, raw_dir):
        check_no_raw_dir(self, raw_dir, "`files` or `data_dir`")
        return Texts(self.files, self.validation_files, self.test_files, self.data_dir)

    def read_split(self, split):
        if (
            self.source.num_bytes(split) > MAX_BYTES_IN_MEMORY
            and self.storage_dir
            and not self.is_made(split)
            and _is_writable(self.storage_dir)
        ):
            self.write_split(split)
        return super().read_split(split)

    def pieces(self, split, state):
        # The state is the number of a text and the number of its bytes that are done.
        first, done = state or (0, 0)
        places = self.source.places[split][first:]
        for number, (path, start, size) in enumerate(places, first):
            read, rest = done if number == first else 0, b""
            for chunk in raw_files.read_chunks(
                path, start=start + read, size=size - read, chunk_size=CHUNK_SIZE
            ):
                read += len(chunk)
                text = rest + chunk
                is_last = read == size
                end = len(text) if is_last else self._end_of_piece(text)
                text, rest = text[:end], text[end:]
                if not text:
                    continue
                if self.packing == "release" and not is_last:
                    # Text after the last newline comes in the next piece.
                    text = text.removesuffix(b"\n")
                after = (number + 1, 0) if is_last else (number, read - len(rest))
                yield text, is_last, after

    def _end_of_piece(self, text):
        """Where to cut a text so that its parts keep the ids of the whole; or 0."""
        if self.packing == "release":
            return text.rfind(b"\n") + 1
        return len(text) if self.vocabulary is None else _end_of_words(text)


class Texts(OwnFiles):
    """Pieces of the user's files, divided among the splits; see `TextFiles`."""

    def __init__(self, files, validation_files, test_files, data_dir):
        super().__init__()
        self.files = files
        self.validation_files = validation_files
        self.test_files = test_files
        self.data_dir = data_dir

    @functools.cached_property
    def places(self):
        """Path, first byte and number of bytes of the texts of each split."""
        named = {
            "train": self._all_files(),
            "validation": find_files("validation_files", self.validation_files),
            "test": find_files("test_files", self.test_files),
        }
        named = separate(named, "`{}_files`".format)
        shared = named.pop("train")
        _warn_of_no_text([*shared, *named["validation"], *named["test"]])
        places = share_out(shared, [split for split in named if not named[split]])
        for split, paths in named.items():
            places[split] += [(path, 0, raw_files.file_size(path)) for path in paths]
        places = {
            split: [place for place in found if place[2]]
            for split, found in places.items()
        }
        if not any(places.values()):
            number = len(shared) + sum(map(len, named.values()))
            raise ValueError(
                f"`files` must hold some text. Received: files={self.files!r}, "
                f"data_dir={self.data_dir!r}, whose {number} files are all empty"
            )
        return places

    def _all_files(self):
        if self.files:
            return find_files("files", self.files)
        everything = os.path.join(glob.escape(self.data_dir), "**")
        files = find_files("data_dir", [everything])
        # Data made from the files is not one of them.
        made = os.path.abspath(os.path.join(self.data_dir, "routing_tf/text_files"))
        return [path for path in files if not path.startswith(made + os.sep)]

    def num_bytes(self, split):
        """Returns how many bytes of text a split has."""
        return sum(size for _, _, size in self.places[split])

    def num_examples(self, split):
        return sum(-(-size // CHUNK_SIZE) for _, _, size in self.places[split])

    def files_of(self, split):
        return [path for path, _, _ in self.places[split]]

    def splits(self):
        return [split for split in SPLITS if self.places[split]]

    def identity(self, split):
        # The cuts of a file depend on the others.
        texts = _digest(self.places[split])
        return {**super().identity(split), "texts": texts}


def _warn_of_no_text(paths):
    """Names files that are probably not meant to be read as bytes of text."""
    found = [(path, _no_text(path)) for path in paths]
    named = [f"{path} ({reason})" for path, reason in found if reason]
    if named:
        reasons = {reason for _, reason in found if reason}
        encoding = "LATIN1"
        if reasons & BYTE_ORDER_MARKS.keys():
            encoding = "ENCODING" if len(reasons) > 1 else reasons.pop()
        more = f" and {len(named) - NUM_NAMED} more" if len(named) > NUM_NAMED else ""
        logging.warning(
            "read as bytes, though no text in UTF-8: %s%s. Convert them, as with "
            "`iconv -f %s -t UTF-8`, or leave them out of the files that are named",
            ", ".join(named[:NUM_NAMED]),
            more,
            encoding,
        )


def _no_text(path):
    """Says why the beginning of a file is not UTF-8 text; empty if it is."""
    with raw_files.open_file(path) as stream:
        start = stream.read(START_SIZE)
        is_whole = not stream.read(1)
    for name, marks in BYTE_ORDER_MARKS.items():
        if start.startswith(marks):
            return name
    if b"\0" in start:
        return "NUL bytes"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start, final=is_whole)
    except UnicodeDecodeError as error:
        kind = ", as in Latin-1" if _has_no_controls(start) else ""
        return f"byte {start[error.start]:#x} at {error.start:,}{kind}"
    return ""


def _has_no_controls(text):
    """Returns whether bytes may be text in an encoding of one byte for a character."""
    return not text.translate(None, TEXT_BYTES)


def _end_of_words(text):
    """Returns where the last word ends in UTF-8 text that continues; 0 if nowhere."""
    for size in (1 << 12, len(text)):
        tail = text[-size:].decode("utf-8", "surrogateescape")
        ends = [match.end() for match in WORD_END.finditer(tail)]
        if ends:
            rest = tail[ends[-1] :].encode("utf-8", "surrogateescape")
            return len(text) - len(rest)
    return 0


def _absolute(files):
    """The paths that an option names, independent of the working directory."""
    if isinstance(files, (str, os.PathLike)):
        files = split_paths(os.fspath(files))
    return [os.path.abspath(os.path.expanduser(os.fspath(f))) for f in files or []]


def _digest(value):
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _is_writable(folder):
    """Returns whether a folder can be written, or made if it is missing."""
    folder = pathlib.Path(folder).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(existing, os.W_OK)


@register("python_source")
class PythonSource(TextProblem):
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

    def load(self):
        library = pathlib.Path(sysconfig.get_path("stdlib"))
        texts = {split: [] for split in SPLITS}
        for path in self._source_files(library):
            try:
                text = path.read_bytes()
            except OSError:
                continue
            if text:
                name = path.relative_to(library).as_posix()
                texts[split_of_file(name)].append(text)
        sizes = {split: sum(map(len, texts[split])) for split in SPLITS}
        if min(sizes.values()) < self.sequence_length:
            raise ValueError(
                "The problem 'python_source' needs the source files of Python's "
                f"standard library. Found in {str(library)!r}, in bytes: {sizes} for "
                f"windows of {self.sequence_length}. Use the problem 'text_files' with "
                "your own files, or a shorter sequence_length."
            )
        return texts

    def _source_files(self, library):
        """The paths of all files that belong to the corpus, in order."""
        paths = []
        for folder, subfolders, names in os.walk(library):
            subfolders[:] = set(subfolders) - self.ignored_folders
            paths += [pathlib.Path(folder, n) for n in names if n.endswith(".py")]
        return sorted(paths, key=lambda path: path.relative_to(library).as_posix())

    def describe_split(self, split):
        texts = self.load_split(split)
        files = "file" if len(texts) == 1 else "files"
        return f"{sum(map(len, texts)):,} bytes of {len(texts)} {files}"

    def describe(self, *splits):
        python = platform.python_version()
        return f"{super().describe(*splits)}; library of Python {python}"
