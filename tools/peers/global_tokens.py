"""Writes what Longformer's attention in Hugging Face's transformers computes.

    pip install --no-deps --target PEERS transformers==5.23.0 huggingface_hub \
        tokenizers regex safetensors filelock packaging pyyaml tqdm requests httpx typer
    PYTHONPATH=PEERS python tools/peers/global_tokens.py

Needs PyTorch. Global tokens have the projections of all others.
"""

import pathlib

import numpy as np
import torch
from transformers import LongformerConfig
from transformers.models.longformer import modeling_longformer

FILE = pathlib.Path(__file__).parents[2] / "tests/golden/peers/global_tokens.npz"
HEADS, DIM, LENGTH, WINDOW = 2, 12, 16, 4
GLOBAL = (0, 9)


def main():
    torch.manual_seed(0)
    config = LongformerConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        attention_window=[WINDOW],
        attention_probs_dropout_prob=0.0,
    )
    layer = modeling_longformer.LongformerSelfAttention(config, layer_id=0).eval()
    arrays = {"global_positions": np.array(GLOBAL), "attention_window": WINDOW}
    for name in ("query", "key", "value"):
        local, of_global = getattr(layer, name), getattr(layer, f"{name}_global")
        torch.nn.init.normal_(local.weight, std=0.5)
        torch.nn.init.normal_(local.bias)
        of_global.load_state_dict(local.state_dict())
        arrays[f"{name}_kernel"] = local.weight.detach().numpy().T
        arrays[f"{name}_bias"] = local.bias.detach().numpy()
    x = torch.randn(2, LENGTH, DIM)
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[0, 13:] = False
    is_global = torch.zeros_like(real)
    is_global[:, list(GLOBAL)] = True
    arrays["x"], arrays["mask"] = x.numpy(), real.numpy()
    for name, chosen in (("global", is_global), ("window", is_global & False)):
        signs = torch.where(chosen, 10000.0, 0.0).masked_fill(~real, -10000.0)
        with torch.no_grad():
            output = layer(x, signs, ~real, chosen, bool(chosen.any()))[0]
        arrays[f"output_{name}"] = output.numpy()
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
