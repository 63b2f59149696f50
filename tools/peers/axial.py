"""Writes what the package axial-attention computes for columns and rows of an image.

    pip install --no-deps --target PEERS axial-attention==0.6.1
    PYTHONPATH=PEERS python tools/peers/axial.py

Needs PyTorch.
"""

import pathlib

import axial_attention
import numpy as np
import torch

FILE = pathlib.Path(__file__).parents[2] / "tests/golden/peers/axial.npz"
HEADS, DIM, SHAPE = 2, 12, (5, 3)


def main():
    torch.manual_seed(0)
    layer = axial_attention.AxialAttention(DIM, num_dimensions=2, heads=HEADS).eval()
    x = torch.randn(2, *SHAPE, DIM)
    arrays = {"x": x.numpy()}
    for axis, part in enumerate(layer.axial_attentions):
        for weight in part.fn.parameters():
            torch.nn.init.normal_(weight, std=0.5)
        key, value = np.split(part.fn.to_kv.weight.detach().numpy(), 2)
        query, output = part.fn.to_q.weight, part.fn.to_out
        arrays |= {
            f"{axis}/query_kernel": query.detach().numpy().T,
            f"{axis}/key_kernel": key.T,
            f"{axis}/value_kernel": value.T,
            f"{axis}/output_kernel": output.weight.detach().numpy().T,
            f"{axis}/output_bias": output.bias.detach().numpy(),
            f"{axis}/output": part(x).detach().numpy(),
        }
    arrays["output"] = layer(x).detach().numpy()
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
