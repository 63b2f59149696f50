"""The first 100 million bytes of the English Wikipedia, as a tfds builder."""

import re

import numpy as np
import tensorflow_datasets as tfds

from routing_tf.files import named_files
from routing_tf.files import raw_files

URL = "http://mattmahoney.net/dc/enwik8.zip"
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
For the config "bytes": `enwik8` or `enwik8.zip`; without them, {URL} is downloaded.
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
                file = (dl_manager.download(URL), NAME)
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
