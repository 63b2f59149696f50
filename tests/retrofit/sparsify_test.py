"""Arguments and errors of `sparsify`, its report, presets, and sequences' centroids."""

import json

import keras
import keras_hub
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import retrofit
from routing_tf.retrofit.models import slots_in
from tests.retrofit import families
from tests.retrofit.families_test import FAR
from tests.retrofit.families_test import check_generation

pytestmark = [pytest.mark.usefixtures("eager"), *families.NOT_ON_JAX]
HEADS = families.NUM_HEADS


@pytest.fixture
def model():
    return families.causal_lm("Llama")


@pytest.fixture
def shallow():
    """A model of one layer: half of the work."""
    return families.causal_lm("Llama", num_layers=1)


def test_report_equals_a_dense_computation(model):
    heads = layers.SlidingHeads(HEADS, radius=2)
    report = retrofit.sparsify(model.backbone, families.IDS[:1], heads=heads)
    for layer in report.layers:
        assert 0 < layer.exact_mass < 1
        assert layer.keys_per_query == pytest.approx((1 + 2 + 22 * 3) / 24)
        assert layer.length == 24 and layer.cache_bytes > 0
        assert layer.name in str(report)
    retrofit.restore(report.model)
    # The first layer by hand.
    block = model.backbone.transformer_layers[0]
    x = model.backbone.token_embedding(families.IDS[:1])
    x = block._self_attention_layernorm(x)
    attention = block._self_attention_layer
    query, key = (
        keras.ops.convert_to_numpy(attention.rotary_embedding_layer(dense(x)))
        for dense in (attention._query_dense, attention._key_dense)
    )
    key = np.repeat(key, 2, axis=2)
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    distance = np.arange(24)[:, None] - np.arange(24)
    weights = np.exp(logits) * (distance >= 0)
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = (weights * (distance <= 2)).sum(axis=-1).mean()
    assert report.layers[0].exact_mass == pytest.approx(expected, abs=1e-5)


def test_the_worst_tenth_stays():
    backbone = families.backbone("GPT2", num_layers=10)
    heads = layers.SlidingHeads(HEADS, radius=1)
    report = retrofit.sparsify(backbone, families.IDS[:1], heads=heads)
    errors = [layer.error for layer in report.layers]
    assert report.kept == (int(np.argmax(errors)),)


def test_heads_may_differ_by_layer(model):
    own = [layers.HashedHeads(HEADS, 2, 8, share_query_key=False), None]
    report = retrofit.sparsify(model, heads=own.__getitem__, keep_full=())
    assert [layer.heads for layer in report.layers] == ["HashedHeads", "full"]
    check_generation(model)


@pytest.mark.parametrize("ids", [families.IDS, families.IDS.tolist()], ids=type)
def test_centroids_are_those_of_the_keys(shallow, ids):
    retrofit.sparsify(shallow, ids, keep_full=(), **FAR)
    (block, *_) = shallow.backbone.transformer_layers
    kmeans = block._self_attention_layer.sparse_heads.kmeans
    centroids = keras.ops.convert_to_numpy(kmeans.centroids)
    assert centroids.shape == (2, 4, 4)
    np.testing.assert_allclose((centroids**2).mean(axis=-1), 1.0, rtol=1e-3)


@pytest.mark.parametrize(
    "family", ["Llama", pytest.param("GPT2", marks=pytest.mark.thorough)]
)
def test_presets_give_the_model_back(family, tmp_path):
    model = families.causal_lm(family)
    before = families.outputs(model)
    retrofit.sparsify(model, families.IDS, keep_full=(1,), frozen=False, **FAR)
    after = families.outputs(model)
    model.save_to_preset(tmp_path)
    read = keras_hub.models.CausalLM.from_preset(str(tmp_path), preprocessor=None)
    np.testing.assert_array_equal(families.outputs(read), after)
    backbone = keras_hub.models.Backbone.from_preset(str(tmp_path))
    pair = (
        keras.ops.convert_to_numpy(each(families.INPUTS))
        for each in (backbone, model.backbone)
    )
    np.testing.assert_array_equal(*pair)
    assert "retrofit" in json.loads((tmp_path / "config.json").read_text())["config"]
    np.testing.assert_array_equal(families.outputs(retrofit.restore(read)), before)


