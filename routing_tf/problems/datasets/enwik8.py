"""enwik8: the first 100 million bytes of a Wikipedia dump."""

import functools

from routing_tf.layers.support.validation import check_choice
from routing_tf.problems import packing
from routing_tf.problems.registry import register
from routing_tf.problems.text import TextProblem
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import byte_tokenizer


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
        return packing.EachLine(self.sequence_length)

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
