"""Writes what entmax 1.3 computes to `tests/golden/peers/entmax.npz`.

    PYTHONPATH=PEERS python tools/peers/entmax_weights.py

Needs torch, and entmax in PEERS.
"""

import pathlib

import numpy as np
import torch
from entmax import entmax15
from entmax import entmax_bisect
from entmax import sparsemax

ROOT = pathlib.Path(__file__).parents[2]
ALPHAS = (1.05, 1.3, 1.5, 1.8, 2.0)


def main():
    """Writes logits, weights and gradients, in float64 for what is iterated."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(6, 11))
    logits *= np.array([0.01, 0.5, 1.0, 3.0, 30.0, 1.0])[:, None]
    logits[5, 4:] = -1e4
    upstream = random.normal(size=logits.shape)
    arrays = {"logits": logits, "upstream": upstream, "alphas": np.array(ALPHAS)}
    for number, value in enumerate(ALPHAS):
        x = torch.tensor(logits, requires_grad=True)
        alpha = torch.full((6, 1), value, dtype=torch.float64, requires_grad=True)
        weights = entmax_bisect(x, alpha)
        exact = {1.5: entmax15, 2.0: sparsemax}.get(value)
        if exact is not None:
            torch.testing.assert_close(exact(x, dim=-1), weights)
        (weights * torch.tensor(upstream)).sum().backward()
        arrays |= {
            f"{number}/weights": weights.detach().numpy(),
            f"{number}/by_logits": x.grad.numpy(),
            f"{number}/by_alpha": alpha.grad.numpy(),
        }
    np.savez_compressed(ROOT / "tests/golden/peers/entmax.npz", **arrays)


if __name__ == "__main__":
    main()
