import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from routing_tf import layers
from routing_tf import models
from routing_tf.layers.support.keras_internals import layers_inside
from tests.models import small_models
from tests.models import small_seq2seq
from tests.models.small_models import copy_weights
from tests.models.small_models import output


def backbone(seed=0, num_layers=1, **changes):
    return small_models.language_model(seed, num_layers=num_layers, **changes).backbone


def shapes(**changes):
    settings = small_models.hyperparameters(**changes)
    return small_models.without_memory(settings).backbone


PAIRS = models.RoutingTransformerEncoderDecoder
MINE = {"dtype": "mixed_bfloat16", "name": "mine"}


@pytest.mark.parametrize(
    "cls, settings, changes",
    [
        (models.RoutingTransformer, {"compatibility": "trained"}, {}),
        (models.RoutingTransformer, {"compatibility": "trained"}, MINE),
        (PAIRS, small_seq2seq.SETTINGS, {}),
        (PAIRS, {**small_seq2seq.SETTINGS, "encoder_inputs": "embeddings"}, MINE),
    ],
)
def test_round_trip_of_the_config(cls, settings, changes):
    settings = small_models.hyperparameters(embedding_dim=6, **settings)
    model = cls(settings.to_dict(), **changes)
    assert model.hyperparameters == settings
    copy = cls.from_config(json.loads(json.dumps(model.get_config())))
    assert copy.hyperparameters == settings
    assert copy.name == model.name
    assert copy.dtype_policy.name == model.dtype_policy.name
    assert copy.get_config() == model.get_config()
    paths = [variable.path for variable in model.variables]
    assert [variable.path for variable in copy.variables] == paths
    assert len(set(paths)) == len(paths)


def test_settings_of_heads_reach_the_layers():
    options = {"num_key_value_heads": 2, "use_gate": True, "share_query_key": False}
    options |= {"ema": False, "rotary_positions": True, "routing": "token_choice"}
    options |= {"logit_soft_cap": 30.0, "qk_norm": True}
    model = shapes(**options, attention_implementation="auto")
    assert not any("relative" in weight.path for weight in model.weights)
    for block in model.blocks:
        assert block.attention.gate_kernel is not None
        assert block.attention.key_kernel.shape[-1] == 2 * block.attention.key_dim
        assert not block.attention.head_groups[0].ema
        for group in block.attention.head_groups:
            assert group.num_heads == 2
            assert (group.logit_soft_cap, group.qk_norm) == (30.0, True)
            assert group.attention_implementation == "auto"
            assert group.rotary_positions


@small_models.FURTHER
def test_the_gain_reaches_every_initial_weight():
    settings = small_models.hyperparameters(
        initializer_gain=1e-8, embedding_dim=6, shared_head_projection=True
    )
    for variable in models.RoutingTransformer(settings).trainable_variables:
        if variable.name != "gamma":
            assert np.abs(small_models.array(variable)).max() < 1e-3, variable.path


@pytest.mark.parametrize(
    "of_local, of_routed, stddevs",
    [(0, None, (0, 0)), (2, None, (2, 2)), (2, 0, (2, 0)), (0, 2.0, (0, 2))],
)
@small_models.FURTHER
def test_initial_relative_positions_of_keys(of_local, of_routed, stddevs):
    settings = small_models.hyperparameters(
        num_layers=1,
        num_local_heads=1,
        num_routed_heads=1,
        relative_key_stddev=of_local,
        routed_relative_key_stddev=of_routed,
    )
    variables = models.RoutingTransformer(settings).trainable_variables
    for heads, stddev in zip(("local_heads", "routed_heads"), stddevs, strict=True):
        tables = {
            variable.name: small_models.array(variable)
            for variable in variables
            if f"{heads}/dot_product/relative_position" in variable.path
        }
        assert tables.keys() == {"key_embeddings", "value_embeddings"}
        assert tables["value_embeddings"].std() < 0.5
        # Far from both: the draws are another lot in every run.
        assert (tables["key_embeddings"].std() > 1.0) == (stddev == 2)


@small_models.FURTHER
def test_scaled_embeddings():
    x = small_models.inputs()
    model, scaled = backbone(), backbone(scale_embeddings=True)
    table = model.get_layer("token_embedding").embeddings
    table.assign(4.0 * small_models.array(table))  # The square root of 16.
    np.testing.assert_allclose(output(scaled, x), output(model, x), atol=1e-6)


