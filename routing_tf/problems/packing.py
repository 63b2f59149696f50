"""How the release cuts lines of tokens into windows.

Each rule is a class with the same interface: `add` takes the ids of a line, `finish`
ends the data, and both return the ids and windows to write. All windows of a rule are
pieces of one sequence of ids, so a window is a start and a length. Only the sequence
length cuts lines: a window that a line makes longer is returned in pieces, because
every row of a batch has a fixed length.

`state` contains everything that a rule remembers, so that stopped work on large data
can continue.
"""

import dataclasses

import numpy as np

from routing_tf.tokenizers.base_tokenizer import END_ID


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
