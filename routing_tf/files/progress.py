"""Progress of loops."""

import sys
import time

import tqdm

SECONDS_BEFORE_PROGRESS = 2
SECONDS_BETWEEN_LINES = 10.0


def progress(iterable, unit, total=None, verbose=True):
    """Goes through an iterable and shows its progress on stderr.

    A terminal gets a bar, and other outputs a line now and then; loops of less than two
    seconds show nothing. `unit` names an item; `total` is the length by default.
    """
    if not verbose:
        return iterable
    total = len(iterable) if total is None else total
    follow = _bar if sys.stderr.isatty() else _lines
    return follow(iterable, unit, total)


def begin_at(bar, number):
    """Sets a bar of tqdm to `number`, as if it began now: the first steps compile."""
    bar.n = bar.initial = bar.last_print_n = number
    bar.start_t = bar.last_print_t = time.time()


def _bar(iterable, unit, total):
    delay = SECONDS_BEFORE_PROGRESS
    start = time.monotonic()
    with tqdm.tqdm(total=total, unit=unit, delay=delay) as bar:
        for number, item in enumerate(iterable, 1):
            yield item
            if number > 1:
                bar.update()
                continue
            begin_at(bar, 1)
            if time.monotonic() - start >= delay:
                bar.refresh()


def _lines(iterable, unit, total):
    next_line = time.monotonic() + SECONDS_BETWEEN_LINES
    for number, item in enumerate(iterable, 1):
        yield item
        now = time.monotonic()
        if number == 1:
            first = now  # it compiles, so its time does not predict the others
        if now >= next_line and number < total:
            text = f"{unit} {number}/{total}"
            if number > 1:
                left = (now - first) * (total - number) / (number - 1)
                text += f": {tqdm.tqdm.format_interval(left)} left"
            print(text, file=sys.stderr, flush=True)
            next_line = now + SECONDS_BETWEEN_LINES
