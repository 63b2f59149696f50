"""Writes what the attention of sinkhorn-transformer computes, without a causal mask.

    pip install --no-deps --target PEERS sinkhorn-transformer==0.11.4 local-attention \
        product-key-memory==0.1.11 axial-positional-embedding einops
    PYTHONPATH=PEERS python tools/peers/sinkhorn_heads.py

Needs PyTorch. Three things are changed: noise is off; scores are what is sorted by, and
not the logarithm of their positive part; and values are keys, as the package takes keys
for the values of sorted blocks.
"""

import pathlib

import numpy as np
import torch
from sinkhorn_transformer import sinkhorn_transformer as peer

FILE = pathlib.Path(__file__).parents[2] / "tests/golden/peers/sinkhorn_heads.npz"
HEADS, DIM, LENGTH, BLOCK, ITERATIONS, TEMPERATURE = 2, 6, 20, 4, 3, 0.6


def main():
    torch.manual_seed(0)
    peer.sample_gumbel = lambda shape, *_: torch.zeros(shape)
    peer.log = lambda x: x
    peer.F.relu = lambda x: x
    layer = peer.SinkhornAttention(
        BLOCK,
        dim=DIM * HEADS,
        dim_heads=DIM,
        heads=HEADS,
        max_seq_len=LENGTH,
        temperature=TEMPERATURE,
        non_permutative=False,
        sinkhorn_iter=ITERATIONS,
    )
    query, key = 2 * torch.randn(2, 2, HEADS, LENGTH, DIM)
    with torch.no_grad():
        output = layer(query, key, key)
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        FILE,
        query=query,
        key=key,
        output=output,
        block_length=BLOCK,
        num_iterations=ITERATIONS,
        temperature=TEMPERATURE,
    )


if __name__ == "__main__":
    main()
