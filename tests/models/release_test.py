import numpy as np
import pytest

from routing_tf import layers
from routing_tf import models
from routing_tf.models import release
from routing_tf.models.release import conversion
from tests import golden_cases
from tests.models import small_models

HPARAMS = {
    **golden_cases.load("models/pg19_local_cluster8k.npz").config["hparams"],
    "num_decoder_layers": 2,
    "sparsity_skip_first": 1,
    "max_length": 32,
    "max_target_length": 16,
}
IMAGE = golden_cases.load("models/image_cifar10_local_cluster.npz").config["hparams"]
MIXED = "attention/c_mixed_local_routing_shareqk_masked_rel_eval.npz"
ATTENTION = golden_cases.load(MIXED).config
ALL_KINDS = golden_cases.load("attention/d_all_four_kinds_masked.npz").config


def language_model(**changes):
    return release.language_model({**HPARAMS, **changes}, small_models.VOCABULARY_SIZE)


def seq2seq_model(**changes):
    return release.seq2seq_model(
        {**HPARAMS, "num_encoder_layers": 2, **changes}, small_models.VOCABULARY_SIZE
    )


def image_model(num_classes=None, **changes):
    return release.image_model(
        {**IMAGE, **changes}, num_channels=3, num_classes=num_classes
    )


def random_values(layer):
    generator = np.random.default_rng(0)
    return {
        name: generator.normal(size=value.shape).astype("float32")
        for name, value in release.read_variables(layer).items()
    }


def names(layer):
    """Returns the release's variable names, without the scope of the model."""
    return [
        name.removeprefix("sparse_transformer/body/")
        for name in release.variables_by_name(layer)
    ]


def test_weights_of_token_biases_are_there_once_they_are_given():
    layer = release.attention_layer(ALL_KINDS)
    scope = "self_attention/attention_nd/"
    given = {
        f"{scope}{kind}token_bias_weight": np.array(weight, "float32")
        for kind, weight in (
            ("cluster_attention/", 0.5),
            ("cluster_strided_attention/", 2.0),
            ("", 3.0),
        )
    }
    without = random_values(layer)
    assert not without.keys() & given.keys()
    release.assign_variables(layer, {**without, **given})
    assert release.read_variables(layer).keys() == without.keys() | given.keys()
    for name, value in given.items():
        assert release.read_variables(layer)[name] == value
    release.assign_variables(layer, without)
    assert release.read_variables(layer).keys() == without.keys()


@pytest.mark.parametrize(
    "layer", [language_model, lambda: release.attention_layer(ATTENTION)]
)
def test_assignment_names_every_problem_and_writes_nothing(layer):
    layer = layer()
    before = release.read_variables(layer)
    values = random_values(layer)
    missing, cut, turned, *_ = sorted(values)
    del values[missing]
    values[cut] = values[cut][:-1]
    values[turned] = values[turned][None]
    values["global_step"] = np.zeros(())
    values["training/Adafactor"] = np.zeros(3)
    with pytest.raises(ValueError) as error:
        release.assign_variables(layer, values)
    assert str(error.value).split("\n  ")[1:] == [
        "left over: global_step",
        "left over: training/Adafactor",
        f"missing: {missing}",
        *sorted(
            f"shape: {name} is {before[name].shape}, received {values[name].shape}"
            for name in (cut, turned)
        ),
    ]
    small_models.assert_equal(release.read_variables(layer), before)


def test_the_bridge_takes_only_what_it_knows():
    dense = models.RoutingTransformer(small_models.hyperparameters())
    for function in (release.read_variables, release.variables_by_name):
        with pytest.raises(
            ValueError, match=r"`models\.release`.*Received: <RoutingTransformer "
        ):
            function(dense)
    with pytest.raises(ValueError, match=r"`models\.release`.*Received: <"):
        release.assign_variables(dense, {})


def test_settings_of_encoders():
    without = language_model().backbone.hyperparameters
    h = seq2seq_model(
        num_encoder_layers=3, memory_query_shape=[8], input_dropout=0.25
    ).backbone.hyperparameters
    assert h == without.replace(
        num_encoder_layers=3,
        encoder_inputs="embeddings",
        max_input_length=32,
        max_sequence_length=16,
        memory_block_length=8,
        memory_flange_blocks=2,
        input_dropout=0.25,
    )


