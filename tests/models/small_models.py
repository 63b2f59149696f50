"""Small language models and their inputs."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import models
from routing_tf.layers.support.keras_internals import layers_inside
from tests import golden_cases
from tools import preset_table

ON_JAX = keras.backend.backend() == "jax"
# Further cases whose compilation takes long on JAX.
FURTHER = pytest.mark.slow if ON_JAX else pytest.mark.thorough
VOCABULARY_SIZE = 31
LENGTH = 24
SETTINGS = {
    "vocabulary_size": VOCABULARY_SIZE,
    "max_sequence_length": LENGTH,
    "num_layers": 2,
    "hidden_dim": 16,
    "intermediate_dim": 12,
    "num_local_heads": 2,
    "local_block_length": 8,
    "num_routed_heads": 2,
    "num_clusters": 3,
    "attention_window": 6,
    "routing": "expert_choice",
    "max_relative_position": 10,
    "commitment_weight": 0.5,
    "centroid_decay": 0.9,
}
# A first layer of local heads, so that repeated tokens do not score alike.
GENERATING = {
    "num_local_only_layers": 1,
    "num_clusters": 2,
    "attention_window": 3,
    "local_block_length": 4,
}


def hyperparameters(**changes):
    return models.Hyperparameters(**{**SETTINGS, **changes})


def language_model(seed=0, dtype=None, preprocessor=None, **changes):
    """Returns a small language model with the same values on every backend."""
    backbone = models.RoutingTransformer(hyperparameters(**changes), dtype=dtype)
    lm = models.RoutingTransformerCausalLM(backbone, preprocessor=preprocessor)
    randomize(lm, seed)
    return lm


def randomize(lm, seed):
    """Assigns values that are the same on every backend."""
    generator = np.random.default_rng(seed)
    for variable in lm.trainable_variables:
        variable.assign(_values(variable.name, variable.shape, generator))
    for kmeans in kmeans_layers(lm):
        centroids = generator.normal(size=kmeans.centroids.shape)
        kmeans.centroids.assign(centroids)
        if kmeans.ema:
            kmeans.sums.assign(centroids)


def _values(name, shape, generator):
    noise = generator.normal(size=shape)
    if name == "gamma":
        return 1.0 + 0.1 * noise
    if len(shape) == 1:
        return 0.1 * noise
    return noise if name == "embeddings" else noise / shape[0] ** 0.5


def inputs(lengths=(LENGTH, LENGTH), buffer=LENGTH, seed=0):
    """Returns random ids for a call; rows are real up to `lengths`.

    No id comes twice in a row: in the first layer equal tokens have equal scores, and
    rounding would decide which one a cluster takes.
    """
    generator = np.random.default_rng(seed)
    ids = np.tile(np.arange(1, VOCABULARY_SIZE, dtype="int32"), (len(lengths), 1))
    return {
        "token_ids": generator.permuted(ids, axis=1)[:, :buffer],
        "padding_mask": np.arange(buffer)[None] < np.array(lengths)[:, None],
    }


def output(model, *inputs, **options):
    """Returns what a model gives for inputs, without its losses."""
    return golden_cases.run(model, *inputs, **options)[0]


def array(x):
    return keras.ops.convert_to_numpy(x)


def arrays(variables):
    """Returns the values of variables by their paths."""
    values = {variable.path: array(variable) for variable in variables}
    assert len(values) == len(variables)
    return values


def copy_weights(source, target):
    """Copies the variables that have the same path."""
    values = arrays(source.variables)
    for variable in target.variables:
        if variable.path in values:
            variable.assign(values[variable.path])


def saved(model, folder):
    """Returns copies of a model by way of a file and of a preset directory."""
    model.save(folder / "model.keras")
    model.save_to_preset(str(folder / "preset"))
    return [
        keras.saving.load_model(folder / "model.keras"),
        type(model).from_preset(str(folder / "preset")),
    ]


def kmeans_layers(lm):
    return [
        layer for layer in layers_inside(lm) if isinstance(layer, layers.OnlineKMeans)
    ]


def assert_equal(actual, expected):
    """Asserts that two dicts hold equal arrays."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def without_memory(settings):
    """Returns a language model of any size whose variables have shapes alone."""
    with preset_table.shapes_alone():
        return models.RoutingTransformerCausalLM(
            models.RoutingTransformer(settings), compile=False
        )
