"""Models whose weights are split over several devices."""

import os

import keras
import pytest

from routing_tf import models
from tests import command_line
from tests.models import small_models

# Four devices need a process of their own, whatever the backend of the tests is.
SPLIT = """
import keras, numpy as np
from routing_tf import models
from tests.models import small_models

devices = keras.distribution.list_devices("cpu")
assert len(devices) == 4
mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), devices)
layout_map = models.RoutingTransformer.get_layout_map(mesh)

def language_model():
    lm = small_models.language_model(
        num_layers=1,
        routing="token_choice",
        routed_key_shift=1,
        use_gate=True,
        attention_bias=True,
    )
    lm.compile("sgd", "sparse_categorical_crossentropy", sampler="greedy")
    return lm

ids = np.random.default_rng(0).integers(1, 31, (4, 24))
inputs = {"token_ids": ids, "padding_mask": np.arange(24) < [[24], [20], [9], [24]]}
prompts = {"token_ids": ids, "padding_mask": np.arange(24) < [[8], [20], [9], [12]]}

def outputs(lm):
    logits = lm.predict(inputs, verbose=0)
    texts = lm.generate(prompts, stop_token_ids=None)["token_ids"]
    lm.fit(inputs, ids, batch_size=4, verbose=0)
    return logits, texts, [np.asarray(weight) for weight in lm.weights]

distribution = keras.distribution.ModelParallel(
    layout_map=layout_map, batch_dim_name="batch"
)
with distribution.scope():
    split = language_model()
    actual = outputs(split)
    attention = split.backbone.blocks[0].attention
    for name in ("query", "value", "output", "gate"):
        kernel = getattr(attention, f"{name}_kernel").value
        shards = {shard.data.shape for shard in kernel.addressable_shards}
        assert shards == {(8, 8)}, (name, shards)
expected = outputs(language_model())
np.testing.assert_allclose(actual[0], expected[0], rtol=1e-4, atol=1e-4)
np.testing.assert_array_equal(actual[1], expected[1])
for one, other in zip(actual[2], expected[2], strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
"""


@pytest.mark.skipif(not small_models.ON_JAX, reason="Keras splits weights on JAX")
def test_a_split_model_computes_the_same():
    options = "--xla_force_host_platform_device_count=4"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {options}"
    done = command_line.python("-c", SPLIT, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr[-3000:]


def test_each_weight_has_one_layout():
    mesh = keras.distribution.DeviceMesh((1, 1), ("rows", "columns"), ["cpu:0"])
    layout_map = models.RoutingTransformer.get_layout_map(mesh, "columns", "rows")
    lm = small_models.language_model(num_layers=1)
    layouts = {v.path: layout_map[v.path] for v in lm.weights}
    for path, shape in ((v.path, v.shape) for v in lm.weights):
        assert layouts[path] is None or len(layouts[path].axes) == len(shape), path
    split = {path for path, layout in layouts.items() if layout is not None}
    assert {p for p in layouts if "kernel" in p} <= split
    assert not {p for p in split if "kmeans" in p or "norm" in p}
    assert layouts["block_0/attention/query_kernel"].axes == ("rows", "columns")


@pytest.mark.parametrize("mesh", [None, "mesh"])
def test_the_mesh_is_checked(mesh):
    with pytest.raises(ValueError, match="`device_mesh`.*device_mesh="):
        models.RoutingTransformer.get_layout_map(mesh)
