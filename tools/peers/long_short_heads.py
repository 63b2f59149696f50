"""Writes what other implementations of long-short attention return, for the tests.

    pip install --no-deps --target PEERS long-short-transformer==0.0.5 \
        rotary-embedding-torch einops
    git clone https://github.com/NVIDIA/transformer-ls SOURCE
    PYTHONPATH=PEERS python tools/peers/long_short_heads.py SOURCE

Needs PyTorch. Neither implementation gets positions: one is told that they are all
zero, the other one that embeddings are.
"""

import importlib.util
import pathlib
import sys
import types

import numpy as np
import torch
from long_short_transformer import LongShortAttention

OUTPUT = pathlib.Path(__file__).parents[2] / "tests/golden/peers/long_short.npz"
DIM, LENGTH, SEGMENT, LANDMARKS, BATCH = 12, 20, 4, 2, 2
# Of the paper's code.
HEADS, WINDOW, SEGMENTS_BEFORE = 3, 5, 2


class LayerNorm(torch.nn.LayerNorm):
    """In place of that of fairseq."""

    def __init__(self, dim, export=False):
        super().__init__(dim)


def code_of_the_paper(source):
    """Imports the module of the layer."""
    fairseq = types.ModuleType("fairseq.modules.layer_norm")
    fairseq.LayerNorm = LayerNorm
    for name in ("fairseq", "fairseq.modules"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["fairseq.modules.layer_norm"] = fairseq
    path = pathlib.Path(source) / "autoregressive/model_lib/layer.py"
    spec = importlib.util.spec_from_file_location("layer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ChunkedLSAttention


def exact(layer):
    """Fills the weights with numbers that float32 has; returns them by name."""
    weights = {}
    for name, weight in layer.named_parameters():
        weight.normal_().mul_(0.5).copy_(weight.float())
        weights[name] = weight
    return weights


def of_the_package(arrays):
    """The whole sequence is in the window; one head, as each has its own norm."""
    for causal in (False, True):
        layer = LongShortAttention(
            dim=DIM,
            heads=1,
            dim_head=DIM,
            causal=causal,
            window_size=LENGTH,
            segment_size=SEGMENT,
            r=1 if causal else LANDMARKS,  # it fails with more
            pos_emb=lambda places, cache_key: torch.zeros(len(places), DIM),
        ).double()
        name = "causal" if causal else "full"
        for key, weight in exact(layer).items():
            arrays[f"{name}/{key}"] = weight
        x = torch.randn(BATCH, LENGTH, DIM).double()
        arrays[f"{name}/input"] = x
        arrays[f"{name}/output"] = layer(x.float().double())


def of_the_paper(source, arrays):
    """Queries whose windows do not reach the tokens in a cache, which there must be.

    Landmarks of those tokens are hidden: they are made in another way, of parts of the
    features in place of keys and values of a head.
    """
    layer = code_of_the_paper(source)(
        DIM, HEADS, SEGMENT, LANDMARKS, WINDOW, dropout=0.0
    ).double()
    weights = exact(layer)
    # Scores read keys there, as projected here.
    reads = torch.randn(DIM // HEADS, HEADS, LANDMARKS).double().float().double()
    keys = weights["proj_key.weight"].reshape(HEADS, DIM // HEADS, DIM)
    scores = torch.einsum("hkd,khr->hrd", keys, reads)
    weights["dconv_1.weight"].copy_(scores.reshape(-1, DIM))
    for name in ("dconv_1.bias", "r_r_bias", "r_w_bias", "r_net_chunk.bias"):
        weights[name].zero_()
    length = LENGTH + SEGMENTS_BEFORE * SEGMENT
    segments = length // SEGMENT
    x = torch.randn(BATCH, length, DIM).double()
    before, after = x.float().double().split([length - LENGTH, LENGTH], dim=1)
    own = torch.arange(LENGTH // SEGMENT)[:, None] + SEGMENTS_BEFORE
    segment = torch.arange(segments).repeat_interleave(LANDMARKS)
    hidden = (segment >= own) | (segment < SEGMENTS_BEFORE)
    output = layer(
        after,
        before,
        torch.zeros(1, segments * LANDMARKS, DIM).double(),
        torch.zeros(1, WINDOW, DIM).double(),
        hidden[None, None, :, None],
    )
    for key, weight in weights.items():
        if key.startswith(("proj", "dual")):
            arrays[f"paper/{key}"] = weight
    arrays |= {"paper/reads": reads, "paper/input": after}
    arrays["paper/output"] = output[:, WINDOW - 1 :]


def main():
    torch.manual_seed(4)
    arrays = {}
    with torch.no_grad():
        of_the_package(arrays)
        of_the_paper(sys.argv[1], arrays)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        OUTPUT,
        **{name: x.detach().numpy().astype("float32") for name, x in arrays.items()},
    )


if __name__ == "__main__":
    main()
