"""WikiText-103: articles of Wikipedia, as words or as bytes."""

import functools

import numpy as np

from routing_tf.layers.support.validation import check_choice
from routing_tf.problems import array_store
from routing_tf.problems import packing
from routing_tf.problems import vocabularies
from routing_tf.problems.metrics import perplexity
from routing_tf.problems.registry import register
from routing_tf.problems.text import TextProblem
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import WordTokenizer
from routing_tf.tokenizers.base_tokenizer import END_ID

VOCABULARY_FILE = "vocabulary.words"


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
            identity["vocabulary"] = vocabularies.digest(self.tokenizer)
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
            return packing.OverlappingLines(self.sequence_length)
        return packing.WholeLines(
            self.sequence_length, end_windows=False, keep_last=False
        )

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
            return packing.SlidingWindows(self.sequence_length)
        return super().release_rule(split)

    def release_lines(self, text):
        for line in super().release_lines(text):
            yield np.append(line, END_ID)
