"""Writes what another implementation of product key memory returns, for the tests.

    pip install --no-deps --target PEERS product-key-memory==0.1.11
    PYTHONPATH=PEERS python tools/peers/product_key_memory.py

Needs PyTorch and einops.
"""

import importlib
import pathlib
import sys

import numpy as np
import torch

OUTPUT = pathlib.Path(__file__).parents[2] / "tests/golden/peers/product_key_memory.npz"
DIM, HEADS, NUM_KEYS, TOP_K, KEY_DIM = 6, 3, 5, 3, 8


def peer():
    """Imports the package, whose name this file has, too."""
    here = str(pathlib.Path(__file__).parent)
    sys.path = [path for path in sys.path if path != here]
    sys.modules.pop("product_key_memory", None)
    return importlib.import_module("product_key_memory").PKM


def main():
    torch.manual_seed(4)
    layer = peer()(
        DIM, heads=HEADS, num_keys=NUM_KEYS, topk=TOP_K, dim_head=KEY_DIM
    ).double()
    arrays = {}
    with torch.no_grad():
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if tensor.is_floating_point():
                # What is written is exact; a running variance is positive.
                tensor.copy_((tensor + 0.3 * torch.randn_like(tensor).abs()).float())
                arrays[f"weight/{name}"] = tensor.numpy().astype("float32")
    x = torch.randn(2, 7, DIM).double().float().double()
    cotangent = torch.randn(2, 7, DIM).double().float().double()
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, 5:] = False
    arrays |= {"input": x.numpy(), "cotangent": cotangent.numpy(), "mask": real.numpy()}
    for mode in ("eval", "train"):
        layer.train(mode == "train")
        layer.zero_grad()
        output = layer(x, input_mask=real)
        arrays[f"{mode}/output"] = output.detach().numpy()
        # Where the mask is False the package does not normalize.
        (output * cotangent * real[..., None]).sum().backward()
        for name, parameter in layer.named_parameters():
            arrays[f"{mode}/gradient/{name}"] = parameter.grad.numpy().copy()
    for name, buffer in layer.named_buffers():
        if buffer.is_floating_point():
            arrays[f"after/{name}"] = buffer.numpy()
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        name: array if array.dtype == bool else array.astype("float32")
        for name, array in arrays.items()
    }
    np.savez_compressed(OUTPUT, **arrays)


if __name__ == "__main__":
    main()
