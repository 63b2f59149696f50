"""Writes what another implementation of Nyström attention returns, for the tests.

    pip install --no-deps --target PEERS nystrom-attention==0.0.14 einops==0.8.2
    PYTHONPATH=PEERS python tools/peers/nystrom_heads.py

Needs PyTorch. Each head of each sequence is a call of its own: the package starts the
pseudo-inverse from the largest norm in a batch.
"""

import pathlib

import numpy as np
import torch
from nystrom_attention import NystromAttention

OUTPUT = pathlib.Path(__file__).parents[2] / "tests/golden/peers/nystrom.npz"
BATCH, HEADS, LENGTH, DIM, LANDMARKS, KERNEL = 2, 2, 12, 5, 4, 5


def one_head(query, key, value, mask, kernel):
    """Returns the output for arrays `[length, dim]`."""
    layer = NystromAttention(
        3 * DIM,
        dim_head=DIM,
        heads=1,
        num_landmarks=LANDMARKS,
        residual=kernel is not None,
        residual_conv_kernel=KERNEL,
    ).double()
    with torch.no_grad():
        layer.to_qkv.weight.copy_(torch.eye(3 * DIM))
        layer.to_out[0].weight.copy_(torch.eye(3 * DIM, DIM))
        layer.to_out[0].bias.zero_()
        if kernel is not None:
            layer.res_conv.weight.copy_(torch.tensor(kernel).reshape(1, 1, KERNEL, 1))
        tokens = torch.tensor(np.concatenate([query, key, value], -1)).double()[None]
        mask = None if mask is None else torch.tensor(mask)[None]
        return layer(tokens, mask=mask)[0, :, :DIM].numpy()


def main():
    random = np.random.default_rng(5)
    arrays = {
        name: random.normal(size=(BATCH, HEADS, LENGTH, DIM)).astype("float32")
        for name in ("query", "key", "value")
    }
    arrays["kernel"] = random.normal(size=(KERNEL, HEADS, 1)).astype("float32")
    # As many tokens in each segment: the package makes segments of places.
    holes = random.integers(LENGTH // LANDMARKS, size=(BATCH, LANDMARKS, 1))
    mask = np.arange(LENGTH // LANDMARKS) != holes
    arrays["mask"] = mask.reshape(BATCH, LENGTH)
    tokens = [arrays[name] for name in ("query", "key", "value")]
    for name, masked, convolved in (
        ("plain", False, False),
        ("convolved", False, True),
        ("masked", True, True),
    ):
        output = np.zeros(arrays["value"].shape, "float32")
        for b, h in np.ndindex(BATCH, HEADS):
            output[b, h] = one_head(
                *(x[b, h] for x in tokens),
                arrays["mask"][b] if masked else None,
                arrays["kernel"][:, h, 0] if convolved else None,
            )
        arrays[name] = output
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(OUTPUT, **arrays)


if __name__ == "__main__":
    main()
