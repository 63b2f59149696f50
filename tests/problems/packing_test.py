"""The release's rules, against plain transcriptions of what the inventory says."""

import os
import pathlib

import numpy as np
import pytest

from routing_tf.problems.text import EachLine
from routing_tf.problems.text import OverlappingLines
from routing_tf.problems.text import SlidingWindows
from routing_tf.problems.text import WholeLines
from routing_tf.problems.text import joined
from routing_tf.tokenizers import WordTokenizer

REFERENCE = os.environ.get("ROUTING_TF_REFERENCE_DIR")
LENGTH = 8


def in_pieces(windows, length):
    """Windows longer than a row, in rows; those without ids are none."""
    return [
        window[place : place + length]
        for window in windows
        for place in range(0, len(window), length)
    ]


def whole_lines(lines, length, end):
    """The buffer of a rule as lists of ids, window by window."""
    windows, buffer = [], []
    for line in lines:
        if len(buffer) + len(line) < length:
            buffer = buffer + line
        else:
            windows.append(buffer + end)
            buffer = line
    return windows, buffer + end


def closed_lines(lines, length):
    """Those that the end id closes, the last one as well."""
    windows, last = whole_lines(lines, length, end=[1])
    return in_pieces([*windows, last], length)


def complete_lines(lines, length):
    windows, _ = whole_lines(lines, length, end=[])
    return in_pieces(windows, length)


def overlapping_lines(lines, length):
    windows, buffer, queue = [], [], []
    for line in lines:
        queue.append(line)
        if len(buffer) + len(line) >= length:
            windows.append(buffer)
            popped = 0
            while popped < len(line):
                popped += len(queue.pop(0))
            buffer = buffer[popped:]
        buffer = buffer + line
    return in_pieces(windows, length)


def sliding(lines, length):
    windows, buffer = [], []
    for line in lines:
        buffer = buffer + line
        while len(buffer) >= length:
            windows.append(buffer[: length - 1])
            buffer = buffer[3:]
    return windows


def pack(rule, lines):
    return joined([*map(rule.add, lines), rule.finish()]).values()


def packed(rule, lines):
    ids, windows = pack(rule, lines)
    return [ids[start : start + length].tolist() for start, length in windows]


def random_lines(seed, num_lines=60, longest=LENGTH + 4):
    """Lines of every length, empty ones and too long ones among them."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, longest, num_lines)
    return [rng.integers(2, 100, size).tolist() for size in sizes]


def without_the_last(length):
    return WholeLines(length, end_windows=False, keep_last=False)


# The rows that each rule makes of lines, by its transcription.
RULES = {
    EachLine: in_pieces,
    WholeLines: closed_lines,
    without_the_last: complete_lines,
    OverlappingLines: overlapping_lines,
    SlidingWindows: sliding,
}


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("longest", [4, LENGTH, LENGTH + 12])
def test_rules(make, seed, longest):
    lines = random_lines(seed, longest=longest)
    assert packed(make(LENGTH), lines) == RULES[make](lines, LENGTH)


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("stop", [0, 1, 17, 59])
def test_work_goes_on_from_its_state(make, stop):
    lines = random_lines(7)
    ids, windows = pack(make(LENGTH), lines)
    first, second = make(LENGTH), make(LENGTH)
    parts = [first.add(line) for line in lines[:stop]]
    second.state = first.state
    parts += [second.add(line) for line in lines[stop:]]
    parts.append(second.finish())
    assert [id for part in parts for id in part.ids] == ids.tolist()
    assert [w for part in parts for w in part.windows] == [*map(tuple, windows)]


def test_no_data():
    assert packed(WholeLines(LENGTH), []) == [[1]]
    for make in (OverlappingLines, SlidingWindows, EachLine):
        assert packed(make(LENGTH), []) == []


@pytest.mark.skipif(not REFERENCE, reason="needs ROUTING_TF_REFERENCE_DIR")
@pytest.mark.parametrize(
    "length",
    [256, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1024, 4096))],
)
def test_the_rules_on_real_text(length):
    path = pathlib.Path(REFERENCE, "data", "wikitext", "valid.txt")
    text = path.read_bytes()[:120_000].decode("utf-8", "ignore")
    tokenizer = WordTokenizer(WordTokenizer.build_vocabulary([text]))
    lines = [tokenizer.encode(line).tolist() for line in text.split("\n")]
    lines = [line for line in lines if line]
    assert len(lines) > 200
    for make in (without_the_last, OverlappingLines, SlidingWindows):
        if make is SlidingWindows:
            lines = [[*line, 1] for line in lines]
        found = packed(make(length), lines)
        assert found == RULES[make](lines, length)
        assert found
