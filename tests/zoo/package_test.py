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
from routing_tf import layers
assert not any(name.startswith("routing_tf.zoo") for name in sys.modules)
model = keras.models.load_model(sys.argv[1])
np.save(sys.argv[2], keras.ops.convert_to_numpy(model(np.load(sys.argv[3]))))
assert not any(name.startswith("routing_tf.models") for name in sys.modules)
"""


@helpers.only_on("tensorflow", "one backend is enough")
def test_files_load_where_the_layers_alone_were_imported(tmp_path):
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
    assert "SinkhornHeads" in dir(layers)
    with pytest.raises(AttributeError, match="no attribute 'NoSuchHeads'"):
        _ = layers.NoSuchHeads
    for name in set(dir(layers)) - set(vars(layers)):
        assert name in zoo.__all__


def test_a_pattern_of_ones_own(monkeypatch):
    monkeypatch.setattr(patterns, "_REGISTERED", {})
    with pytest.raises(ValueError, match="must be one of.*'sinkhorn'.*routing='mine'"):
        small_models.hyperparameters(routing="mine")
    mine = zoo.Pattern(layers.SlidingHeads, lambda s: {"radius": s.attention_window})
    patterns.register("mine", mine)
    lm = small_models.language_model(routing="mine", attention_window=5)
    groups = lm.backbone.blocks[-1].attention.head_groups
    assert [g.radius for g in groups if isinstance(g, layers.SlidingHeads)] == [5]
    with pytest.raises(ValueError, match="Received: name='full'"):
        patterns.register("full", mine)
