"""Writes what the attention of reformer-pytorch computes.

    pip install --no-deps --target PEERS reformer-pytorch==1.4.4 local-attention \
        product-key-memory==0.1.11 axial-positional-embedding einops
    PYTHONPATH=PEERS python tools/peers/hashed_heads.py

Needs PyTorch. Under a causal mask, with two chunks in a round, a token sees all earlier
ones of its bucket. Without one, queries in the first chunk of a round see tokens of
another round, unlike in the paper: `alike` tells the others.
"""

import pathlib

import numpy as np
import torch
from reformer_pytorch import LSHAttention

FILE = pathlib.Path(__file__).parents[2] / "tests/golden/peers/hashed_heads.npz"
HEADS, DIM, ROUNDS, CHUNK, LENGTH = 2, 6, 2, 8, 32


def run(causal, chunk):
    """Returns arrays of a call, the buckets `[heads, rounds, length]` among them."""
    torch.manual_seed(0)
    layer = LSHAttention(
        bucket_size=chunk,
        n_hashes=ROUNDS,
        causal=causal,
        allow_duplicate_attention=False,
        attend_across_buckets=not causal,
        random_rotations_per_head=True,
    )
    query, value = torch.randn(2, HEADS, LENGTH, DIM)
    state = torch.get_rng_state()
    # The first numbers that the layer draws.
    rotations = torch.randn(HEADS, DIM, ROUNDS, LENGTH // chunk // 2)
    torch.set_rng_state(state)
    with torch.no_grad():
        output, _, buckets = layer(query, value)
    arrays = {
        "query": query,
        "value": value,
        "rotations": rotations,
        "output": output,
        "buckets": buckets.reshape(HEADS, ROUNDS, LENGTH),
    }
    return {name: x.numpy() for name, x in arrays.items()}


def main():
    # In float32 the logits of tokens that see themselves alone, -5e4, are too coarse.
    torch.set_default_dtype(torch.float64)
    causal, chunks = run(True, LENGTH // 2), run(False, CHUNK)
    order = np.argsort(chunks["buckets"], axis=-1, kind="stable")
    chunks["alike"] = (np.argsort(order, axis=-1) >= CHUNK).all(axis=1)
    arrays = {"attention_window": CHUNK}
    for name, case in (("causal", causal), ("chunks", chunks)):
        arrays |= {f"{name}/{key}": x for key, x in case.items()}
    for key, x in arrays.items():
        arrays[key] = np.float32(x) if np.asarray(x).dtype == "float64" else x
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
