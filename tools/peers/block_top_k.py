"""Writes what MoBA's own reference computes to `tests/golden/peers/block_top_k.npz`.

    python tools/peers/block_top_k.py MOBA/moba/moba_naive.py

Needs torch, and the file of https://github.com/MoonshotAI/MoBA.
"""

import importlib.util
import pathlib
import sys

import numpy as np
import torch

ROOT = pathlib.Path(__file__).parents[2]
LENGTHS, HEADS, DIM, BLOCK, NUMBER = (37, 24), 2, 8, 5, 3


def main(path):
    """Calls the reference in the file `path` and writes what went in and came out."""
    spec = importlib.util.spec_from_file_location("moba_naive", path)
    moba_naive = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(moba_naive)
    random = np.random.default_rng(0)
    shape = (3, sum(LENGTHS), HEADS, DIM)
    query, key, value = random.normal(size=shape).astype("float32")
    output = moba_naive.moba_attn_varlen_naive(
        *(torch.from_numpy(x) for x in (query, key, value)),
        cu_seqlens=torch.tensor(np.cumsum([0, *LENGTHS])),
        max_seqlen=max(LENGTHS),
        moba_chunk_size=BLOCK,
        moba_topk=NUMBER,
    )
    np.savez_compressed(
        ROOT / "tests/golden/peers/block_top_k.npz",
        query=query,
        key=key,
        value=value,
        output=output.numpy(),
        lengths=LENGTHS,
        block_length=BLOCK,
        num_blocks=NUMBER,
    )


if __name__ == "__main__":
    main(sys.argv[1])
