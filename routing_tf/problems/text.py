"""Text as bytes, from files that are already there."""

import functools
import hashlib
import itertools
import os
import pathlib

import numpy as np

from routing_tf.choices import SPLITS
from routing_tf.files.named_files import file_size
from routing_tf.problems import packing
from routing_tf.problems.problem import Problem
from routing_tf.problems.problem import Tokens
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import byte_tokenizer
from routing_tf.tokenizers.base_tokenizer import END_ID

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
        end = np.array([END_ID], "uint16")
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
