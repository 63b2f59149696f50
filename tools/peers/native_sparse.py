"""Writes what others compute to `tests/golden/peers/native_sparse.npz`.

    PYTHONPATH=PEERS python tools/peers/native_sparse.py FLA/ops/nsa/naive.py

Needs torch, in PEERS einops and native-sparse-attention-pytorch 0.2.3 with what it
needs, and the file of fla-core 0.6.0. The networks and their places in a block are
those of the former, the compressed and the selected branch and the choice of blocks
those of the latter, where all blocks have one length. The window is torch's own
attention; the sum of the branches is equation 5.
"""

import importlib.util
import pathlib
import sys
import types

import numpy as np
import torch
from native_sparse_attention_pytorch import SparseAttention

ROOT = pathlib.Path(__file__).parents[2]
BATCH, LENGTH, HEADS, DIM, FEATURES = 2, 37, 2, 6, 10
BLOCK, NUMBER, WINDOW = 4, 5, 7


def naive(path):
    """Imports the file, which needs of its package what is not called here."""
    package, utils, pooling = (types.ModuleType(n) for n in ("a", "b", "c"))
    utils.prepare_chunk_offsets = pooling.mean_pooling = None
    names = ("fla.ops", "fla.ops.utils", "fla.ops.utils.pooling")
    sys.modules.update(zip(names, (package, utils, pooling), strict=True))
    spec = importlib.util.spec_from_file_location("naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def main(path):
    """Writes weights, inputs and outputs."""
    torch.manual_seed(0)
    code = naive(path)
    layer = SparseAttention(
        dim=FEATURES,
        dim_head=DIM,
        heads=HEADS,
        sliding_window_size=WINDOW,
        compress_block_size=BLOCK,
        compress_block_sliding_stride=BLOCK,
        selection_block_size=BLOCK,
        num_selected_blocks=NUMBER,
        causal=True,
    )
    for places in (layer.k_intrablock_positions, layer.v_intrablock_positions):
        places.normal_()
    gates = layer.to_strategy_combine[0]
    gates.weight.normal_()
    features = torch.randn(BATCH, LENGTH, FEATURES)
    query, key, value = (torch.randn(BATCH, LENGTH, HEADS, DIM) for _ in range(3))

    def compressed(x, places, network):
        x = x.transpose(1, 2)[:, :, : LENGTH // BLOCK * BLOCK]
        x = layer.split_compress_window(x) + places[:, None]
        return network(x).transpose(1, 2)

    summary_key = compressed(key, layer.k_intrablock_positions, layer.k_compress)
    summary_value = compressed(value, layer.v_intrablock_positions, layer.v_compress)
    scale = DIM**-0.5
    coarse, _ = code.naive_nsa_compression(
        query, summary_key, summary_value, BLOCK, scale
    )
    # The last block is not full: its summary is seen by no query, but it is forced.
    padded = torch.cat([summary_key, torch.zeros_like(summary_key[:, :1])], dim=1)
    chosen = code.naive_nsa_topk(query, padded, NUMBER, BLOCK, scale)
    fine = code.naive_nsa_selection(query, key, value, chosen, BLOCK, scale)
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    near = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        attn_mask=(back >= 0) & (back < WINDOW),
    ).transpose(1, 2)
    weights = layer.to_strategy_combine(features).transpose(1, 2)
    outputs = torch.stack([coarse, fine, near], dim=-1)
    output = (weights[..., None, :] * outputs).sum(dim=-1)
    arrays = {
        "features": features,
        "query": query,
        "key": key,
        "value": value,
        "output": output,
        "gate_kernel": gates.weight.T,
        "gate_bias": gates.bias,
    }
    for name, places, network in (
        ("key", layer.k_intrablock_positions, layer.k_compress),
        ("value", layer.v_intrablock_positions, layer.v_compress),
    ):
        arrays |= {
            f"{name}/places": places[:, None],
            f"{name}/hidden_kernel": network[1].weight.T,
            f"{name}/hidden_bias": network[1].bias,
            f"{name}/output_kernel": network[3].weight.T,
            f"{name}/output_bias": network[3].bias,
        }
    np.savez_compressed(
        ROOT / "tests/golden/peers/native_sparse.npz",
        block_length=BLOCK,
        num_blocks=NUMBER,
        attention_window=WINDOW,
        **{name: x.numpy() for name, x in arrays.items()},
    )


if __name__ == "__main__":
    main(sys.argv[1])
