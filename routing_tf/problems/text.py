"""Texts as tokens, packed into windows."""

import functools

import numpy as np

from routing_tf.layers.support.validation import check_choice
from routing_tf.problems import packing
from routing_tf.problems.arguments import boolean
from routing_tf.problems.prepared import PreparedProblem
from routing_tf.problems.windows import Tokens
from routing_tf.problems.windows import segment_ids_of
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers.base_tokenizer import END_ID

PACKINGS = ("stream", "release")


class TextProblem(PreparedProblem):
    """Texts as tokens, packed into windows.

    Your own problem returns an iterable of texts from `load_split`, and has another
    `tokenizer` if tokens are not bytes. A prepared problem returns the text of an
    example from `text_of`.

    In the packing "stream", an end id follows each text, and windows are cut from the
    sequence of all texts, so that held-out windows contain every token once, including
    the last one. In the packing "release", windows are those of the release's problem
    of this name; problems without a rule use that of PG-19: lines, stripped of white
    space, fill a window until the next line would make it at least as long as
    `sequence_length`; then the end id closes it.

    Args:
        packing: string, "stream" (the default) or "release".
        segment_ids: boolean, or "true" or "false", whether inputs have "segment_ids",
            which separate the texts of a window, so that no token of a model sees
            another text. For the packing "stream", where the end id is between texts.
            Defaults to False.
        **options: arguments of `Problem`.

    Attributes:
        has_length_in_name: boolean, whether the problem's name gives the length of
            windows, unless the model's sequences are shorter.

    Raises:
        ValueError: if there is no such packing, or `segment_ids` come with the packing
            "release".

    Example:
    ```python
    from routing_tf import problems


    class Alphabet(problems.TextProblem):
        def load_split(self, split):
            return [b"abcdefghijklmnopqrstuvwxyz"] * 10


    Alphabet(sequence_length=54).ids("test")[:27]  # 99, 100, ..., 124, 1
    ```
    """

    has_length_in_name = False
    id_arrays = ("ids",)

    def __init__(self, packing="stream", segment_ids=False, **options):
        super().__init__(**options)
        check_choice("packing", packing, PACKINGS)
        self.packing = packing
        self.segment_ids = boolean("segment_ids", segment_ids)
        if self.segment_ids and packing != "stream":
            raise ValueError(
                '`segment_ids` needs `packing="stream"`: windows of the release do not '
                f"tell where texts end. Received: packing={packing!r}. Leave one of "
                "the two out"
            )

    @classmethod
    def options_for(cls, hyperparameters):
        options = super().options_for(hyperparameters)
        if cls.has_length_in_name:
            options["sequence_length"] = min(
                cls.default_sequence_length, options["sequence_length"]
            )
        return options

    @functools.cached_property
    def tokenizer(self):
        return ByteTokenizer()

    def text_of(self, example):
        """Returns the text of an example, as `encode` takes it."""
        return example

    def encode(self, text):
        """Returns the ids of a text, a NumPy array without an end id."""
        return self.tokenizer.encode(text)

    def count_words(self, text):
        """Returns the number of words that the metric counts in a text."""
        return 0

    def release_rule(self, split):
        """Returns the rule of `packing` by which the release packs a split."""
        return packing.WholeLines(self.sequence_length)

    def release_lines(self, text):
        """Returns the ids of the lines of a text, as the release encodes them."""
        lines = text.split(b"\n" if isinstance(text, bytes) else "\n")
        return self.tokenizer.encode_batch([line.strip() for line in lines])

    @property
    def options_without_effect(self):
        names = super().options_without_effect | {"segment_ids"}
        return names - {"sequence_length"} if self.packing == "release" else names

    @property
    def packed_name(self):
        """The settings of the release's windows that change arrays; otherwise empty."""
        if self.packing == "stream":
            return "stream"
        return f"release-{self.train_split}-{self.sequence_length}"

    def dtypes(self):
        dtypes = {"ids": self.ids_dtype(), "num_words": "int64"}
        if self.packing == "release":
            dtypes["windows"] = ("int64", (2,))
        return dtypes

    def pieces(self, split, state):
        """Yields pieces of texts, whose joined ids are those of the texts.

        With each, whether an end id follows, and a `state` for JSON to continue from.
        """
        start = state or 0
        for number, example in enumerate(self.examples(split, start), start + 1):
            yield self.text_of(example), True, number

    def parts(self, split, state):
        begin, rule_state, is_finished = state or (None, None, False)
        if is_finished:
            return
        rule = self.release_rule(split) if self.packing == "release" else None
        if rule_state:
            rule.state = rule_state
        place = begin
        for text, is_end, place in self.pieces(split, begin):
            if rule:
                lines = [rule.add(line) for line in self.release_lines(text)]
                arrays = packing.joined(lines)
            else:
                ids = self.encode(text)
                if is_end:
                    ids = np.append(ids, ids.dtype.type(END_ID))
                arrays = {"ids": ids}
            arrays["num_words"] = [self.count_words(text)]
            yield arrays, (place, rule and rule.state, False)
        if rule:
            yield packing.joined([rule.finish()]), (place, None, True)

    def read(self, split, starts, lengths):
        inputs, targets, weights = super().read(split, starts, lengths)
        if self.segment_ids:
            ids = segment_ids_of(targets, inputs["padding_mask"], END_ID)
            inputs = {**inputs, "segment_ids": ids}
        return inputs, targets, weights

    def tokens_of(self, split, arrays):
        num_words = int(arrays["num_words"].sum()) or None
        return Tokens(arrays["ids"], arrays.get("windows"), num_words)

    def words_per_token(self, split):
        """Returns the number of words of the original text per id."""
        return self.tokens(split).num_words / self.num_tokens(split)