def test_weights_are_saved_and_quantized_as_ever(shallow, tmp_path):
    retrofit.sparsify(shallow, families.IDS, keep_full=(), **FAR)
    after = families.outputs(shallow)
    shallow.save_weights(tmp_path / "own.weights.h5")
    other = families.causal_lm("Llama", num_layers=1)
    retrofit.sparsify(other, families.IDS[:, ::-1], keep_full=(), **FAR)
    for weight in other.weights:
        weight.assign(keras.ops.zeros_like(weight))
    other.load_weights(tmp_path / "own.weights.h5")
    np.testing.assert_array_equal(families.outputs(other), after)
    shallow.quantize("int8")
    assert np.abs(families.outputs(shallow) - after).max() < 0.5


def test_far_distance_finds_the_positions_of_the_model(shallow):
    report = retrofit.sparsify(
        shallow, families.IDS, keep_full=(), far_distance=9, **FAR
    )
    assert all(x.group.far_distance == 9 for x in slots_in(report.model))


def test_texts_are_cut_to_the_positions_of_the_model():
    ids = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    tokenizer = keras_hub.models.GPT2Tokenizer(ids, merges=["a b"])
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer)
    model = keras_hub.models.GPT2CausalLM(
        backbone=families.backbone("GPT2", num_layers=1), preprocessor=preprocessor
    )
    for texts in ("a" * 80, iter(["a" * 80]), [b"a" * 80], np.array(["a" * 80])):
        report = retrofit.sparsify(model, texts, keep_full=(), **FAR)
        assert retrofit.restore(report.model) is model


def test_each_sequence_has_centroids_of_its_own(shallow):
    options = {**FAR, "centroids": "sequence", "keep_full": ()}
    retrofit.sparsify(shallow, families.IDS, **options)
    together = families.outputs(shallow)
    row = {name: x[:1] for name, x in families.INPUTS.items()}
    np.testing.assert_allclose(families.outputs(shallow, row), together[:24], atol=1e-5)
    shallow.compile(sampler="greedy")
    ids, real = families.IDS[:, :17], families.REAL[:, :17]
    prompt = {"token_ids": ids, "padding_mask": real.astype("int32")}
    made = shallow.generate(prompt, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(made[real], ids[real])
    with pytest.raises(ValueError, match='`centroids="sequence"`.*training=True'):
        shallow.fit(families.INPUTS, families.IDS, verbose=0)


def bloom():
    return keras_hub.models.BloomBackbone(
        vocabulary_size=9,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
        max_sequence_length=16,
    )


def changed_already():
    model = families.backbone("GPT2")
    heads = layers.FullHeads(HEADS)
    return retrofit.sparsify(model, heads=heads, keep_full=()).model


REFUSALS = {
    "family": (bloom, {}, "`model`.*BloomBackbone"),
    "no_attention": (
        lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]),
        {},
        "`model`.*Received: .*'sequential",
    ),
    "second_call": (changed_already, {}, r"`model`.*'self_attention'"),
    "short": (
        None,
        {"calibration": families.IDS[:1, :3], **FAR},
        "`calibration`.*Received: 3 .*num_clusters=4",
    ),
    "missing": (None, {"calibration": None, **FAR}, "`calibration`.*calibration=None"),
    "text": (None, {"calibration": "some text", **FAR}, "`preprocessor`"),
    "num_heads": (
        None,
        {"heads": layers.FullHeads(2)},
        r"`heads`.* 4\. Received: 2 .*self_attention'",
    ),
    "shared": (None, {"heads": layers.RoutedHeads(4, 2, 4)}, "share_query_key=False"),
    "no_heads": (None, {"heads": lambda index: 3}, "`heads`.*Received: 3 .* 0$"),
    "keep_full": (None, {"keep_full": (5,)}, r"`keep_full`.*=\(5,\)"),
    "all_stay": (
        None,
        {"keep_full": (0, 1), **FAR},
        "`keep_full`.*`heads`.*Received: 2 .*1: '`keep_full`'",
    ),
    "centroids": (None, {"centroids": "own"}, "`centroids`.*='own'"),
    "of_heads": (None, {"num_clusters": 0}, "`num_clusters`.*=0"),
    "number": (None, {"keep_full": 0}, "`keep_full`.*keep_full=0"),
    "kind_of_heads": (None, {"heads": 3}, "`heads`.*heads=3"),
    "lost": (
        None,
        {"heads": layers.FullHeads(HEADS), "num_recnt": 4},
        "`heads`.* num_recnt",
    ),
    "floats": (
        None,
        {"calibration": families.IDS / 40, **FAR},
        "`calibration`.*Received: float64",
    ),
    "flags": (None, {"calibration": families.REAL, **FAR}, "`calibration`.*bool"),
    "outside": (
        None,
        {"calibration": families.IDS + 40, **FAR},
        r"`calibration`.* 40, .*int64 .*\(1, 24\)",
    ),
    "long": (
        None,
        {"calibration": np.tile(families.IDS, 2), **FAR},
        r"`calibration`.* 32 .*\(1, 48\)",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_leave_the_model_as_it_was(name):
    make, options, message = REFUSALS[name]
    model = make() if make else families.backbone("GPT2")
    before = [(type(x), len(x.weights)) for x in model._flatten_layers()]
    options = {"calibration": families.IDS, **options}
    with pytest.raises(ValueError, match=message):
        retrofit.sparsify(model, **options)
    assert before == [(type(x), len(x.weights)) for x in model._flatten_layers()]


def test_restore_refuses_models_that_were_not_changed(model):
    for other in (model, None):
        with pytest.raises(ValueError, match=r"`model`.*`retrofit\.sparsify`"):
            retrofit.restore(other)


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match="`model`.*Received: 'llama' "):
        retrofit.sparsify("llama", families.IDS)


