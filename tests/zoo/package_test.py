"""How the zoo is found: by name, from the layers, from models and from saved files."""

import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import zoo
from routing_tf.models import patterns
from tests.layers import helpers
from tests.models import small_models

ROOT = pathlib.Path(__file__).parents[2]
LOADS = """
import sys
import keras
import numpy as np
import routing_tf.zoo
model = keras.models.load_model(sys.argv[1])
np.save(sys.argv[2], keras.ops.convert_to_numpy(model(np.load(sys.argv[3]))))
assert not any(name.startswith("routing_tf.models") for name in sys.modules)
"""
# As where a Bazel target has the layers alone.
ALONE = """
import sys
import numpy as np

class Layers:
    def find_spec(self, name, path=None, target=None):
        package, *rooms = name.split(".")
        if package == "routing_tf" and rooms[:1] not in ([], ["layers"], ["version"]):
            raise ImportError(f"{name} is above the layers")

sys.meta_path.insert(0, Layers())
import keras
from routing_tf import layers

groups = [layers.FullHeads(1), layers.LocalHeads(1, (4,)), layers.HashedHeads(1, 4, 4)]
groups += [layers.RoutedHeads(1, 3, 4), layers.MultipoleHeads(1, 4, 4)]
model = keras.Sequential([layers.MixedAttention(groups, key_dim=4)])
model(np.ones((1, 8, 6), "float32"))
keras.Sequential.from_config(model.get_config())
assert not hasattr(layers, "SinkhornHeads")
"""


@pytest.mark.thorough
@helpers.only_on("tensorflow", "one backend is enough")
def test_files_load_where_the_zoo_was_imported(tmp_path):
    x = helpers.normal(2, 6, 8)
    model = keras.Sequential([layers.MixedAttention([zoo.LunaHeads(2, 3)], key_dim=4)])
    expected = keras.ops.convert_to_numpy(model(x))
    paths = [tmp_path / name for name in ("model.keras", "found.npy", "x.npy")]
    model.save(paths[0])
    np.save(paths[2], x)
    subprocess.run([sys.executable, "-c", LOADS, *paths], cwd=ROOT, check=True)
    np.testing.assert_allclose(np.load(paths[1]), expected, atol=1e-6)


def test_layers_have_the_names_of_the_zoo():
    assert layers.SinkhornHeads is zoo.SinkhornHeads
    assert layers.longformer_heads is zoo.longformer_heads


@pytest.mark.thorough
@helpers.only_on("tensorflow", "one backend is enough")
def test_layers_need_no_zoo():
    subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, check=True)


def test_a_pattern_of_ones_own(monkeypatch):
    monkeypatch.setattr(patterns, "_REGISTERED", {})
    with pytest.raises(ValueError, match="`routing`.*'sinkhorn'.*routing='mine'"):
        small_models.hyperparameters(routing="mine")
    mine = zoo.Pattern(layers.SlidingHeads, lambda s: {"radius": s.attention_window})
    patterns.register("mine", mine)
    lm = small_models.language_model(routing="mine", attention_window=5)
    groups = lm.backbone.blocks[-1].attention.head_groups
    assert [g.radius for g in groups if isinstance(g, layers.SlidingHeads)] == [5]
    with pytest.raises(ValueError, match="Received: name='full'"):
        patterns.register("full", mine)
