"""Writes what another implementation of Linformer returns, for the tests.

    pip install --no-deps --target PEERS linformer==0.2.3
    PYTHONPATH=PEERS python tools/peers/linformer_heads.py

Needs PyTorch.
"""

import pathlib

import numpy as np
import torch
from linformer import LinformerSelfAttention

OUTPUT = pathlib.Path(__file__).parents[2] / "tests/golden/peers/linformer.npz"
DIM, HEADS, MAX_LENGTH, NUM_PROJECTED = 12, 3, 14, 5


def main():
    torch.manual_seed(4)
    arrays = {}
    for share in (False, True):
        layer = LinformerSelfAttention(
            DIM, MAX_LENGTH, k=NUM_PROJECTED, heads=HEADS, share_kv=share
        ).double()
        name = "all" if share else "heads"
        with torch.no_grad():
            for key, weight in layer.named_parameters():
                weight.copy_(weight.float())  # what is written is exact
                arrays[f"{name}/{key}"] = weight.numpy().astype("float32")
            for length in (MAX_LENGTH, 9):
                x = torch.randn(2, length, DIM).double().float().double()
                arrays[f"{name}/{length}/input"] = x.numpy().astype("float32")
                arrays[f"{name}/{length}/output"] = layer(x).numpy().astype("float32")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(OUTPUT, **arrays)


if __name__ == "__main__":
    main()
