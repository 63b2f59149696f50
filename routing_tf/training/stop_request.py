"""Signals that ask a run to stop."""

import contextlib
import os
import signal
import threading


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
