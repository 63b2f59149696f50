"""Long loops: their progress, and signals that ask them to stop."""

import contextlib
import os
import signal
import sys
import threading
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


class StopRequest:
    """Turns the first of some signals into a request to stop after the step.

    A `KeyboardInterrupt` would be raised anywhere, and C code may turn it into another
    error. The second signal has its usual effect.

    Args:
        message: text for standard error when the signal comes; "" for nothing.
        signals: their numbers. Defaults to SIGINT and SIGTERM.

    Attributes:
        signal: number of the signal that came; None if none did.
    """

    def __init__(self, message="", signals=(signal.SIGINT, signal.SIGTERM)):
        self.message, self.signals = message, signals
        self.signal = None
        self._earlier = {}

    def __enter__(self):
        # Python delivers signals only to the main thread.
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                self._earlier[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception):
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _receive(self, number, frame):
        self.signal = number
        self.__exit__()
        # The signal may have come in the middle of a print, so print cannot be used.
        os.write(2, self.message.encode())


@contextlib.contextmanager
def stop_as_interrupt():
    """Makes SIGTERM and SIGHUP end a block of code like Ctrl-C."""
    earlier = {}

    def receive(number, frame):
        for other in earlier:  # they come together, and what is done is being saved
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    # Python delivers signals only to the main thread.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            # `nohup` lets it be ignored.
            if signal.getsignal(number) == signal.SIG_DFL:
                earlier[number] = signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
