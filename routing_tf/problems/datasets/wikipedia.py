"""Texts of Wikipedia: enwik8 and WikiText-103."""

import functools

import numpy as np

from routing_tf.layers.support.validation import check_choice
from routing_tf.problems import array_store
from routing_tf.problems import sources
from routing_tf.problems.problem import perplexity
from routing_tf.problems.registry import register
from routing_tf.problems.text import EachLine
from routing_tf.problems.text import OverlappingLines
from routing_tf.problems.text import SlidingWindows
from routing_tf.problems.text import TextProblem
from routing_tf.problems.text import WholeLines
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import WordTokenizer
from routing_tf.tokenizers import byte_tokenizer
from routing_tf.tokenizers.base_tokenizer import END_ID

VOCABULARY_FILE = "vocabulary.words"


@register("enwik8")
class Enwik8(TextProblem):
    """enwik8, the first 100 million bytes of a Wikipedia dump, as bytes.

    `datagen` takes the original file `enwik8` or `enwik8.zip`, of which the first 90
    million bytes are for training, the next 5 for validation and the last 5 for
    testing, or downloads it. Ids are those of `ByteTokenizer`, and the end id follows
    each split.

    It also takes the release's files `train.txt`, `valid.txt` and `test.txt`, integers
    separated by spaces. These are the ids themselves, without end ids and without a
    tokenizer. In the packing "release" each of their lines is a window.

    Args:
        form: string, "bytes" for the original file or "integers" for the release's.
            Defaults to `None`: the form that exists, the original first; the packing
            "release" needs integers.
        **options: arguments of `TextProblem`. `sequence_length` defaults to 8192.

    Raises:
        ValueError: if there is no such form; from `prepare`, if the data is not in
            `data_dir`.

    Example:
    ```python
    from routing_tf import problems

    problem = problems.get("enwik8", data_dir="data")
    problem.sequence_length  # 8192
    ```

    Reference: `Enwik8` of the release; Mahoney, "Large Text Compression Benchmark".
    """

    storage = "enwik8"
    builder = "enwik8"
    default_sequence_length = 8192
    default_hparams_set = "enwik8_local_cluster8k"

    def __init__(self, form=None, **options):
        super().__init__(**options)
        check_choice("form", form, ("bytes", "integers", None))
        if self.packing == "release" and form == "bytes":
            raise ValueError(
                "`packing='release'` needs the release's files of integers. Received: "
                "form='bytes'. Leave one of them out"
            )
        self.form = form

    def builder_names(self):
        forms = [self.form] if self.form else ["bytes", "integers"]
        if self.packing == "release":
            forms = ["integers"]
        return [f"enwik8/{form}" for form in forms]

    @property
    def is_integers(self):
        """Whether the data is the release's files of integers."""
        return self.source.form == "integers"

    @property
    def variant(self):
        return f"{self.source.form}-{self.packed_name}"

    @functools.cached_property
    def tokenizer(self):
        return None if self.is_integers else ByteTokenizer()

    @property
    def id_arrays(self):
        return () if self.is_integers else ("ids",)

    @functools.cached_property
    def vocabulary_size(self):
        if not self.is_integers:
            return byte_tokenizer.NUM_IDS
        # Of all splits, so that each can be scored.
        largest = max(self.ids(split).max() for split in self.available_splits())
        return max(byte_tokenizer.NUM_IDS, int(largest) + 1)

    def ids_dtype(self):
        return "int32" if self.is_integers else "uint16"

    def text_of(self, example):
        return example["ids" if self.is_integers else "text"]

    def encode(self, text):
        return text if self.is_integers else super().encode(text)

    def pieces(self, split, state):
        pieces = super().pieces(split, state)
        following = next(pieces, None)
        while following is not None:
            (text, _, place), following = following, next(pieces, None)
            # The pieces of a split are one text; integers may use every id.
            yield text, following is None and not self.is_integers, place

    def release_rule(self, split):
        return EachLine(self.sequence_length)

    def release_lines(self, text):
        return [text]

    def describe_split(self, split):
        if self.is_integers:
            return f"{self.num_tokens(split):,} integers"
        return f"{self.num_tokens(split) - 1:,} bytes"


@register("enwik8_length8k")
class Enwik8Length8k(Enwik8):
    """enwik8 in windows of 8192 bytes."""

    has_length_in_name = True
    default_sequence_length = 8192


@register("enwik8_length12k")
class Enwik8Length12k(Enwik8):
    """enwik8 in windows of 12288 bytes."""

    has_length_in_name = True
    default_sequence_length = 12288
    default_hparams_set = "enwik8_local_cluster12k"


