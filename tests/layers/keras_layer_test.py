"""Keras's own test of a layer, on every public layer."""

import functools

import keras
import numpy as np
import pytest
from keras.src.testing import TestCase

from routing_tf import layers
from routing_tf import zoo
from routing_tf.layers.support.keras_internals import layers_inside
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.zoo import cases

SHAPE = (2, 6, 8)


def mixed(group, causal):
    """A case of an attention layer with one group, which each layer makes anew."""
    group = keras.saving.serialize_keras_object(group)
    group["config"]["dtype"] = None  # that of the layer
    options = {"call_kwargs": {"use_causal_mask": causal}}
    return layers.MixedAttention, {"head_groups": [group], "key_dim": 4}, options


ROUTING = {"num_heads": 2, "key_dim": 4, "num_clusters": 2, "attention_window": 4}
TABLE, IDS = {"vocabulary_size": 9, "embedding_dim": 4}, np.ones((2, 6), "int32")
PIXELS = {"input_data": np.ones((2, 2, 2, 3), "int32")}
MASKS = {"supports_masking": True}
EXACT, DROP = {"run_mixed_precision_check": False}, {"rate": 0.5, "seed": np.int64(3)}
CASES = {
    "routing": (layers.RoutingAttention, {**ROUTING, "num_local_heads": 1}, MASKS),
    "biases": (
        layers.RoutingAttention,
        {**ROUTING, "use_bias": True, "kernel_regularizer": "l2", "seed": 1},
        {"expected_num_losses": 4, "expected_num_trainable_weights": 6},
    ),
    "grouped": (
        layers.RoutingAttention,
        {**ROUTING, "num_heads": 4, "num_local_heads": 2, "share_query_key": False}
        | {"num_key_value_heads": 2, "use_gate": True},
        {**MASKS, "expected_num_trainable_weights": 5},
    ),
    **{
        name: mixed(make(), name in cases.ONLY_CAUSAL)
        for name, make in cases.SMALL.items()
        if name not in cases.WITHOUT_WEIGHTS
    },
    **{
        kind: mixed(kinds.CAUSAL[kind](), True)
        for kind in ("full", "threshold", "hashed")
    },
    "kmeans": (layers.OnlineKMeans, {"num_clusters": 2}, {"input_shape": (2, 3, 6, 4)}),
    "dot_product": (
        layers.ScaledDotProduct,
        {"max_relative_position": 2, "dropout": 0.1, "seed": np.int64(3)},
        {"input_shape": {f"{name}_shape": SHAPE for name in ("query", "key", "value")}},
    ),
    "block": (
        layers.TransformerBlock,
        {
            name: keras.saving.serialize_keras_object(part)
            for name, part in (
                ("attention", layers.MixedAttention([layers.FullHeads(2)], 4)),
                ("feed_forward", layers.FeedForward(8)),
            )
        },
        MASKS,
    ),
    "steps": (layers.SublayerSteps, {"steps": "nd", "dropout": 0.1}, MASKS),
    "feed_forward": (layers.FeedForward, {"intermediate_dim": 8}, MASKS),
    "sigmoid_gelu": (
        layers.FeedForward,
        {"intermediate_dim": 8, "activation": "sigmoid_gelu"}
        | {"output_initializer": "zeros"},
        MASKS,
    ),
    "experts": (
        zoo.MixtureOfExperts,
        {"num_experts": 3, "intermediate_dim": 4, "capacity": 3, "top_k": 2}
        | {"router_jitter": 0.1, "z_loss_weight": 0.1, "seed": np.int64(3)},
        {**MASKS, "expected_num_trainable_weights": 5},
    ),
    "memory": (
        zoo.ProductKeyMemory,
        {"num_heads": 2, "num_keys": 3, "top_k": 2, "key_dim": 4}
        | {"input_dropout": 0.1, "seed": np.int64(3)},
        MASKS,
    ),
    "embedding": (layers.TokenEmbedding, TABLE, {"input_data": IDS}),
    "timing": (
        *(layers.TimingSignal, {}),
        {**MASKS, "assert_built_after_instantiation": True},
    ),
    "grid": (layers.GridEmbedding, {"grid_shape": (2, 4)}, MASKS),
    "token_dropout": (layers.TokenDropout, DROP, {**MASKS, **EXACT}),
    "rows_and_columns": (
        *(layers.RowColumnEmbedding, {"max_length": 4}),
        {"input_shape": (2, 3, 4, 8)},
    ),
    "subpixels": (layers.SubpixelEmbedding, TABLE, PIXELS),
    "coordinates": (
        *(layers.SubpixelEmbedding, {**TABLE, "coordinate_embeddings": True}),
        PIXELS,
    ),
}


# Their many small operations take long, above all to compile on JAX.
LONG = (
    *("NativeSparseHeads", "ClusteredQueryHeads", "CompressedHeads", "InducedHeads"),
    *("LongShortHeads", "IndexedHeads", "threshold"),
    *(("experts", "memory") if helpers.ON_JAX else ()),
)


