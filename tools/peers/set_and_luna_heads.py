"""Writes what the authors' code of Set Transformer and Luna returns, for the tests.

    git clone https://github.com/juho-lee/set_transformer SET
    git clone https://github.com/XuezheMax/fairseq-apollo LUNA
    python tools/peers/set_and_luna_heads.py SET LUNA

Needs PyTorch.
"""

import importlib.util
import pathlib
import sys
import types

import numpy as np
import torch

FOLDER = pathlib.Path(__file__).parents[2] / "tests/golden/peers"
BATCH, LENGTH, DIM, HEADS, POINTS = 2, 11, 12, 3, 4
NAMES = ("fc_q", "fc_k", "fc_v", "fc_o")


def imported(path):
    """Imports a module by its path."""
    spec = importlib.util.spec_from_file_location("peer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of_luna(source):
    """Imports the module of the layers; of fairseq it needs little."""
    fairseq = types.ModuleType("fairseq")
    fairseq.utils = types.ModuleType("fairseq.utils")
    fairseq.utils.softmax = lambda x, dim, onnx_trace: torch.softmax(x, dim)

    def module(name, **names):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(names)

    class Dropout(torch.nn.Identity):
        def __init__(self, *_, **__):
            super().__init__()

    sys.modules["fairseq"], sys.modules["fairseq.utils"] = fairseq, fairseq.utils
    module("fairseq.modules")
    module(
        "fairseq.incremental_decoding_utils", with_incremental_state=lambda kind: kind
    )
    module("fairseq.modules.fairseq_dropout", FairseqDropout=Dropout)
    module("fairseq.modules.quant_noise", quant_noise=lambda layer, *_: layer)
    return imported(pathlib.Path(source) / "fairseq/modules/luna_attention.py")


def rounded(*shape):
    """Returns random numbers that float32 has."""
    return torch.randn(*shape).double().float().double() / 2


def fill(layer):
    for weight in layer.parameters():
        weight.copy_(rounded(*weight.shape))


def set_transformer(source):
    """The attention in the second part of a block: without its residual and output."""
    modules, arrays = imported(pathlib.Path(source) / "modules.py"), {}
    x = arrays["input"] = rounded(BATCH, LENGTH, DIM)
    for norm in (False, True):
        block = modules.ISAB(DIM, DIM, HEADS, POINTS, ln=norm).double()
        fill(block)
        name = "norm" if norm else "plain"
        arrays[f"{name}/points"] = block.I[0]
        for part in ("mab0", "mab1"):
            for key, weight in getattr(block, part).named_parameters():
                arrays[f"{name}/{part}.{key}"] = weight
        outer = block.mab1
        found = block.mab0(block.I.repeat(BATCH, 1, 1), x)
        query, key, value = (
            torch.stack(linear(y).split(DIM // HEADS, 2), 1)
            for linear, y in ((outer.fc_q, x), (outer.fc_k, found), (outer.fc_v, found))
        )
        weights = torch.softmax(query @ key.transpose(2, 3) / DIM**0.5, -1)
        output = (weights @ value).transpose(1, 2).reshape(BATCH, LENGTH, DIM)
        arrays[f"{name}/output"] = output
    return arrays


def luna(source):
    """With the same keys for packing and unpacking, and no projection of its own."""
    module, arrays = code_of_luna(source), {}
    x = arrays["input"] = rounded(BATCH, LENGTH, DIM)
    packing = arrays["packing"] = rounded(POINTS, DIM)
    packing = packing[:, None].repeat(1, BATCH, 1)
    query, key, value = (rounded(DIM, DIM) for _ in range(3))
    arrays |= {"query": query, "key": key, "value": value}
    causal = module.LunarCausalAttention(DIM, HEADS, bias=False, tie_kv=False).double()
    for layer, weight in (
        (causal.pq_proj, torch.eye(DIM)),
        (causal.q_proj, query),
        (causal.pc_proj, key),
        (causal.k_proj, key),
        (causal.v_proj, value),
        (causal.out_proj, torch.eye(DIM)),
    ):
        layer.weight.copy_(weight)
    arrays["causal"] = causal(x.transpose(0, 1), packing)[0].transpose(0, 1)
    # With one head none are mixed. Keys of packed tokens are projected from values.
    full = module.LunarMultiheadAttention(
        DIM, 1, 1, bias=False, self_attention=True, tie_kv=False
    ).double()
    inverse = torch.linalg.inv(value)
    for layer, weight in (
        (full.pq_proj, torch.eye(DIM)),
        (full.q_proj, query),
        (full.pk_proj, key),
        (full.pv_proj, value),
        (full.k_proj, key @ inverse),
        (full.v_proj, torch.eye(DIM)),
        (full.out_proj, torch.eye(DIM)),
    ):
        layer.weight.copy_(weight)
    output = full(x.transpose(0, 1), packing, context=None)[0]
    arrays["full"] = output.transpose(0, 1)
    return arrays


def main():
    torch.manual_seed(4)
    for name, make, source in (
        ("induced", set_transformer, sys.argv[1]),
        ("luna", luna, sys.argv[2]),
    ):
        with torch.no_grad():
            arrays = make(source)
        np.savez_compressed(
            FOLDER / f"{name}.npz",
            **{key: x.detach().numpy().astype("float32") for key, x in arrays.items()},
        )


if __name__ == "__main__":
    main()
