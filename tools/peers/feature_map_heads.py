"""Writes what other implementations of linear attention return, for the tests.

    pip install --no-deps --target PEERS performer-pytorch==1.1.4 einops==0.8.2
    pip download --no-deps --no-binary :all: --no-build-isolation \
        pytorch-fast-transformers==0.4.0  # unpack it; nothing needs to be compiled
    PYTHONPATH=PEERS:pytorch-fast-transformers-0.4.0 \
        python tools/peers/feature_map_heads.py

Needs PyTorch. `performer-pytorch` imports `axial_positional_embedding` and
`local_attention`, of which nothing is used.
"""

import importlib
import pathlib
import sys
import types

import numpy as np
import torch

OUTPUT = pathlib.Path(__file__).parents[2] / "tests/golden/peers/feature_map.npz"
BATCH, HEADS, LENGTH, KEY_DIM, VALUE_DIM, VECTORS = 2, 2, 13, 5, 4, 48


def without_init(name):
    """Makes a package importable whose own code needs compiled parts."""
    parent, _, last = name.rpartition(".")
    package = types.ModuleType(name)
    package.__path__ = [f"{next(iter(sys.modules[parent].__path__))}/{last}"]
    sys.modules[name] = package


class Anything(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name):
        return None


def peers():
    for name in ("axial_positional_embedding", "local_attention"):
        sys.modules[name] = Anything(name)
    importlib.import_module("fast_transformers")
    without_init("fast_transformers.attention")
    names = (
        "performer_pytorch.performer_pytorch",
        "fast_transformers.attention.linear_attention",
        "fast_transformers.recurrent.attention.self_attention.linear_attention",
        "fast_transformers.feature_maps.fourier_features",
        "fast_transformers.masking",
    )
    return [importlib.import_module(name) for name in names]


def by_fast_transformers(feature_map, query, key, value):
    """Returns outputs without and with a causal mask; arrays are `[B, H, L, D]`."""
    _, linear, recurrent, _, masking = peers()
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    lengths = masking.LengthMask(torch.full((BATCH,), LENGTH))
    everything = masking.FullMask(LENGTH)
    make = {"query_dimensions": KEY_DIM, "feature_map": feature_map, "eps": 0.0}
    whole = linear.LinearAttention(**make).eval()
    outputs = [whole(query, key, value, everything, lengths, lengths)]
    steps, state, rows = recurrent.RecurrentLinearAttention(**make).eval(), None, []
    for i in range(LENGTH):
        row, state = steps(query[:, i], key[:, i], value[:, i], state)
        rows.append(row)
    outputs.append(torch.stack(rows, dim=1))
    return [x.transpose(1, 2) for x in outputs]


def main():
    random = np.random.default_rng(3)
    shapes = {"query": KEY_DIM, "key": KEY_DIM, "value": VALUE_DIM}
    arrays = {
        name: random.normal(size=(BATCH, HEADS, LENGTH, dim)).astype("float32")
        for name, dim in shapes.items()
    }
    arrays["vectors"] = random.normal(size=(VECTORS, KEY_DIM)).astype("float32")
    arrays["sigma"] = random.uniform(0.5, 1.2, size=KEY_DIM).astype("float32")
    tensors = {name: torch.tensor(x).double() for name, x in arrays.items()}
    tokens = [tensors[name] for name in ("query", "key", "value")]
    performer, _, _, fourier, _ = peers()
    results = {"elu": by_fast_transformers(None, *tokens)}
    features = [
        performer.softmax_kernel(
            x, projection_matrix=tensors["vectors"], is_query=is_query, eps=0.0
        )
        for x, is_query in zip(tokens, (True, False))
    ]
    results["positive"] = [
        performer.linear_attention(*features, tokens[-1]),
        performer.causal_linear_attention_noncuda(
            *features, tokens[-1], chunk_size=3, eps=0.0
        ),
    ]

    def fourier_map(dim):
        made = fourier.RandomFourierFeatures(
            dim, n_dims=2 * VECTORS, softmax_temp=1.0, deterministic_eval=True
        )
        made.omega = (tensors["vectors"] * tensors["sigma"]).T
        return made

    unit = [torch.nn.functional.normalize(x, dim=-1) for x in tokens[:2]]
    results["fourier"] = by_fast_transformers(fourier_map, *unit, tokens[-1])
    for name, outputs in results.items():
        for kind, output in zip(("full", "causal"), outputs):
            arrays[f"{name}/{kind}"] = output.numpy().astype("float32")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(OUTPUT, **arrays)


if __name__ == "__main__":
    main()
