"""A lock on a folder, which is free again when its holder ends, however that is."""

import contextlib
import fcntl
import os


@contextlib.contextmanager
def hold(folder, wait=True):
    """Lets one process at a time do something in a folder.

    Where the file system has no locks, as some that machines share, it lets all.

    Args:
        folder: path of the folder, which exists.
        wait: whether to wait for a process that holds the lock. Defaults to True.

    Raises:
        BlockingIOError: if another process holds the lock, and `wait` is False.
        OSError: if the folder cannot be opened.
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
