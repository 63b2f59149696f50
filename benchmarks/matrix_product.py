"""A contender that multiplies square matrices: its rate makes the floors."""

import numpy as np

SIZES = {"cpu": 2048, "gpu": 8192}


def operations(device):
    """Returns the operations of one run."""
    return 2 * SIZES[device] ** 3


def product(library, dtype, device):
    """Returns a function that multiplies two matrices.

    Args:
        library: `"tensorflow"`, `"jax"` or `"torch"`.
        dtype: `"float32"` or `"bfloat16"`.
        device: `"cpu"` or `"gpu"`.
    """
    size = SIZES[device]
    matrix = np.random.default_rng(0).normal(size=(size, size)).astype("float32")
    return _PRODUCTS[library](matrix, dtype, device)


def _torch(matrix, dtype, device):
    import torch

    place = "cuda" if device == "gpu" else "cpu"
    matrix = torch.tensor(matrix, dtype=getattr(torch, dtype), device=place)

    def run():
        torch.matmul(matrix, matrix)
        if device == "gpu":
            torch.cuda.synchronize()

    return run


def _tensorflow(matrix, dtype, device):
    import tensorflow as tf

    matrix = tf.cast(matrix, dtype)

    def run():
        tf.matmul(matrix, matrix)
        tf.test.experimental.sync_devices()

    return run


def _jax(matrix, dtype, device):
    import jax

    matrix = jax.numpy.asarray(matrix, dtype)
    compiled = jax.jit(jax.numpy.matmul)
    return lambda: compiled(matrix, matrix).block_until_ready()


_PRODUCTS = {"torch": _torch, "tensorflow": _tensorflow, "jax": _jax}
