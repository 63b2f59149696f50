"""What earlier commits have saved, with the numbers that it gave there."""

import pathlib
import zipfile

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import models
from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.models import release
from routing_tf.training.run_config import RunConfig
from tests import golden_cases
from tests.layers import helpers

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
RELEASE_KINDS = ["Routed", "ClusterStrided", "Strided", "Local"]
# The classes of the head groups in each file.
ATTENTION = {
    "sound": ["RoutedHeads", "LocalHeads"],
    "sound_unmasked": ["RoutedHeads"],
    "exact": [f"Exact{kind}Heads" for kind in RELEASE_KINDS],
    "exact_unmasked": [f"Exact{kind}Heads" for kind in RELEASE_KINDS],
    "exact_hashed": ["ExactHashedHeads", "ExactStridedHeads", "ExactLocalHeads"],
    "trained": [
        *("TrainedHashedHeads", "TrainedRoutedHeads", "TrainedClusterStridedHeads"),
        *("TrainedLocalHeads", "StridedHeads"),
    ],
    "trained_unmasked": ["TrainedLocalHeads"],
}
PRESETS = {
    "sound_preset": None,
    "trained_preset": "trained",
    "exact_preset": "exact_shared_padding",
}


@pytest.fixture(scope="module", params=["484422b", "8d19778"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    with zipfile.ZipFile(FIXTURES / f"saved_by_{request.param}.zip") as archive:
        archive.extractall(path)
    return path


@pytest.fixture(scope="module")
def numbers(folder):
    return np.load(folder / "numbers.npz")


@pytest.fixture(autouse=True)
def earlier_mean(monkeypatch):
    """Sound heads then divided by as much as those of the release do."""
    monkeypatch.setattr(ClusteredHeads, "count_offset", 0.01)


@helpers.further_on_jax
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, folder, numbers):
    model = keras.models.load_model(folder / f"{name}.keras")
    groups = next(x for x in model.layers if hasattr(x, "head_groups")).head_groups
    assert [type(group).__qualname__ for group in groups] == ATTENTION[name]
    if name.startswith("exact"):
        assert {group.cache_padding_bias for group in groups} == {name != "exact"}
    output = model([numbers["x"], numbers["mask"]])
    golden_cases.assert_close(output, numbers[name], 1e-5)


def test_layers_on_their_own(folder, numbers):
    model = keras.models.load_model(folder / "pieces.keras")
    assert isinstance(model.get_layer("kmeans"), release.heads.ReleaseKMeans)
    scores, output = model([numbers["tokens"], numbers["seen"]])
    golden_cases.assert_close(scores, numbers["pieces_scores"], 1e-5)
    golden_cases.assert_close(output, numbers["pieces_output"], 1e-5)


@pytest.mark.parametrize("name", [*PRESETS, "exact_lm"])
def test_models(name, folder, numbers):
    cls = models.RoutingTransformerCausalLM
    if name in PRESETS:
        lm = cls.from_preset(str(folder / name))
    else:
        lm = keras.models.load_model(folder / f"{name}.keras")
        name = "exact_preset"
    assert lm.hyperparameters.compatibility == PRESETS[name]
    inputs = {"token_ids": numbers["ids"], "padding_mask": numbers["padding_mask"]}
    logits, _ = golden_cases.run(lm, inputs)
    golden_cases.assert_close(logits, numbers[name], 1e-5)


@pytest.mark.parametrize("name, level", [("run", None), ("trained_run", "trained")])
def test_settings_of_runs(name, level, folder):
    hyperparameters = RunConfig.load(folder / name).hyperparameters
    assert hyperparameters.compatibility == level


def test_flaws_need_the_module_that_knows_them(monkeypatch):
    monkeypatch.setattr(keras.saving, "get_registered_object", lambda *_: None)
    config = {"num_clusters": 3, "compatibility": {"mixed_head_counts": True}}
    with pytest.raises(ValueError, match="Import `routing_tf.models.release` before"):
        layers.OnlineKMeans.from_config(config)
    sound = {**config, "compatibility": {"mixed_head_counts": False}}
    assert type(layers.OnlineKMeans.from_config(sound)) is layers.OnlineKMeans