@pytest.mark.parametrize("build, layers", [(language_model, 2), (seq2seq_model, 0)])
def test_each_function_builds_its_own_kind(build, layers):
    message = f"`num_encoder_layers`.*num_encoder_layers={layers}"
    with pytest.raises(ValueError, match=message):
        build(num_encoder_layers=layers)


def test_image_models_of_another_size():
    model = release.image_model({"num_decoder_layers": 1}, 1, vocabulary_size=10)
    h = model.hyperparameters
    assert (h.image_height, h.image_width, h.num_channels) == (32, 32, 1)
    assert (h.vocabulary_size, h.channel_vocabulary_size) == (10, 256)


@pytest.mark.parametrize("num_classes, unconditional", [(None, False), (5, True)])
def test_classes_go_with_conditional_image_models(num_classes, unconditional):
    with pytest.raises(ValueError, match=f"Received: num_classes={num_classes}"):
        image_model(num_classes, unconditional=unconditional)


ONE_ENTRY = "`query_shape`.*`memory_flange`"
NO_HEADS = {"local_num_heads": 0, "sparsity_cluster_num_heads": 0}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query_shape": [8, 8]}, rf"{ONE_ENTRY}.*query_shape=\[8, 8\]"),
        ({"memory_flange": [8, 8]}, rf"{ONE_ENTRY}.*memory_flange=\[8, 8\]"),
        ({"query_shape": [], "memory_flange": []}, rf"{ONE_ENTRY}.*query_shape=\[\]"),
        ({"memory_flange": [12]}, r"`memory_flange`.*memory_flange=\[12\]"),
        (
            {"num_encoder_layers": 6, "memory_query_shape": [12]},
            r"`memory_query_shape`.*memory_query_shape=\[12\]",
        ),
        ({"sparsity_strided_num_heads": 2}, "`hidden_size`.*hidden_size=24, 10"),
        ({"sparsity_cluster_strided_num_heads": 2}, "`hidden_size`.*=24, 10"),
        ({"layer_preprocess_sequence": "n"}, "_preprocess_sequence`.*'n', 'dan'"),
        ({"layer_postprocess_sequence": "da"}, r"Received: \('none', 'da'\)"),
        ({"layer_postprocess_sequence": None}, r"Received: \('none', 'none'\)"),
        ({"norm_type": "batch"}, "`norm_type`.*norm_type='batch'"),
        ({"norm_epsilon": 1e-5}, "`norm_epsilon`.*norm_epsilon=1e-05"),
        ({"activation_dtype": "bfloat16"}, "`activation_dtype`.*='bfloat16'"),
        ({"weight_dtype": "bfloat16"}, "`weight_dtype`.*weight_dtype='bfloat16'"),
        ({"hidden_size": 18}, "`hidden_size`.*hidden_size=18, 8 "),
        ({"attention_key_channels": 18}, "`attention_key_channels`.*=18, 8 "),
        ({"attention_value_channels": 18}, "`attention_value_channels`.*=18, 8 "),
        (NO_HEADS, r"`sparsity_strided_num_heads`.*\[0, 0, 0, 0\]"),
    ],
)
def test_unsupported_settings(change, message):
    with pytest.raises(ValueError, match=message):
        language_model(**change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query_shape": (8, 8)}, r"`memory_query_shape`.*query_shape=\(8, 8\)"),
        ({"memory_query_shape": (8, 8)}, r"`memory_query_shape`.*=\(8, 8\)"),
        ({"memory_flange": (8, 8)}, r"`memory_flange`.*memory_flange=\(8, 8\)"),
        ({"memory_flange": (12,)}, r"`memory_flange`.*memory_flange=\(12,\) .*\[8\]"),
        (
            {"memory_length": 32, "memory_query_shape": (6,)},
            r"`memory_flange`.*memory_flange=\[8\] .*\(6,\)",
        ),
        ({"sparsity_strided_num_heads": 2}, "`total_key_depth`.*=18, 8 "),
        ({"sparsity_cluster_strided_num_heads": 2}, "`total_key_depth`.*=18, 8 "),
        (
            {"sparsity_cluster_strided_num_heads": 3},
            "`sparsity_cluster_strided_num_heads`.*Received: 3 .*2",
        ),
        (
            {"total_key_depth": 20, "total_value_depth": 20},
            "`total_key_depth`.*total_key_depth=20, 6 ",
        ),
        (
            {**NO_HEADS, "local_num_heads": 6, "total_value_depth": 17},
            "`total_value_depth`.*total_value_depth=17, 6 ",
        ),
        ({"total_value_depth": 36}, "`total_key_depth`.*`total_value_depth`.*18, 36"),
        ({"sparsity_cluster_size": 0}, "`config`.*: sparsity_cluster_size"),
        ({"sparsity_cluster_attention_window": None}, "`config`.*: .*attention_window"),
        (NO_HEADS, "`total_key_depth`.*total_key_depth=18, 0 "),
    ],
)
def test_unsupported_attention(change, message):
    with pytest.raises(ValueError, match=message):
        release.attention_layer({**ATTENTION, **change})


