"""PG-19: books of Project Gutenberg, as subwords."""

import functools
import hashlib
import os
import pathlib

import numpy as np

from routing_tf.choices import SPLITS
from routing_tf.files import atomic
from routing_tf.problems import raw_files
from routing_tf.problems.prepared import PreparedTextProblem
from routing_tf.problems.problem import perplexity
from routing_tf.problems.registry import register
from routing_tf.tokenizers import SubwordTokenizer

# The name that the release gives to its vocabulary, of 98,302 subwords.
VOCABULARY_FILE = "vocab.pg19_length8k.32768.subwords"
VOCABULARY_SIZE = 1 << 15
# Of training text, evenly over the books, that a vocabulary is learned from.
VOCABULARY_BYTES = 50_000_000
# By which the release multiplies the log perplexity per subword of its vocabulary.
SUBWORDS_PER_WORD = 1.248


@register("pg19_length8k")
class Pg19Length8k(PreparedTextProblem):
    """PG-19, books from before 1919, as subwords in windows of 8192.

    `datagen` takes the folders `train`, `validation` and `test` with a text file for
    each book, or lets tensorflow-datasets download them. Each line, without white
    space at both ends, is turned into subwords; its newline is not, as in the release.
    The end id follows each book. The metric is the perplexity per word, words being
    what stands between white space in the books.

    In the packing "release" books come in the order of a plain directory listing, and
    the end id closes each window instead. The metric is then the release's: the log
    perplexity per subword times 1.248.

    Args:
        vocabulary: string, path of the subword vocabulary. Defaults to `None`: the file
            `vocab.pg19_length8k.32768.subwords` in `data_dir`, where `datagen` copies
            the one in `raw_dir` or learns one from the training split.
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
    def vocabulary_size(self):
        return self.tokenizer.vocabulary_size()

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

    def prepare_source(self):
        if self.raw_dir is None:
            super().prepare_source()
        elif not self.available_splits():
            raise ValueError(
                "`raw_dir` must hold at least one of the folders train, validation and "
                "test with a text file (*.txt) for each book. Received: "
                f"raw_dir={self.raw_dir!r}"
            )
        if not self.vocabulary_path.exists():
            self._make_vocabulary()

    def _make_vocabulary(self):
        """Copies the vocabulary among the raw files, or learns one."""
        if self.vocabulary:
            raise ValueError(
                "`vocabulary` must be the path of a file. Received: "
                f"vocabulary={self.vocabulary!r}"
            )
        self.data_path.mkdir(parents=True, exist_ok=True)
        if self.raw_dir and pathlib.Path(self.raw_dir, VOCABULARY_FILE).is_file():
            content = pathlib.Path(self.raw_dir, VOCABULARY_FILE).read_bytes()
            with atomic.whole(self.vocabulary_path) as partial:
                partial.write_bytes(content)
            return
        if self.train_split not in self.available_splits():
            raise ValueError(
                f"A vocabulary is learned from the split {self.train_split!r}, which "
                f"is missing. Received: raw_dir={self.raw_dir!r}. Put "
                f"{VOCABULARY_FILE} there, name a file with the option vocabulary, or "
                "choose another train_split"
            )
        tokens = SubwordTokenizer.build_vocabulary(self._sample(), VOCABULARY_SIZE)
        SubwordTokenizer(tokens).save_vocabulary(self.vocabulary_path)

    def _sample(self):
        """Yields the middles of all training books; all begin with a title page."""
        share = VOCABULARY_BYTES // max(1, self.num_examples(self.train_split))
        for text in self.texts(self.train_split):
            start = max(0, len(text) - share) // 2
            yield text[start : start + share]

    def _paths(self, split):
        """The raw files of a split, in the order of the packing."""
        folder = os.path.join(self.raw_dir, split)
        names = os.listdir(folder) if os.path.isdir(folder) else []
        paths = [os.path.join(folder, n) for n in names if n.endswith(".txt")]
        return paths if self.packing == "release" else sorted(paths)

    def available_splits(self):
        if self.raw_dir is None:
            return super().available_splits()
        return [split for split in SPLITS if self._paths(split)]

    def num_examples(self, split):
        if self.raw_dir is None:
            return super().num_examples(split)
        return len(self._paths(split))

    def examples(self, split, start):
        if self.raw_dir is None:
            return super().examples(split, start)
        return ({"path": path} for path in self._paths(split)[start:])

    def text_of(self, example):
        if "path" not in example:
            return example["book_text"].decode("utf-8")
        return "\n".join(line for _, line in raw_files.read_lines(example["path"]))

    def identity(self, split):
        identity = super().identity(split)
        if self.raw_dir is not None:
            identity["files"] = [
                [os.path.basename(path), os.path.getsize(path)]
                for path in self._paths(split)
            ]
        return identity

    def encode(self, text):
        return self._encode_lines(text).flat_values.numpy()

    def _encode_lines(self, text):
        lines = [line.strip() for line in text.split("\n")]
        return self.tokenizer.tokenize(lines)

    def release_lines(self, text):
        lines = self._encode_lines(text)
        return np.split(lines.flat_values.numpy(), lines.row_splits.numpy()[1:-1])

    def count_words(self, text):
        return len(text.split())

    def describe_split(self, split):
        words = self.tokens(split).num_words
        return f"{self.num_tokens(split):,} subwords of {words:,} words"
