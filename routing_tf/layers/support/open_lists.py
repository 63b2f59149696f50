"""Lists that are open inside a context, apart for each thread."""

import contextlib
import threading


class OpenLists(threading.local):
    """Lists that are open, the innermost last: each thread has its own.

    A strategy runs each replica in a thread.
    """

    def __init__(self):
        self._lists = []

    @contextlib.contextmanager
    def opened(self):
        """Yields a new list, which is the innermost inside the context."""
        new = []
        self._lists.append(new)
        try:
            yield new
        finally:
            self._lists.pop()

    @property
    def innermost(self):
        """The innermost list; None if none is open."""
        return self._lists[-1] if self._lists else None
