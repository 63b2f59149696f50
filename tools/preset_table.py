"""Prints the tables of presets of docs/presets.md, or every variable of every preset.

Usage: python tools/preset_table.py [--variables] [--output=FILE]
Models are built at full size without memory for their weights.
"""

import argparse
import contextlib
import json
import math
import pathlib
import re

import keras

from routing_tf import models
from routing_tf.settings.presets import RELEASE_SETS

TITLES = {
    "text": "Decoders of text",
    "seq2seq": "Encoders with decoders of text",
    "image": "Models of images",
}
LENGTHS = {"text": "length", "seq2seq": "input, output", "image": "image"}
_HEADS = {
    "num_local_heads": "local",
    "num_routed_heads": "routed",
    "num_cluster_strided_heads": "cluster-strided",
    "num_strided_heads": "strided",
    "num_factorized_heads": "factorized",
}
_LAYER = re.compile(r"(.*?(?:block|layer)_)(\d+)(/.*)")
_RANGE = re.compile(r"(.*?_)\[(.*)\](/.*)")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--variables",
        action="store_true",
        help="print names and shapes of all variables as JSON, not the tables",
    )
    parser.add_argument("--output", help="file to write instead of standard output")
    flags = parser.parse_args()
    if flags.variables:
        text = to_json({name: variables(name) for name in models.preset_names()})
    else:
        text = tables()
    if flags.output:
        pathlib.Path(flags.output).write_text(text)
    else:
        print(text, end="")


@contextlib.contextmanager
def shapes_alone():
    """A scope in which models take no memory: their variables have shapes alone."""
    with keras.StatelessScope(initialize_variables=False):
        yield
    # Keras would give them values when the next variables get theirs.
    keras.utils.clear_session(free_memory=False)


def build(name):
    """Returns the whole model of a preset; its variables have shapes alone."""
    h = models.preset_hyperparameters(name)
    with shapes_alone():
        if h.kind == "image":
            return models.RoutingImageTransformer(h)
        if h.kind == "seq2seq":
            backbone = models.RoutingTransformerEncoderDecoder(h)
            return models.RoutingTransformerSeq2SeqLM(backbone, compile=False)
        backbone = models.RoutingTransformer(h)
        return models.RoutingTransformerCausalLM(backbone, compile=False)


def tables(count=None):
    """Returns the tables of all kinds of models as Markdown.

    Args:
        count: function from the name of a preset to its number of trainable weights;
            None (the default) builds the models.
    """
    count = count or count_weights
    return "\n".join(_table(kind, count) for kind in TITLES)


def count_weights(name):
    """Returns the number of trainable weights of a preset."""
    return sum(math.prod(weight.shape) for weight in build(name).trainable_weights)


def variables(name):
    """Returns names and shapes of a preset's variables.

    Args:
        name: name of a preset.

    Returns:
        Dict with an entry `"keras"` by the paths of Keras and, for the sets of the
        release, `"release"` by its names. Each is a dict of `"weights"`, which are
        trained, and `"state"`, which is not; both are dicts of names and shapes, with
        the numbers of equal layers as ranges, such as `block_[0-3,5]/...`.
    """
    model = build(name)
    by_path = [v for v in model.variables if "seed_generator" not in v.path]
    found = {"keras": _by_name((v.path, v) for v in by_path)}
    if name in RELEASE_SETS:
        named = models.release.variables_by_name(model)
        found["release"] = _by_name(named.items())
    return found


def to_json(table):
    """Returns the variables of all presets as JSON, one variable a line."""
    text = json.dumps(table, indent=1, sort_keys=True)
    text = re.sub(r"\[\s+([\d,\s]*?)\s+\]", _on_one_line, text)
    return text + "\n"


def collapse(shapes):
    """Returns names and shapes with equal layers as one, such as `block_[0-3]/...`."""
    layers = {}
    collapsed = {}
    for name, shape in shapes.items():
        match = _LAYER.fullmatch(name)
        if match:
            key = (match[1], match[3], tuple(shape))
            layers.setdefault(key, []).append(int(match[2]))
        else:
            collapsed[name] = shape
    for (before, after, shape), numbers in layers.items():
        collapsed[f"{before}[{_ranges(numbers)}]{after}"] = list(shape)
    return collapsed


def expand(shapes):
    """Returns names and shapes with one entry for each layer: undoes `collapse`."""
    expanded = {}
    for name, shape in shapes.items():
        match = _RANGE.fullmatch(name)
        numbers = _numbers(match[2]) if match else [None]
        for number in numbers:
            one = f"{match[1]}{number}{match[3]}" if match else name
            expanded[one] = shape
    return expanded


def _by_name(pairs):
    kinds = {"weights": {}, "state": {}}
    for name, variable in pairs:
        shapes = kinds["weights" if variable.trainable else "state"]
        if name in shapes:
            raise ValueError(f"Two variables have one name. Received: {name!r}")
        shapes[name] = list(variable.shape)
    return {kind: collapse(shapes) for kind, shapes in kinds.items()}


def _ranges(numbers):
    """Writes ascending numbers as ranges, such as `0-3,5`."""
    runs = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)


def _numbers(ranges):
    numbers = []
    for run in ranges.split(","):
        first, _, last = run.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _on_one_line(match):
    return f"[{', '.join(match[1].replace(',', ' ').split())}]"


def _table(kind, count):
    columns = (
        "preset",
        "layers",
        "width / feed-forward",
        "heads",
        "clusters x window",
        "block",
        LENGTHS[kind],
        "weights",
    )
    rows = [(*_cells(name), f"{count(name):,}") for name in models.preset_names(kind)]
    lines = [columns, ["---"] * len(columns), *rows]
    return f"{TITLES[kind]}:\n\n" + "".join(
        f"| {' | '.join(line)} |\n" for line in lines
    )


def _cells(name):
    h = models.preset_hyperparameters(name)
    heads = " + ".join(
        f"{getattr(h, field)} {kind}"
        for field, kind in _HEADS.items()
        if getattr(h, field)
    )
    clustered = h.num_routed_heads + h.num_cluster_strided_heads
    clusters = f"{h.num_clusters} x {h.attention_window}" if clustered else "none"
    if clustered and h.routing == "hashed":
        heads = heads.replace("routed", "hashed")
    if clustered and h.num_local_only_layers:
        stacks = [n for n in (h.num_encoder_layers, h.num_layers) if n]
        last = [f"{n - h.num_local_only_layers}" for n in stacks]
        heads += f" in the last {' + '.join(last)}"
    layers = f"{h.num_layers}"
    length = f"{h.max_sequence_length}"
    if h.kind == "seq2seq":
        layers = f"{h.num_encoder_layers} + {layers}"
        length = f"{h.max_input_length}, {length}"
    if h.kind == "image":
        length = f"{h.image_height} x {h.image_width} x {h.num_channels}"
    return (
        f"`{name}`",
        layers,
        f"{h.hidden_dim} / {h.intermediate_dim} ({h.feed_forward})",
        heads,
        clusters,
        " x ".join(map(str, h.local_block_shape)),
        length,
    )


if __name__ == "__main__":
    main()
