"""Memory that graphs were built in, given back to the system."""

import ctypes

import tensorflow as tf

# A parameter of glibc's `mallopt`, and what a large block has, in bytes. TensorFlow
# takes smaller tensors from the heap.
MMAP_THRESHOLD, LARGE = -3, 1 << 20


def give_back_large_blocks():
    """Lets the C library return each large block to the system when it is freed.

    glibc does so until it has seen a few, and puts later ones into its heap. There,
    much of what tracing and optimizing a graph took stays with the process: about 100
    MiB in a training step of six layers. It is set for the whole process, where
    TensorFlow has an allocator of its own for tensors, as with oneDNN on a CPU. Where
    it has none, tensors are such blocks, and to get each one anew would double the time
    of a step; XLA has such blocks too.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc alone
    if mallopt is not None and _has_own_allocator():
        mallopt(MMAP_THRESHOLD, LARGE)


def _has_own_allocator():
    try:
        tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:  # the C library's allocator keeps no count
        return False
    return True
