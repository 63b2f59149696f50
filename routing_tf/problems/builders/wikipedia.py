"""Texts of Wikipedia, as tfds builders: enwik8 and WikiText-103."""

import re

import numpy as np
import tensorflow_datasets as tfds

from routing_tf.files import named_files
from routing_tf.files import raw_files

WIKITEXT103_URL = "https://s3.amazonaws.com/research.metamind.io/wikitext"
# By config: the folder that the zip file has.
FOLDERS = {"tokens": "wikitext-103", "raw": "wikitext-103-raw"}
SPLITS = {"train": "train", "validation": "valid", "test": "test"}
# " = Title = "; a section has two or more: " = = Section = = ".
HEADING = re.compile(r"\s*= [^=].* =\s*")

ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
NAME = "enwik8"
FIRST_BYTES = b"<mediawiki"
INTEGER_FILES = {"train": "train.txt", "validation": "valid.txt", "test": "test.txt"}
MAX_ID = 2**31 - 1
ONLY_DIGITS = re.compile(r"[0-9\s]*", re.ASCII)


class Enwik8(tfds.core.GeneratorBasedBuilder):
    """Enwik8: bytes of Wikipedia, or ids made from them.

    The config "bytes", the default, reads the original file of 100,000,000 bytes and
    cuts it into the usual splits: the first 90, the next 5 and the last 5 million
    bytes. An example is `{"text": bytes}`, a piece of 1 MiB of the stream; the pieces
    of a split, in order, are all of its bytes. The config "integers" reads the files of
    the release, integers separated by spaces. An example is
    `{"ids": int32 array of shape (count,)}`, one non-empty line; only splits with
    existing files are made.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="bytes", description="Pieces of the file."),
        tfds.core.BuilderConfig(name="integers", description="Lines of integers."),
    ]
    MANUAL_DOWNLOAD_INSTRUCTIONS = f"""\
