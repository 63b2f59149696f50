"""A lock on a folder, which is free again when its holder ends, however that is."""

import contextlib
import fcntl
import os


@contextlib.contextmanager
def hold(folder, wait=True):
    """Lets one process at a time do something in an existing folder.

    If `wait` is False and another process holds the lock, raises `BlockingIOError`.
    Where the file system has no locks, as some that machines share, it lets all.
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
