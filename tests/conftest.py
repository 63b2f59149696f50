"""Settings of all tests."""

import os

import numpy as np
import pytest

# Most of the time goes into compiling functions that run once.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)
# TensorFlow's notes on processors and accelerators drown the tests' own output.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Path of a file of 4,000 random letters."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    letters = np.random.default_rng(0).integers(97, 123, 4000, "uint8")
    path.write_bytes(bytes(letters))
    return path