For the config "bytes": `enwik8` or `enwik8.zip`; without them, {ENWIK8_URL} is
downloaded.
For the config "integers": at least one of `train.txt`, `valid.txt` and `test.txt`,
integers separated by spaces.
"""
    # In bytes, in the order of the file.
    SPLIT_SIZES = {"train": 90_000_000, "validation": 5_000_000, "test": 5_000_000}
    CHUNK_SIZE = 1 << 20

    def _info(self):
        features = {"text": tfds.features.Text()}
        if self.builder_config.name == "integers":
            # A tensor, because a sequence of scalars takes each integer separately.
            features = {"ids": tfds.features.Tensor(shape=(None,), dtype=np.int32)}
        return tfds.core.DatasetInfo(
            builder=self,
            description="The first 100,000,000 bytes of a dump of the English "
            "Wikipedia of March 3, 2006.",
            features=tfds.features.FeaturesDict(features),
            homepage="http://mattmahoney.net/dc/textdata.html",
            citation=(
                "@misc{mahoney2011large, title={Large Text Compression Benchmark}, "
                "author={Matt Mahoney}, year={2011}, "
                "url={http://mattmahoney.net/dc/text.html}}"
            ),
            disable_shuffling=True,
        )

    def find_files(self, folder):
        """Returns the raw files as `{split: (path, member of a zip file or None)}`."""
        folder = tfds.core.Path(folder)
        if self.builder_config.name == "integers":
            paths = {split: folder / name for split, name in INTEGER_FILES.items()}
            return {s: (path, None) for s, path in paths.items() if path.is_file()}
        if (folder / NAME).is_file():
            return dict.fromkeys(self.SPLIT_SIZES, (folder / NAME, None))
        if (folder / f"{NAME}.zip").is_file():
            return dict.fromkeys(self.SPLIT_SIZES, (folder / f"{NAME}.zip", NAME))
        return {}

    def _split_generators(self, dl_manager):
        folder = raw_files.given_folder(dl_manager)
        files = {} if folder is None else self.find_files(folder)
        if self.builder_config.name == "integers":
            if not files:
                raise raw_files.no_files_error(self, folder, INTEGER_FILES.values())
        else:
            if folder is None:
                file = (dl_manager.download(ENWIK8_URL), NAME)
                files = dict.fromkeys(self.SPLIT_SIZES, file)
            if not files:
                raise raw_files.no_files_error(self, folder, [NAME, f"{NAME}.zip"])
            self._check(*files["train"])
        return {split: self._generate_examples(split, files[split]) for split in files}

    def _check(self, path, member):
        """Refuses files that cannot be the original one."""
        where = named_files.place(path, member)
        size = sum(self.SPLIT_SIZES.values())
        found = raw_files.file_size(path, member)
        if found != size:
            few_or_many = "few" if found < size else "many"
            raise ValueError(
                f"{where} must have exactly {size:,} bytes; it has too {few_or_many} "
                f"bytes. Received: {found:,} bytes"
            )
        with raw_files.open_file(path, member) as stream:
            first_bytes = stream.read(len(FIRST_BYTES))
        if first_bytes != FIRST_BYTES:
            raise ValueError(
                f"{where} must begin with {FIRST_BYTES!r}. Received: {first_bytes!r}"
            )

    def _generate_examples(self, split, file):
        if self.builder_config.name == "integers":
            return read_ids(*file)
        return self._read_bytes(split, *file)

    def _read_bytes(self, split, path, member):
        splits = list(self.SPLIT_SIZES)
        before = splits[: splits.index(split)]
        chunks = raw_files.read_chunks(
            path,
            member,
            start=sum(self.SPLIT_SIZES[earlier] for earlier in before),
            size=self.SPLIT_SIZES[split],
            chunk_size=self.CHUNK_SIZE,
        )
        for key, chunk in enumerate(chunks):
            yield key, {"text": chunk}


def read_ids(path, member=None):
    """Reads the integers of each non-empty line; the key is the line's number."""
    for number, line in raw_files.read_lines(path, member):
        if not line.strip():
            continue
        check_integers(line, named_files.place(path, member, number))
        ids = np.fromstring(line, dtype=np.int64, sep=" ")
        if ids.max() > MAX_ID:
            raise ValueError(
                f"{named_files.place(path, member, number)} must have integers of at "
                f"most {MAX_ID}. Received: {ids.max()} or more"
            )
        yield number, {"ids": ids.astype(np.int32)}


def check_integers(line, where):
    """Refuses a line with other characters than digits and spaces."""
    if ONLY_DIGITS.fullmatch(line):
        return
    word = next(word for word in line.split() if not ONLY_DIGITS.fullmatch(word))
    rule = "not negative" if re.fullmatch(r"-[0-9]+", word) else "integers"
    raise ValueError(
        f"{where} must have integers of 0 or more, separated by spaces; all must be "
        f"{rule}. Received: {word[:40]!r}"
    )


class Wikitext103(tfds.core.GeneratorBasedBuilder):
    """WikiText-103: good and featured articles of the English Wikipedia.

    The config "tokens", the default, reads the version with words that are split and
    rare words replaced by `<unk>`; "raw" the one with all words. An example is
    `{"text": bytes}`, one article in UTF-8. It begins at its title, a line such as " =
    Title = " between empty lines; text before the first title belongs to the first
    article. The articles of a split, in order, are the text of its file, character for
    character. Only splits with existing files are made.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="tokens", description="Rare words are <unk>."),
        tfds.core.BuilderConfig(name="raw", description="All words."),
    ]
    MANUAL_DOWNLOAD_INSTRUCTIONS = f"""\
