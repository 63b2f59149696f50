import os
import pathlib
import subprocess
import sys

import keras
import pytest

# Prints how many blocks of 2 MiB lie outside the heap, of one before and one after.
COUNT = """
import ctypes
from routing_tf.training.engines import heap

class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
library.malloc.argtypes = [ctypes.c_size_t]
library.mallinfo2.restype = Counts

def count():
    before = library.mallinfo2().d
    library.malloc(2 << 20)
    return library.mallinfo2().d - before

# From then on, glibc takes blocks of this size from its heap.
library.free(library.malloc(16 << 20))
before = count()
heap.give_back_large_blocks()
print(before, count())
"""


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow")
@pytest.mark.parametrize("has_own_allocator, expected", [("1", "0 1"), ("0", "0 0")])
def test_large_blocks_go_back(has_own_allocator, expected):
    result = subprocess.run(
        [sys.executable, "-c", COUNT],
        cwd=pathlib.Path(__file__).parents[2],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": has_own_allocator},
        capture_output=True,
        check=True,
        text=True,
    )
    assert result.stdout.strip() == expected
