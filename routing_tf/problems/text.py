"""Texts as tokens, packed into windows."""

import dataclasses
import functools

import numpy as np

from routing_tf.layers.support.validation import check_choice
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
        return WholeLines(self.sequence_length)

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
                arrays = joined(lines)
            else:
                ids = self.encode(text)
                if is_end:
                    ids = np.append(ids, ids.dtype.type(END_ID))
                arrays = {"ids": ids}
            arrays["num_words"] = [self.count_words(text)]
            yield arrays, (place, rule and rule.state, False)
        if rule:
            yield joined([rule.finish()]), (place, None, True)

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


@dataclasses.dataclass(frozen=True)
class Packed:
    """Ids to write after the earlier ones, and new windows as pairs (start, length).

    Starts count all written ids.
    """

    ids: list
    windows: list


class Rule:
    """The common part of all rules, which makes no windows.

    No window has more ids than `sequence_length`.
    """

    def __init__(self, sequence_length):
        self.sequence_length = sequence_length
        # The ids from the first one that is in no window yet.
        self.state = {"start": 0, "end": 0}

    def add(self, line):
        """Takes the ids of a line; returns `Packed`."""
        self.state["end"] += len(line)
        return Packed(line, [])

    def finish(self):
        """Ends the data and drops the buffer. Returns `Packed`."""
        return Packed([], [])


class EachLine(Rule):
    """Every line is a window: the rule of the problem `Enwik8`."""

    def add(self, line):
        start = self.state["end"]
        self.state["end"] += len(line)
        return Packed(line, pieces(start, self.state["end"], self.sequence_length))


class WholeLines(Rule):
    """Windows of as many whole lines as are shorter than the sequence length.

    With the defaults, the rule of `Pg19Length8k`; without them, that of the held-out
    splits of `Wikitext103Length4k`. `end_windows` closes each window with the end id,
    and `keep_last` makes a window of the lines after the last full one.
    """

    def __init__(self, sequence_length, end_windows=True, keep_last=True):
        super().__init__(sequence_length)
        self.end_windows = end_windows
        self.keep_last = keep_last

    def add(self, line):
        buffered = self.state["end"] - self.state["start"]
        if buffered + len(line) < self.sequence_length:
            return super().add(line)
        closed = self._close()
        self.state["end"] += len(line)
        return Packed([*closed.ids, *line], closed.windows)

    def finish(self):
        return self._close() if self.keep_last else super().finish()

    def _close(self):
        ids = [END_ID] if self.end_windows else []
        start = self.state["start"]
        self.state["end"] += len(ids)
        self.state["start"] = self.state["end"]
        return Packed(ids, pieces(start, self.state["end"], self.sequence_length))


class OverlappingLines(Rule):
    """Windows that overlap heavily: the training split of `Wikitext103Length4k`.

    When a line no longer fits, the lines of the buffer are a window. Then whole lines
    with at least the length of the new one leave its front.
    """

    def __init__(self, sequence_length):
        super().__init__(sequence_length)
        # Lengths of the lines that have not left yet, including the newest.
        self.state["lines"] = []

    def add(self, line):
        state, windows = self.state, []
        state["lines"].append(len(line))
        if state["end"] - state["start"] + len(line) >= self.sequence_length:
            windows = pieces(state["start"], state["end"], self.sequence_length)
            left = num_left = 0
            while left < len(line):
                left += state["lines"][num_left]
                num_left += 1
            del state["lines"][:num_left]
            # A line that leaves before it came in removes nothing.
            state["start"] = min(state["start"] + left, state["end"])
        state["end"] += len(line)
        return Packed(line, windows)


class SlidingWindows(Rule):
    """A window every few ids, shorter by one than `sequence_length`.

    The rule of the training split of `Wikitext103Length4kOverlap`.
    """

    def __init__(self, sequence_length, stride=3):
        super().__init__(sequence_length)
        self.stride = stride

    def add(self, line):
        self.state["end"] += len(line)
        last = self.state["end"] - self.sequence_length
        starts = range(self.state["start"], last + 1, self.stride)
        self.state["start"] += len(starts) * self.stride
        return Packed(line, [(start, self.sequence_length - 1) for start in starts])


def pieces(start, end, sequence_length):
    """Cuts a window of ids into pairs (start, length) of at most `sequence_length`."""
    return [
        (place, min(sequence_length, end - place))
        for place in range(start, end, sequence_length)
    ]


def joined(packed):
    """Joins a list of `Packed` to int64 arrays; "windows" is `[num_windows, 2]`."""
    ids = [np.zeros(0, "int64"), *(np.asarray(part.ids, "int64") for part in packed)]
    windows = [window for part in packed for window in part.windows]
    windows = np.asarray(windows, "int64").reshape(-1, 2)
    return {"ids": np.concatenate(ids), "windows": windows}