def test_a_call_with_missing_arguments_is_refused():
    with pytest.raises(ValueError, match="`config`.*: depth, output_depth, "):
        release.attention_layer({"query_shape": (4,), "local_num_heads": 2})


DECODER = ["attention", "feed_forward"]
PAIRS = {"encoder": DECODER, "decoder": ["attention", "cross_attention", DECODER[1]]}


@pytest.mark.parametrize(
    "build, sides", [(language_model, {"decoder": DECODER}), (seq2seq_model, PAIRS)]
)
def test_names_with_normalization_before_each_part(build, sides):
    lm = build(layer_preprocess_sequence="n", layer_postprocess_sequence="da")
    backbone = lm.backbone
    norms, norm = {}, "layer_prepostprocess"
    for side, parts in sides.items():
        blocks = backbone.encoder_blocks if side == "encoder" else backbone.blocks
        for index, block in enumerate(blocks):
            for part, suffix in zip(parts, ("", "_1", "_2")):
                scope = f"{side}_layer_{index}/self_attention/{norm}{suffix}"
                (norms[scope],) = getattr(block, f"{part}_input").norms
    finals = [getattr(backbone, "encoder_final_norm", None), backbone.final_norm]
    norms |= zip((norm, f"{norm}_1"), finals[-len(sides) :])
    variables = dict(zip(names(lm), release.variables_by_name(lm).values()))
    found = {name: id(v) for name, v in variables.items() if "layer_norm" in name}
    expected = {}
    for scope, layer in norms.items():
        start = f"{scope}/layer_norm/layer_norm_"
        expected |= {f"{start}scale": id(layer.gamma), f"{start}bias": id(layer.beta)}
    assert list(found.items()) == list(expected.items())


def test_names_without_feed_forward():
    lm = language_model(ffn_layer="none")
    assert not [name for name in names(lm) if "ffn" in name]
    part = "decoder_layer_0/self_attention/layer_postprocess"
    scale = f"{part}/layer_norm/layer_norm_scale"
    assert scale in names(lm)
    assert scale.replace("process", "process_1") not in names(lm)


@small_models.FURTHER
def test_centroids_learn_by_gradient_only_without_moving_averages():
    for ema in (True, False):
        variables = release.variables_by_name(language_model(ema=ema))
        state = {
            name.rpartition("/")[2]: variable.trainable
            for name, variable in variables.items()
            if name.endswith(("means", "ema_count", "ema_means"))
        }
        by_averages = {"means": False, "ema_count": False, "ema_means": False}
        assert state == (by_averages if ema else {"means": True})


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "true_adam"},
        {"initializer": "orthogonal"},
        {"optimizer_adafactor_beta1": 0.9},
    ],
)
def test_settings_of_training_alone_are_ignored_by_the_bridge(change):
    hparams = {"hidden_size": 8, "embedding_dims": 8, "filter_size": 8}
    hparams |= {"num_decoder_layers": 1, "query_shape": [4], "memory_flange": [4]}
    lm = release.language_model({**hparams, **change}, 10)
    assert lm.backbone.hyperparameters.num_layers == 1
    (name,) = change
    with pytest.raises(ValueError, match=f"Received:.*'{name}': {change[name]!r}"):
        conversion.hyperparameters_from_release({**hparams, **change})


def test_layers_without_release_names_are_refused():
    attention = layers.MixedAttention([layers.FullHeads(2)], key_dim=4)
    attention(np.ones((1, 4, 8), "float32"))
    with pytest.raises(ValueError, match=r"`models\.release`.*<MixedAttention "):
        release.read_variables(attention)
