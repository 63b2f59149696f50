"""Files of `model.export`, in the runtime of each format, against the layers."""

import functools
import importlib.util
import pathlib

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import models
from routing_tf import zoo
from tests.layers import kinds
from tools import export_formats

PAGE = pathlib.Path(__file__).parents[1] / "docs/decoding_and_serving.md"
MODULES = {"onnx": "onnxruntime", "openvino": "openvino", "litert": "ai_edge_litert"}
LENGTH, DIM = 24, 16
FEED_FORWARDS = (
    functools.partial(zoo.ProductKeyMemory, num_keys=8, key_dim=8, top_k=4),
    functools.partial(zoo.MixtureOfExperts, 4, 32, capacity=LENGTH),
    functools.partial(zoo.SparseFeedForward, 32),
)
on_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="Keras has most formats there"
)


def documented():
    """Returns the table of the page, cells by row and format."""
    text = PAGE.read_text().partition("<!-- export formats -->\n")[2]
    lines = text.partition("<!-- end of export formats -->")[0].splitlines()
    head, _, *rows = ([x.strip() for x in line.strip("|").split("|")] for line in lines)
    names = [name.strip("`") for name in head[1:]]
    return {row: dict(zip(names, cells, strict=True)) for row, *cells in rows}


@on_tensorflow
def test_the_table_has_all_groups_and_formats():
    table = documented()
    assert list(table) == list(export_formats.groups())
    assert all(list(cells) == list(export_formats.FORMATS) for cells in table.values())
    made = {type(make()) for make in export_formats.groups().values()}
    assert made == set(kinds.exported().values())


@pytest.mark.parametrize("name", ["openvino", "litert"])
def test_formats_without_loops_are_refused(name, tmp_path):
    lm = models.RoutingTransformerCausalLM.from_preset(
        "byte_tiny", num_cluster_strided_heads=2, key_dim=8
    )
    for model in (lm, lm.backbone):
        with pytest.raises(ValueError, match=f"{name}.*ClusterStridedHeads.*onnx"):
            model.export(tmp_path / "x", format=name)


@on_tensorflow
@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_token_choice_with_padding(name, tmp_path):
    needs(name)
    length = None if name == "openvino" else LENGTH
    x = keras.Input((length, DIM), name="x")
    mask = keras.Input((length,), dtype="bool", name="mask")
    attention = layers.RoutingAttention(
        4, 8, 3, 5, num_local_heads=2, key_shift=1, max_relative_position=4
    )
    model = keras.Model([x, mask], attention(x, query_mask=mask, use_causal_mask=True))
    for weight in model.weights:
        if "embeddings" in weight.path:
            weight.assign(keras.random.normal(weight.shape))
    values = np.random.default_rng(0).normal(size=(2, LENGTH, DIM)).astype("float32")
    real = np.arange(LENGTH) < np.array([[LENGTH], [15]])
    path = export_formats.place(tmp_path, "token choice", name)
    export_formats.write(model, name, path, [values, real])
    assert export_formats.run_in_process(name, path) is None


@on_tensorflow
@pytest.mark.slow
def test_onnx_takes_any_length(tmp_path):
    needs("onnx")
    x, value = (keras.Input((None, DIM), name=name) for name in ("x", "value"))
    mask = keras.Input((None,), dtype="bool", name="mask")
    own = layers.MixedAttention([zoo.BlockPairHeads(2, 3), layers.FullHeads(2)], 4)
    other = layers.MixedAttention([layers.LocalHeads(2, (4,))], 4)
    model = keras.Model([x, value, mask], other(own(x), value, value_mask=mask))
    random = np.random.default_rng(0)
    sizes = (2, LENGTH - 1, DIM), (2, LENGTH - 6, DIM)
    values = [random.normal(size=size).astype("float32") for size in sizes]
    values.append(np.arange(LENGTH - 6) < np.array([[LENGTH - 6], [9]]))
    path = export_formats.place(tmp_path, "any length", "onnx")
    export_formats.write(model, "onnx", path, values)
    assert export_formats.run_in_process("onnx", path) is None


@on_tensorflow
@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_feed_forward_layers(name, tmp_path):
    needs(name)
    x = y = keras.Input((LENGTH, DIM), name="x")
    keras.utils.set_random_seed(0)
    for make in FEED_FORWARDS:
        y = y + make()(y)
    model = keras.Model(x, y)
    values = np.random.default_rng(0).normal(size=(2, LENGTH, DIM)).astype("float32")
    path = export_formats.place(tmp_path, "feed forward", name)
    export_formats.write(model, name, path, [values])
    assert export_formats.run_in_process(name, path) is None


@on_tensorflow
@pytest.mark.slow
def test_the_table_tells_the_truth():
    """As `tools.export_formats` finds it, of which this is one row in one format."""
    needs("onnx")
    row, name = "IndexedHeads", "onnx"
    found = export_formats.results([name], [row])
    assert documented()[row][name] == ("no" if found[row][name] else "yes")


def needs(name):
    """Skips a test without the runtime, which TensorFlow must not meet in a process."""
    if name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
        pytest.skip("needs the extra `export`")
