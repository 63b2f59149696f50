"""How far a loop has come, for whoever waits."""

import sys
import time

import tqdm

SECONDS_BEFORE_PROGRESS = 2
SECONDS_BETWEEN_LINES = 10.0


def progress(iterable, unit, total=None, verbose=True):
    """Goes through an iterable and tells on stderr how far it is.

    On a terminal that is a progress bar, else a line now and then. What is done in two
    seconds tells nothing. `unit` names an item; `total` is the number of items, by
    default the length of the iterable.
    """
    if not verbose:
        return iterable
    if sys.stderr.isatty():
        return tqdm.tqdm(
            iterable, unit=unit, total=total, delay=SECONDS_BEFORE_PROGRESS
        )
    return _lines(iterable, unit, len(iterable) if total is None else total)


def _lines(iterable, unit, total):
    start = time.monotonic()
    next_line = start + SECONDS_BETWEEN_LINES
    for number, item in enumerate(iterable, 1):
        yield item
        now = time.monotonic()
        if now >= next_line and number < total:
            left = tqdm.tqdm.format_interval((now - start) * (total - number) / number)
            text = f"{unit} {number}/{total}: {left} left"
            print(text, file=sys.stderr, flush=True)
            next_line = now + SECONDS_BETWEEN_LINES
