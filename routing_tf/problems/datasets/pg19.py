"""PG-19: books of Project Gutenberg, as subwords."""

import functools
import hashlib
import os
import pathlib

import numpy as np

from routing_tf.files import raw_files
from routing_tf.files.names import SPLITS
from routing_tf.problems import sources
from routing_tf.problems.problem import perplexity
from routing_tf.problems.registry import register
from routing_tf.problems.sources import Source
from routing_tf.problems.text import TextProblem
from routing_tf.tokenizers import SubwordTokenizer

# The name that the release gives to its vocabulary, of 98,302 subwords.
VOCABULARY_FILE = "vocab.pg19_length8k.32768.subwords"
# The release's factor of the log perplexity per subword of its vocabulary.
SUBWORDS_PER_WORD = 1.248


@register("pg19_length8k")
class Pg19Length8k(TextProblem):
    """PG-19, books from before 1919, as subwords in windows of 8192.

    `datagen` takes the folders `train`, `validation` and `test` with a text file for
    each book, or lets tensorflow-datasets download them. Each line is stripped of white
    space and turned into subwords, without its newline, as in the release. The end id
    follows each book. The metric is the perplexity per word, where words are separated
    by white space in the books.

    In the packing "release", books come in the order of a plain directory listing, and
    the end id closes each window instead. The metric is then the release's: the log
    perplexity per subword times 1.248.

    Args:
        vocabulary: string, path of the subword vocabulary. Defaults to `None`: the file
            `vocab.pg19_length8k.32768.subwords` in `data_dir`, to which `datagen`
            copies the file in `raw_dir`, or a vocabulary learned from the training
            split.
        **options: arguments of `TextProblem`. `sequence_length` defaults to 8192.

    Raises:
        ValueError: from `prepare`, if the data or the vocabulary is missing.

    Example:
    ```python
    from routing_tf import problems

    problem = problems.get("pg19_length8k", data_dir="data", packing="release")
    problem.sequence_length  # 8192
    ```

    Reference: `Pg19Length8k` of the release; Rae et al., "Compressive Transformers for
    Long-Range Sequence Modelling" (2020).
    """

    storage = "pg19"
    builder = "pg19"
    metric_name = "perplexity per word"
    default_sequence_length = 8192
    default_hparams_set = "pg19_local_cluster8k"
    has_length_in_name = True

    def __init__(self, vocabulary=None, **options):
        super().__init__(**options)
        self.vocabulary = vocabulary

    def metric(self, nats_per_token, split):
        return perplexity(nats_per_token / self.words_per_token(split))

    def words_per_token(self, split):
        if self.packing == "release":
            return 1 / SUBWORDS_PER_WORD
        return super().words_per_token(split)

    @property
    def vocabulary_path(self):
        """Path of the vocabulary, a `pathlib.Path`."""
        if self.vocabulary:
            return pathlib.Path(self.vocabulary)
        return self.data_path / VOCABULARY_FILE

    @functools.cached_property
    def tokenizer(self):
        self._check_vocabulary()
        return SubwordTokenizer(str(self.vocabulary_path))

    def _check_vocabulary(self):
        if not self.vocabulary_path.exists():
            raise ValueError(
                f"`vocabulary` must name the subword vocabulary of {self.name}; "
                f"without it, `{self.command} --raw_dir=FOLDER` makes one. Received: "
                f"vocabulary={self.vocabulary!r}, and no {VOCABULARY_FILE} in "
                f"{self.data_dir!r}"
            )

    @property
    def variant(self):
        self._check_vocabulary()
        content = self.vocabulary_path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:8]
        return f"subwords-{digest}-{self.packed_name}"

    @property
    def packed_name(self):
        # The rule is the same for all splits.
        if self.packing == "stream":
            return "stream"
        return f"release-{self.sequence_length}"

    def make_source(self, raw_dir):
        if raw_dir is None:
            return super().make_source(raw_dir)
        return Books(raw_dir, is_sorted=self.packing == "stream")

    def prepare_source(self):
        super().prepare_source()
        if not self.vocabulary_path.exists():
            self._make_vocabulary()

    def _make_vocabulary(self):
        """Copies the vocabulary among the raw files, or learns one."""
        if self.vocabulary:
            raise ValueError(
                "`vocabulary` must be the path of a file. Received: "
                f"vocabulary={self.vocabulary!r}"
            )
        path, train_split = self.vocabulary_path, self.train_split
        is_given = sources.given_vocabulary(path, self.raw_dir)
        if not is_given and train_split not in self.available_splits():
            raise ValueError(
                f"A vocabulary must be learned from the split {train_split!r}, "
                f"which is missing. Received: raw_dir={self.raw_dir!r}. Put "
                f"{VOCABULARY_FILE} there, name a file with the option vocabulary, or "
                "choose another train_split"
            )
        sources.make_vocabulary(path, self.raw_dir, self._sample)

    def _sample(self):
        """Yields the middles of all training books, which begin with title pages."""
        number = self.source.num_examples(self.train_split)
        share = sources.VOCABULARY_BYTES // max(1, number)
        for text in map(self.text_of, self.examples(self.train_split, 0)):
            start = max(0, len(text) - share) // 2
            yield text[start : start + share]

    def text_of(self, example):
        if "path" not in example:
            return example["book_text"].decode("utf-8")
        return "\n".join(line for _, line in raw_files.read_lines(example["path"]))

    def encode(self, text):
        return np.concatenate(self.release_lines(text))

    def count_words(self, text):
        return len(text.split())

    def describe_split(self, split):
        words = self.tokens(split).num_words
        return f"{self.num_tokens(split):,} subwords of {words:,} words"


class Books(Source):
    """The text files in the folders `train`, `validation` and `test`.

    Unless they are sorted by name, they come in the order of a plain directory listing.
    """

    is_direct = False

    def __init__(self, folder, is_sorted):
        super().__init__()
        self.folder = folder
        self.is_sorted = is_sorted

    def _paths(self, split):
        folder = os.path.join(self.folder, split)
        names = os.listdir(folder) if os.path.isdir(folder) else []
        paths = [os.path.join(folder, n) for n in names if n.endswith(".txt")]
        return sorted(paths) if self.is_sorted else paths

    def prepare(self):
        if not self.splits():
            raise ValueError(
                "`raw_dir` must hold at least one of the folders train, validation and "
                "test with a text file (*.txt) for each book. Received: "
                f"raw_dir={self.folder!r}"
            )

    def splits(self):
        return [split for split in SPLITS if self._paths(split)]

    def examples(self, split, start):
        return ({"path": path} for path in self._paths(split)[start:])

    def num_examples(self, split):
        return len(self._paths(split))

    def identity(self, split):
        paths = self._paths(split)
        return {"files": [[os.path.basename(p), os.path.getsize(p)] for p in paths]}