def test_longer_inputs_are_cut():
    x = small_models.inputs(lengths=(24, 7))
    first = {name: value[:, :16] for name, value in x.items()}
    whole, cut = backbone(), backbone(truncate_length=16)
    np.testing.assert_array_equal(output(cut, x), output(whole, first))


@pytest.fixture(scope="module")
def plain():
    """A model without dropout, inputs, and the output of one call."""
    model, x = backbone(), small_models.inputs()
    return model, x, output(model, x)


@pytest.mark.parametrize(
    "rate",
    [
        *("attention_dropout", "feed_forward_dropout"),
        *(
            pytest.param(f"{part}_dropout", marks=small_models.FURTHER)
            for part in ("token", "embedding", "residual")
        ),
    ],
)
def test_dropout_acts_in_training_alone(rate, plain):
    model, x, expected = plain
    dropping = backbone(**{rate: 0.5})
    copy_weights(model, dropping)
    np.testing.assert_array_equal(output(dropping, x), expected)
    first, second = (output(dropping, x, training=True) for _ in range(2))
    assert not np.allclose(first, expected, atol=1e-2)
    assert not np.allclose(first, second, atol=1e-2)


def test_padding_has_no_influence():
    model = backbone(num_layers=2, num_clusters=2, attention_window=12)
    x = small_models.inputs(lengths=(24, 13, 2))
    real = x["padding_mask"]
    other = {**x, "token_ids": np.where(real, x["token_ids"], 7)}
    np.testing.assert_array_equal(output(model, x)[real], output(model, other)[real])
    alone = {name: value[1:2, :13] for name, value in x.items()}
    np.testing.assert_allclose(
        output(model, x)[1:2, :13], output(model, alone), atol=1e-5
    )


def test_later_tokens_do_not_reach_local_heads():
    model = backbone(num_layers=2, num_routed_heads=0)
    x = small_models.inputs()
    expected = output(model, x)
    for place in (1, 8, 13):
        token_ids = x["token_ids"].copy()
        token_ids[:, place:] = token_ids[:, place:] % 7 + 1
        changed = output(model, {**x, "token_ids": token_ids}) != expected
        assert not changed[:, :place].any()
        assert changed[:, place:].any()


def test_low_precision_leaves_the_clustering_alone():
    model = models.RoutingTransformer(
        small_models.hyperparameters(num_layers=1), dtype="mixed_bfloat16"
    )
    x = {name: value[:1] for name, value in small_models.inputs().items()}
    assert output(model, x, training=True).dtype.name == "bfloat16"
    for variable in model.variables:
        assert keras.backend.standardize_dtype(variable.dtype) == "float32"
    for layer in layers_inside(model):
        if isinstance(layer, layers.OnlineKMeans):
            assert layer.compute_dtype == "float32"
        elif not isinstance(layer, keras.layers.InputLayer):
            assert layer.compute_dtype == "bfloat16", layer.path


def test_hyperparameters_of_a_saved_model_cannot_be_changed(tmp_path):
    models.RoutingTransformer.from_preset("byte_tiny").save_to_preset(str(tmp_path))
    with pytest.raises(ValueError, match="preset=.*, num_layers"):
        models.RoutingTransformer.from_preset(str(tmp_path), num_layers=3)


def test_settings_of_centroids_and_memory_reach_every_block():
    settings = {"revive_centroids_after": 7, "centroid_initialization": "tokens"}
    lm = small_models.without_memory(
        small_models.hyperparameters(
            num_cluster_strided_heads=4, remat=True, **settings
        )
    )
    assert all(block.remat for block in lm.backbone.blocks)
    kmeans = small_models.kmeans_layers(lm)
    assert len(kmeans) == 4
    for layer in kmeans:
        assert (layer.revive_after, layer.centroid_initialization) == (7, "tokens")
    assert not any(block.remat for block in shapes().blocks)


@pytest.mark.thorough
@pytest.mark.skipif(small_models.ON_JAX, reason="Keras cannot export on JAX")
def test_export_inside_another_model(tmp_path, compiled):
    inputs = {
        name: keras.Input((12,), dtype=dtype, name=name)
        for name, dtype in (("token_ids", "int32"), ("padding_mask", "bool"))
    }
    model = keras.Model(inputs, keras.layers.Dense(2)(backbone()(inputs)))
    x = small_models.inputs((12, 7), 12)
    expected = small_models.array(model(x))
    model.export(tmp_path, verbose=False)
    exported = tf.saved_model.load(tmp_path)
    np.testing.assert_allclose(exported.serve(x), expected, rtol=1e-4, atol=1e-5)
