"""Prints the tables of docs/scale.md: what models need on a device, by arithmetic.

Usage: python tools/scale_table.py [--write]

`tests/scale_table_test.py` compares the formulas with models that are small.
"""

import argparse
import dataclasses
import pathlib

PAGE = pathlib.Path(__file__).parents[1] / "docs/scale.md"
TOKENS = (8192, 65536, 1048576)
DEVICES = (1, 8)
GIB = 2**30
DEVICE_BYTES = 80 * GIB
BFLOAT16, FLOAT32 = 2, 4
# A weight, its gradient, and two averages of Adam, all in float32.
STATE = 4 * FLOAT32


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a language model as keras_hub's Llama has them.

    Args:
        layers: number of blocks.
        dim: size of a token's vector.
        heads: number of query heads.
        key_heads: number of key heads.
        head_dim: size of a head.
        inner_dim: inner size of a feed-forward part, which has three matrices.
        vocabulary: number of tokens.
        is_tied: whether input and output share the embeddings.
    """

    layers: int
    dim: int
    heads: int
    key_heads: int
    head_dim: int
    inner_dim: int
    vocabulary: int
    is_tied: bool = True

    @property
    def weights(self):
        """Number of weights."""
        attention = 2 * self.dim * self.head_dim * (self.heads + self.key_heads)
        block = attention + 3 * self.dim * self.inner_dim + 2 * self.dim
        embeddings = self.vocabulary * self.dim * (1 if self.is_tied else 2)
        return self.layers * block + embeddings + self.dim


@dataclasses.dataclass(frozen=True)
class Heads:
    """Sizes of sparse heads.

    Args:
        clusters: number of clusters of each key head.
        window: keys of clusters that a query sees.
        members: pairs that a cache holds of each cluster; 0 for `window`.
        recent: nearest tokens that a query sees; 0 for none.
        sinks: first tokens that all see.
        block: number of recent tokens that end to be near at once.
    """

    clusters: int
    window: int
    members: int = 0
    recent: int = 0
    sinks: int = 0
    block: int = 0


MODELS = {
    "SmolLM2-135M": Model(30, 576, 9, 3, 64, 1536, 49152),
    "Llama 3.2 1B": Model(16, 2048, 32, 8, 64, 8192, 128256),
    "Llama 3.2 3B": Model(28, 3072, 24, 8, 128, 8192, 128256),
    "Llama 3.1 8B": Model(32, 4096, 32, 8, 128, 14336, 128256, False),
}
# Those of `retrofit.sparsify`; and as many keys in routed heads.
MULTIPOLE = Heads(64, 256, members=128, recent=256, sinks=4, block=64)
TOKEN_CHOICE = Heads(64, 512)
KINDS = {"full": None, "token choice": TOKEN_CHOICE, "multipole": MULTIPOLE}


def cache_bytes(model, heads, tokens, bytes_per_number=BFLOAT16):
    """Returns the bytes of the caches of one sequence; `heads` None for full ones.

    A pair is a key and a value, and two numbers that say whether it is there and which
    token it is of.
    """
    pairs, sums = tokens, 0
    if heads is not None:
        pairs = heads.clusters * (heads.members or heads.window)
    if heads is not None and heads.recent:
        pairs += heads.sinks + heads.recent + heads.block - 1
        sums = 2 * heads.clusters * model.head_dim  # of keys and values, in float32
    pair = bytes_per_number * (2 * model.head_dim + 2)
    return model.layers * model.key_heads * (pairs * pair + FLOAT32 * sums)


def layer_bytes(model, heads, tokens):
    """Returns the bytes that gradients of one layer of attention need, in float32.

    Of full heads the weights of pairs, without most of what is later than its query. Of
    token choice those of each chunk and the keys that it reads, and these keys and
    values. Of multipole heads what `MULTIPOLE` keeps of a token. There is about as much
    again while the gradients are computed.
    """
    if heads is None:
        numbers = 5 * tokens**2 // 8
    elif heads.recent:
        numbers = tokens * (7300 + 113 * model.head_dim)
    else:
        chunk = -(-heads.window // 4)
        read = (tokens + heads.clusters * chunk) * (heads.window + chunk)
        numbers = read + read * 2 * model.head_dim // chunk
    return FLOAT32 * model.heads * numbers


def input_bytes(model, tokens):
    """Returns the bytes of the inputs of all blocks, which `remat` keeps."""
    return BFLOAT16 * model.layers * tokens * model.dim


def logit_bytes(model, tokens):
    """Returns the bytes of the logits and their gradients."""
    return 2 * FLOAT32 * tokens * model.vocabulary


def training_bytes(model, heads, tokens, devices=1):
    """Returns the bytes of a device that trains on one sequence at least.

    `ModelParallel` splits weights and heads; inputs of blocks and logits are on all.
    """
    split = STATE * model.weights + 2 * layer_bytes(model, heads, tokens)
    return split // devices + input_bytes(model, tokens) + logit_bytes(model, tokens)


def longest(model, heads, devices):
    """Returns the longest sequence that `DEVICE_BYTES` may hold, a power of two."""
    tokens = 1024
    if training_bytes(model, heads, tokens, devices) > DEVICE_BYTES:
        return 0
    while training_bytes(model, heads, 2 * tokens, devices) <= DEVICE_BYTES:
        tokens *= 2
    return tokens


def shown(number):
    """Returns bytes in words."""
    gibibytes = number / GIB
    return f"{gibibytes:,.0f} GiB" if gibibytes >= 10 else f"{gibibytes:.2f} GiB"


def table(heads, rows):
    """Returns a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def tables():
    """Returns the tables of the page by their names."""
    sizes, caches, parts, lengths = [], [], [], []
    for name, model in MODELS.items():
        state = [BFLOAT16 * model.weights, STATE * model.weights]
        sizes.append([name, f"{model.weights:,}", *map(shown, state)])
        full = [shown(cache_bytes(model, None, n)) for n in TOKENS]
        others = [shown(cache_bytes(model, x, 0)) for x in (TOKEN_CHOICE, MULTIPOLE)]
        caches.append([name, *full, *others])
        for n in TOKENS:
            each = [shown(layer_bytes(model, heads, n)) for heads in KINDS.values()]
            common = shown(input_bytes(model, n)), shown(logit_bytes(model, n))
            parts.append([name, f"{n:,}", *each, *common])
        cells = [
            f"{longest(model, heads, devices):,}"
            for heads in KINDS.values()
            for devices in DEVICES
        ]
        lengths.append([name, *(cell if cell != "0" else "-" for cell in cells)])
    tokens = [f"full, {n:,} tokens" for n in TOKENS]
    columns = [f"{kind}, {n} device{'s' * (n > 1)}" for kind in KINDS for n in DEVICES]
    layers = [f"{kind}, one layer" for kind in KINDS]
    return {
        "weights": table(["model", "weights", "bfloat16", "training"], sizes),
        "caches": table(["model", *tokens, "token choice", "multipole"], caches),
        "parts": table(
            ["model", "tokens", *layers, "inputs of blocks", "logits"], parts
        ),
        "longest": table(["model", *columns], lengths),
    }


def renewed(page):
    """Returns the text of the page with the tables of today."""
    for name, lines in tables().items():
        before, start, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        page = f"{before}{start}{lines}\n{end}{after}"
    return page


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="renew the page itself")
    if parser.parse_args().write:
        PAGE.write_text(renewed(PAGE.read_text()))
    else:
        print("\n\n".join(tables().values()))


if __name__ == "__main__":
    main()