For the config "tokens": `wikitext-103-v1.zip`, or at least one of `wiki.train.tokens`,
`wiki.valid.tokens` and `wiki.test.tokens`, in the folder itself or in `wikitext-103`
below it. For the config "raw": `wikitext-103-raw-v1.zip`, or `wiki.train.raw`,
`wiki.valid.raw` and `wiki.test.raw`, there or in `wikitext-103-raw`. The files may also
be called `train.txt`, `valid.txt` and `test.txt`. If there is nothing at all, the zip
file is downloaded from {WIKITEXT103_URL}.
"""

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description="Good and featured articles of the English Wikipedia.",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage="https://huggingface.co/datasets/Salesforce/wikitext",
            citation=(
                "@misc{merity2016pointer, title={Pointer Sentinel Mixture Models}, "
                "author={Stephen Merity and Caiming Xiong and James Bradbury and "
                "Richard Socher}, year={2016}, eprint={1609.07843}, "
                "archivePrefix={arXiv}, primaryClass={cs.CL}}"
            ),
            license="Creative Commons Attribution-ShareAlike",
            disable_shuffling=True,
        )

    @property
    def _zip_name(self):
        return f"{FOLDERS[self.builder_config.name]}-v1.zip"

    def _names(self):
        """The names of the files by split, those of the distribution first."""
        ending = self.builder_config.name
        yield {split: f"wiki.{name}.{ending}" for split, name in SPLITS.items()}
        yield {split: f"{name}.txt" for split, name in SPLITS.items()}

    def find_files(self, folder):
        """Returns the raw files as `{split: (path, member of a zip file or None)}`.

        All come from one place: the first one that has any of them.
        """
        folder = tfds.core.Path(folder)
        for place in (folder, folder / FOLDERS[self.builder_config.name]):
            for names in self._names():
                paths = {split: place / name for split, name in names.items()}
                files = {s: (path, None) for s, path in paths.items() if path.is_file()}
                if files:
                    return files
        path = folder / self._zip_name
        return self._find_members(path) if path.is_file() else {}

    def _find_members(self, path):
        members = {name.rpartition("/")[2]: name for name in raw_files.members(path)}
        names = next(self._names())
        files = {s: (path, members[n]) for s, n in names.items() if n in members}
        if not files:
            raise ValueError(
                f"{named_files.place(path)} must have one of the members "
                f"{', '.join(names.values())}. Received: a zip file of "
                f"{raw_files.listing(raw_files.members(path))}"
            )
        return files

    def _split_generators(self, dl_manager):
        folder = raw_files.given_folder(dl_manager)
        if folder is None:
            path = dl_manager.download(f"{WIKITEXT103_URL}/{self._zip_name}")
            files = self._find_members(path)
        else:
            files = self.find_files(folder)
        if not files:
            names = [name for names in self._names() for name in names.values()]
            raise raw_files.no_files_error(self, folder, [self._zip_name, *names])
        return {split: self._generate_examples(*file) for split, file in files.items()}

    def _generate_examples(self, path, member):
        for key, article in enumerate(read_articles(path, member)):
            yield key, {"text": article}


def read_articles(path, member=None):
    r"""Yields the articles of a file of WikiText; joined, they are its text.

    Example:
    ```python
    import pathlib
    from routing_tf.problems.builders import wikipedia

    pathlib.Path("wiki").write_text("\n = A = \n\n a \n\n = B = \n\n b \n")
    list(wikipedia.read_articles("wiki"))  # ["\n = A = \n\n a \n\n", " = B = ..."]
    ```
    """
    lines = []  # of the current article
    has_title = has_words = False
    candidate = None  # the place in them of what is a title if an empty line follows
    for number, line in raw_files.read_lines(path, member, keep_ends=True):
        empty = not line.strip()
        if not empty and not has_words:
            has_words = True
            _check_words(line, named_files.place(path, member, number))
        if candidate is not None and empty:
            if has_title:
                yield "".join(lines[:candidate])
                lines = lines[candidate:]
            has_title = True
        after_empty = not lines or not lines[-1].strip()
        # Formulas look like titles: " = 1 <unk> = " in the middle of a paragraph.
        candidate = len(lines) if after_empty and HEADING.fullmatch(line) else None
        lines.append(line)
    yield "".join(lines)


def _check_words(line, where):
    """Refuses files of the problem enwik8, which have the same names."""
    if all(word.isdigit() for word in line.split()):
        raise ValueError(
            f"{where} must have words, as the articles of WikiText do. Received: "
            f"integers, {line.strip()[:40]!r}"
        )