def test_windows_of_the_model_hold():
    model = families.backbone("Mistral", sliding_window=8)
    before = families.outputs(model)
    retrofit.sparsify(model, families.IDS[:, :8], keep_full=(), **FAR)
    with pytest.raises(ValueError, match=" 8 .*Received: 24 .*radius=7"):
        model(families.INPUTS)
    retrofit.restore(model)
    heads = layers.SlidingHeads(HEADS, radius=7)
    retrofit.sparsify(model, heads=heads, keep_full=())
    np.testing.assert_allclose(families.outputs(model), before, atol=1e-5)


def test_a_cache_of_keras_hub_is_refused(shallow):
    retrofit.sparsify(shallow.backbone, families.IDS, keep_full=(), **FAR)
    with pytest.raises(
        ValueError,
        match=r"`generate`.*self_attention'.*`CausalLM`.*`retrofit\.sparsify`",
    ):
        shallow.generate(families.INPUTS, stop_token_ids=None)


@pytest.mark.parametrize("kind", ["TransformerDecoder", "TransformerEncoder"])
def test_blocks_of_a_users_model(kind):
    block = getattr(keras_hub.layers, kind)(16, HEADS)
    x = keras.Input((None, 8))
    model = keras.Model(x, block(x))
    values = np.random.default_rng(0).normal(size=(1, 24, 8)).astype("float32")
    before = keras.ops.convert_to_numpy(model(values))
    heads = layers.FullHeads(HEADS)
    report = retrofit.sparsify(model, values, heads=heads, keep_full=())
    assert report.layers[0].exact_mass == pytest.approx(1.0, abs=1e-5)
    after = keras.ops.convert_to_numpy(model(values))
    np.testing.assert_allclose(after, before, atol=1e-5)
    with pytest.raises(ValueError, match="retrofit.restore"):
        model.get_config()
    pairs = np.tril(np.ones((1, 24, 24), bool), 3)
    mask = "decoder_attention_mask" if kind[-7:] == "Decoder" else "attention_mask"
    with pytest.raises(ValueError, match=r"\(1, 24, 24\) .*`use_causal_mask=True`"):
        block(values, **{mask: pairs})