@register("wikitext103")
class Wikitext103(TextProblem):
    """WikiText-103, 103 million words of good Wikipedia articles, as words or bytes.

    `datagen` takes the files of the release with rare words replaced by `<unk>`
    (`wiki.train.tokens`, ...), those of the raw release (`wiki.train.raw`, ...), or
    either as `train.txt`, `valid.txt` and `test.txt`; or it downloads them. A split
    with a missing file is an error only if it is used.

    For words, the vocabulary has all words of the split to train on, the most frequent
    first, numbered as in tensor2tensor's token encoder. The end of a line is a word,
    and the end id follows each article. Words that the split to train on does not have
    become `<unk>`. The metric is the perplexity per word of the text, including line
    ends, as in published figures.

    In the packing "release", line ends are not words, and windows of the training split
    overlap; the metric is the perplexity per packed word.

    Args:
        level: string, "words" (the default) or "bytes".
        form: string, "tokens" or "raw", the release of the text to use. Defaults to
            `None`: the form that exists, "tokens" first for words and "raw" first for
            bytes.
        **options: arguments of `TextProblem`. `sequence_length` defaults to 4096.

    Raises:
        ValueError: if there is no such level or form, or bytes come with the packing
            "release", which is for words; from `prepare`, if the data is not in
            `data_dir`.

    Example:
    ```python
    from routing_tf import problems

    problem = problems.get("wikitext103", data_dir="data", level="bytes")
    problem.metric_name  # "bits per byte"
    ```

    Reference: `Wikitext103Length4k` of the release; Merity et al., "Pointer Sentinel
    Mixture Models" (2017).
    """

    storage = "wikitext103"
    builder = "wikitext103"
    default_sequence_length = 4096
    default_hparams_set = "wikitext103_local_cluster4k"

    def __init__(self, level="words", form=None, **options):
        super().__init__(**options)
        check_choice("level", level, ("words", "bytes"))
        check_choice("form", form, ("tokens", "raw", None))
        if level == "bytes" and self.packing == "release":
            raise ValueError(
                "`packing='release'` needs words. Received: level='bytes'. Leave one "
                "of them out"
            )
        self.level = level
        self.form = form

    @property
    def metric_name(self):
        return "perplexity per word" if self.level == "words" else "bits per byte"

    def metric(self, nats_per_token, split):
        if self.level == "bytes":
            return super().metric(nats_per_token, split)
        return perplexity(nats_per_token / self.words_per_token(split))

    def builder_names(self):
        forms = ["tokens", "raw"] if self.level == "words" else ["raw", "tokens"]
        return [f"wikitext103/{form}" for form in ([self.form] if self.form else forms)]

    @property
    def needs_train_split(self):
        """Whether arrays depend on the split to train on, whose words have the ids."""
        return self.level == "words"

    @property
    def variant(self):
        if self.level == "bytes":
            return f"bytes-{self.source.form}-stream"
        # The vocabulary is that of the split to train on.
        return f"words-{self.source.form}-{self.train_split}-{self.packed_name}"

    @functools.cached_property
    def tokenizer(self):
        if self.level == "bytes":
            return ByteTokenizer()
        if not self._vocabulary_path.exists():
            self._write_vocabulary(self._vocabulary_path)
        return WordTokenizer(str(self._vocabulary_path))

    @property
    def _vocabulary_path(self):
        return self.folder(self.train_split).parent / VOCABULARY_FILE

    def _write_vocabulary(self, path):
        self.check_prepared(self.train_split)
        tokens = WordTokenizer.build_vocabulary(
            map(self.text_of, self.examples(self.train_split, 0)),
            newline=True,
            unknown=True,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        WordTokenizer(tokens).save_vocabulary(path)

    def identity(self, split):
        identity = super().identity(split)
        if self.level == "words":
            identity["vocabulary"] = sources.digest(self.tokenizer)
        return identity

    def read_split(self, split):
        arrays = super().read_split(split)
        here = self.identity(split).get("vocabulary")
        there = array_store.identity_of(self.folder(split)).get("vocabulary", here)
        if here != there:
            raise ValueError(
                "The vocabulary must be the one with which the data was prepared. "
                f"Received: {str(self._vocabulary_path)!r}, which has changed. Restore "
                "it, or remove its folder and prepare everything again with "
                f"`{self.command} --raw_dir=FOLDER`"
            )
        return arrays

    def text_of(self, example):
        text = example["text"]
        return text if self.level == "bytes" else text.decode("utf-8")

    def count_words(self, text):
        if self.level == "bytes":
            return 0
        return len(text.split()) + text.count("\n")

    def words_per_token(self, split):
        if self.packing == "release":
            return 1.0
        return super().words_per_token(split)

    def release_rule(self, split):
        if split == self.train_split:
            return OverlappingLines(self.sequence_length)
        return WholeLines(self.sequence_length, end_windows=False, keep_last=False)

    def release_lines(self, text):
        for line in text.split("\n"):
            if line.strip():
                yield self.encode(line)

    def describe_split(self, split):
        ids = self.ids(split)
        number = len(ids) - np.count_nonzero(ids == END_ID)
        if self.level == "bytes":
            return f"{number:,} bytes"
        unknown = np.count_nonzero(ids == self.tokenizer.unknown_token_id)
        return f"{number:,} words, {unknown / number:.2%} of them <unk>"


@register("wikitext103_length4k")
class Wikitext103Length4k(Wikitext103):
    """WikiText-103 in windows of 4096 words."""

    has_length_in_name = True


@register("wikitext103_length2k")
class Wikitext103Length2k(Wikitext103Length4k):
    """WikiText-103 in windows of 2048 words."""

    default_sequence_length = 2048


@register("wikitext103_length1k")
class Wikitext103Length1k(Wikitext103Length4k):
    """WikiText-103 in windows of 1024 words."""

    default_sequence_length = 1024
    default_hparams_set = "wikitext103_local_cluster1k"


@register("wikitext103_length4k_overlap")
class Wikitext103Length4kOverlap(Wikitext103Length4k):
    """WikiText-103 in windows of 4096 words; the release's begin every 3 words.

    In the packing "release" the word `<EOS>`, the end id, ends each line.
    """

    @property
    def packed_name(self):
        name = super().packed_name
        return name if self.packing == "stream" else f"overlap-{name}"

    def release_rule(self, split):
        if split == self.train_split:
            return SlidingWindows(self.sequence_length)
        return super().release_rule(split)

    def release_lines(self, text):
        for line in super().release_lines(text):
            yield np.append(line, END_ID)
