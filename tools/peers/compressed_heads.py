"""Writes what another implementation of compressed attention returns, for the tests.

    pip install --no-deps --target PEERS memory-compressed-attention==0.0.7
    PYTHONPATH=PEERS python tools/peers/compressed_heads.py

Needs PyTorch.
"""

import pathlib

import numpy as np
import torch
from memory_compressed_attention import MemoryCompressedAttention

OUTPUT = pathlib.Path(__file__).parents[2] / "tests/golden/peers/compressed.npz"
DIM, HEADS, RATIO, LENGTH = 12, 3, 4, 16


def main():
    torch.manual_seed(4)
    layer = MemoryCompressedAttention(DIM, heads=HEADS, compression_factor=RATIO)
    layer = layer.double()
    arrays = {}
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if name.startswith("null"):
                weight.normal_()
            weight.copy_(weight.float())  # what is written is exact
            arrays[name] = weight.numpy().astype("float32")
        x = torch.randn(2, LENGTH, DIM).double()
        arrays["input"] = x.float().numpy()
        for layer.causal in (False, True):
            output = layer(x.float().double()).numpy()
            arrays["causal" if layer.causal else "full"] = output.astype("float32")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(OUTPUT, **arrays)


if __name__ == "__main__":
    main()
