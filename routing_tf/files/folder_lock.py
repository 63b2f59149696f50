"""A lock on a folder, which is released when its holder ends in any way."""

import contextlib
import fcntl
import os


@contextlib.contextmanager
def hold(folder, wait=True):
    """Lets one process at a time work in an existing folder.

    If `wait` is False and another process holds the lock, raises `BlockingIOError`.
    On file systems without locks, such as some network mounts, it does nothing.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(lock)