@pytest.mark.parametrize(
    "case", kinds.some(CASES, [case for case in CASES if case not in LONG])
)
def test_passes_the_test_of_keras(case):
    layer_class, settings, options = CASES[case]
    if issubclass(layer_class, layers.MixedAttention) and helpers.ON_JAX:
        pytest.skip("What Keras asks of heads is the same on other backends")
    options = {"input_shape": SHAPE, "run_training_check": False, **options}
    if "input_data" in options:
        options.pop("input_shape")
    helpers.assert_keeps_settings(layer_class(**settings))
    TestCase().run_layer_test(layer_class, settings, **options)


EVERY = {
    **kinds.CAUSAL,
    **kinds.WHOLE,
    **{
        f"{kind}_by_key": functools.partial(kinds.APART[kind], query_cluster="key")
        for kind in kinds.APART
        if not kind.startswith(("rounds", "multipole"))
    },
}


def test_every_kind_keeps_its_settings():
    helpers.assert_keeps_settings(layers.RelativePosition(3, "ones", "zeros"))
    for name, make in EVERY.items():
        group = make(name=name)
        helpers.assert_keeps_settings(group)
        shapes = [(2, 3, length, 4) for length in (5, 6, 6)]
        assert group.compute_output_shape(*shapes) == shapes[0]


@pytest.mark.parametrize("causal", [False, True])
def test_every_kind_survives_saving(causal, tmp_path):
    """All of them in one layer."""
    makes = kinds.WHOLE
    if causal:
        makes = {kind: kinds.CAUSAL[kind] for kind in kinds.CAUSAL if kind not in makes}
    groups = [
        make(name=kind) for kind, make in makes.items() if not kind.endswith("_shifted")
    ]
    settings = {"shared_head_projection": True, "project_shared_keys": True}
    settings |= {"use_gate": True, "output_dim": 9, "kernel_initializer": "ones"}
    attention = layers.MixedAttention(groups, 4, **settings, name="attention")
    options = {"use_causal_mask": causal, "has_outputs": False}
    helpers.assert_survives_saving(
        attention, tmp_path, helpers.normal(*SHAPE), **options
    )


def test_dropped_tokens_keep_the_mask():
    ids = keras.ops.convert_to_tensor(np.array([[1, 2, 0]]))
    embedded = keras.layers.Embedding(4, 3, mask_zero=True)(ids)
    dropped = layers.TokenDropout(0.5)(embedded, training=True)
    mask = keras.ops.convert_to_numpy(keras.src.backend.get_keras_mask(dropped))
    np.testing.assert_array_equal(mask, [[True, True, False]])


def test_integers_of_numpy_are_integers():
    settings = {name: np.int64(value) for name, value in ROUTING.items()}
    attention = layers.RoutingAttention(**settings, max_relative_position=np.int32(3))
    local = layers.LocalHeads(np.int64(1), (np.int64(4),), key_shift=np.int64(0))
    for layer in (attention, local, layers.HashedHeads(1, np.int64(4), 2)):
        config = layer.get_config()
        assert helpers.as_json(config) and type(config["num_heads"]) is int
    for kind in (zoo.TokenFuser, functools.partial(zoo.TokenLearner, 2)):
        assert type(kind(dropout=0.1, seed=np.int64(3)).seed) is int


def test_lists_are_tuples():
    """As what a file gives back."""
    attention = layers.MixedAttention([layers.FullHeads(2)], 4, block_shape=[2, 4])
    assert attention.block_shape == (2, 4)


def test_refuses_a_query_of_another_depth():
    attention = layers.RoutingAttention(**ROUTING)
    attention.build(SHAPE)
    with pytest.raises(
        ValueError, match=r"'routing_attention.* -1 .* 8, .*\(2, 6, 5\)"
    ):
        attention(np.ones((2, 6, 5), "float32"))


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(zoo.ThresholdHeads, 2, 2, 4),
        pytest.param(cases.SMALL["NativeSparseHeads"], marks=pytest.mark.thorough),
        cases.SMALL["LongShortHeads"],
    ],
)
def test_groups_without_a_dtype_have_that_of_their_layer(make):
    def policies_and_output(**options):
        keras.utils.set_random_seed(1)
        group = make(**options)
        attention = layers.MixedAttention([group], 4, dtype="mixed_bfloat16")
        inside = [layer.dtype_policy.name for layer in layers_inside(attention)]
        x = helpers.normal(*SHAPE)
        attention.build(x.shape)
        output, _ = golden_cases.run(attention, x, use_causal_mask=True)
        return inside, output, attention

    inside, output, attention = policies_and_output()
    expected = policies_and_output(dtype="mixed_bfloat16")
    assert inside == expected[0]
    np.testing.assert_array_equal(output, expected[1])
    group = attention.head_groups[0]
    config = group.get_config()
    assert type(group).from_config(config).get_config() == config
    config = attention.get_config()
    again = layers.MixedAttention.from_config({**config, "dtype": "float16"})
    assert again.head_groups[0].compute_dtype == "float16"
    with pytest.warns(UserWarning, match="in float32"):
        attention = policies_and_output(dtype="float32")[2]
    assert attention.head_groups[0].get_config()["dtype"] is not None
    assert make().get_config()["dtype"] is not None


def test_warns_of_groups_that_compute_in_another_dtype():
    group = layers.FullHeads(2, name="exact", dtype="float32")
    with pytest.warns(UserWarning, match="'exact' in float32"):
        layers.MixedAttention([group], key_dim=4, dtype="mixed_bfloat16")
