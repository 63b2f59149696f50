"""Tests of loading TF1 checkpoints of the release."""

import json
import warnings

import numpy as np
import pytest
import tensorflow as tf

from routing_tf import models
from routing_tf.models import build
from routing_tf.models import release
from routing_tf.models.release import checkpoints
from routing_tf.models.release import variable_names as release_names
from tests import golden_cases
from tests.layers import kinds
from tests.models import small_models
from tests.problems.prepared import write_vocabulary

FOLDER = golden_cases.FOLDER / "checkpoints"
NAMES = sorted(path.name for path in FOLDER.iterdir())
TEXT = ["enwik8_local_cluster8k", "pg19_local_cluster8k"]
TEXT += ["pg19_released_hparams_json", "wikitext103_local_cluster4k"]


def prefix(name):
    return str(FOLDER / name / "model.ckpt-1234")


def hparams_of(name):
    return golden_cases.load(f"models/{name}.npz").config["hparams"]


def load(name, **options):
    kind = checkpoints.ReleaseCheckpoint(prefix(name)).kind
    options = {"hparams": hparams_of(name), **options}
    return build.model_class(kind).from_release_checkpoint(prefix(name), **options)


def logits_of(model, targets, inputs=None):
    if isinstance(model, models.RoutingImageTransformer):
        return small_models.output(model, {"images": targets})
    ids = np.pad(targets, [(0, 0), (1, 0)])[:, :-1]
    mask = np.ones(ids.shape, "bool")
    if inputs is None:
        call = {"token_ids": ids, "padding_mask": mask}
    else:
        call = {
            "encoder_embeddings": inputs[:, :, 0],
            "decoder_token_ids": ids,
            "decoder_padding_mask": mask,
        }
    return small_models.output(model, call)


def test_all_checkpoints_are_there():
    assert len(NAMES) == 7


# Those of text are alike.
FEW = [
    name for name in NAMES if not name.startswith(("enwik8", "wikitext103", "meena"))
]


@pytest.mark.parametrize("name", kinds.some(NAMES, FEW))
def test_logits_are_those_of_the_release(name):
    with np.load(FOLDER / name / "expected.npz") as file:
        expected = {key: file[key] for key in file.files}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(name)
    logits = logits_of(model, expected["in/targets"], expected.get("in/inputs"))
    golden_cases.assert_close(logits, expected["out/logits"], 1e-4)


@pytest.mark.parametrize("name", TEXT)
@small_models.FURTHER
def test_padding_of_a_decoder_has_no_influence(name):
    """The release does not know it there, so the weights do not rely on its flaws."""
    model = load(name)
    length = min(hparams_of(name)["max_target_length"], 64)
    ids = np.random.default_rng(6).integers(1, 50, (1, length))
    mask = np.arange(length)[None] < length - 9
    outputs = [
        small_models.output(model, {"token_ids": x, "padding_mask": mask})
        for x in (ids, np.where(mask, ids, 7))
    ]
    np.testing.assert_array_equal(*(output[mask] for output in outputs))


def test_optimizer_slots_and_the_step_are_skipped():
    reader = tf.train.load_checkpoint(prefix("pg19_local_cluster8k"))
    names = reader.get_variable_to_shape_map()
    golden = golden_cases.load("models/pg19_local_cluster8k.npz")
    checkpoint = checkpoints.ReleaseCheckpoint(prefix("pg19_local_cluster8k"))
    skipped = names.keys() - checkpoint.shapes.keys()
    assert "global_step" in skipped
    assert any(name.endswith("/Adafactor_1") for name in skipped)
    assert checkpoint.shapes.keys() == golden.group("var").keys()


def test_the_checkpoint_goes_before_the_settings():
    """As the published hparams.json goes before the registered set of that name."""
    name = "pg19_released_hparams_json"
    given = {**hparams_of(name), "ffn_layer": "geglu", "sparsity_skip_first": 3}
    with pytest.warns(UserWarning) as caught:
        model = load(name, hparams=given)
    (message,) = [str(w.message) for w in caught if "disagree" in str(w.message)]
    assert "ffn_layer is 'conv_hidden_relu' in the checkpoint, 'geglu'" in message
    assert "sparsity_skip_first is 2 in the checkpoint, 3 in the settings" in message
    assert "query_shape" not in message
    assert model.hyperparameters.feed_forward == "relu"
    assert model.hyperparameters.num_local_only_layers == 2


def test_hparams_go_before_the_preset():
    name = "pg19_released_hparams_json"
    rest = ("query_shape", "memory_flange", "sparsity_cluster_attention_window")
    given = {key: hparams_of(name)[key] for key in (*rest, "max_target_length")}
    with pytest.warns(UserWarning, match="hidden_size is 24 in the checkpoint, 1032"):
        h = load(name, hparams=given, preset="pg19_rt_base").hyperparameters
    assert (h.local_block_length, h.truncate_length) == (16, 64)
    assert (h.hidden_dim, h.max_sequence_length, h.residual_dropout) == (24, 8192, 0.1)


@pytest.mark.parametrize(
    "message, options",
    [
        ("hparams without query_shape, memory_flange, .*window", {"hparams": None}),
        ("preset='pg19'.*Valid names are", {"preset": "pg19"}),
        ("preset='cifar10_local_cluster", {"preset": "cifar10_local_cluster"}),
    ],
)
def test_settings_that_leave_something_open(message, options):
    with pytest.raises(ValueError, match=f"(?s)Received: .*{message}"):
        load("pg19_local_cluster8k", **options)


def test_other_kinds_are_refused():
    with pytest.raises(ValueError, match="`prefix`.*'text'.*'seq2seq'"):
        models.RoutingTransformerCausalLM.from_release_checkpoint(
            prefix("translate_local_cluster512"), hparams={}
        )
    with pytest.raises(ValueError, match="`prefix`.*'image'.*'text'"):
        models.RoutingImageTransformer.from_release_checkpoint(
            prefix("pg19_local_cluster8k"), hparams={}
        )


def test_missing_files(tmp_path):
    with pytest.raises(ValueError, match=r"`prefix`.*`\.index`.*model\.ckpt-1'"):
        checkpoints.ReleaseCheckpoint(tmp_path / "model.ckpt-1")


def write_checkpoint(path, arrays):
    """Writes a TF1 checkpoint of named arrays."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = [
            tf.compat.v1.get_variable(name, initializer=array)
            for name, array in arrays.items()
        ]
        session.run([variable.initializer for variable in variables])
        saver = tf.compat.v1.train.Saver(variables)
        return saver.save(session, str(path), write_meta_graph=False)


def arrays_of(name):
    checkpoint = checkpoints.ReleaseCheckpoint(prefix(name))
    return {name: checkpoint.value(name) for name in checkpoint.shapes}


def assert_refused(message, name, arrays, folder):
    """Checks that a text model is not made of arrays; returns what is said."""
    path = write_checkpoint(folder / "model.ckpt", arrays)
    with pytest.raises(ValueError, match=message) as error:
        models.RoutingTransformerCausalLM.from_release_checkpoint(
            path, hparams=hparams_of(name)
        )
    return str(error.value)


def test_every_variable_that_does_not_fit_is_named(tmp_path):
    name = "pg19_local_cluster8k"
    arrays = arrays_of(name)
    scope = "sparse_transformer/body"
    layer = f"{scope}/decoder_layer_1/self_attention"
    missing = f"{layer}/ffn/weight2/kernel"
    del arrays[missing]
    cut = f"{layer}/self_attention/output_transform/kernel"
    arrays[cut] = arrays[cut][:5]
    arrays[f"{scope}/one_more"] = np.zeros(3, "float32")
    lines = assert_refused("", name, arrays, tmp_path).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        f"left over: {scope}/one_more",
        f"missing: {missing}",
        f"shape: {cut} is (24, 24), received (5, 24)",
    ]


def test_slots_beside_the_variables_are_skipped_too(tmp_path):
    arrays = arrays_of("pg19_local_cluster8k")
    slots = {f"{name}/Adafactor_1": np.zeros(3, "float32") for name in arrays}
    path = write_checkpoint(tmp_path / "model.ckpt", {**arrays, **slots})
    assert checkpoints.ReleaseCheckpoint(path).shapes.keys() == arrays.keys()


def test_another_model_is_refused(tmp_path):
    path = write_checkpoint(tmp_path / "model.ckpt", {"dense/kernel": np.zeros(2)})
    with pytest.raises(ValueError, match="ckpt'.*dense/kernel"):
        checkpoints.ReleaseCheckpoint(path)


@pytest.fixture
def rt_base():
    """A checkpoint of names and shapes alone: those of the published model."""
    table = json.loads(
        (golden_cases.FOLDER / "pg19/full_size_variables.json").read_text()
    )["released_hparams_json"]["variables"]
    checkpoint = object.__new__(checkpoints.ReleaseCheckpoint)
    checkpoint.scope, checkpoint.kind = release_names.MODEL_SCOPE, "text"
    checkpoint.shapes = {v["name"]: tuple(v["shape"]) for v in table}
    return checkpoint


def test_full_size_rt_base_maps_completely(rt_base):
    # The registered set that it is published under is another model.
    preset = "pg19_local_cluster8k"
    hparams, differences = checkpoints.complete_settings(rt_base, preset=preset)
    names = sorted(line.split()[0] for line in differences)
    assert names == ["ffn_layer", "sparsity_skip_first"]
    settings = checkpoints.hyperparameters_of(rt_base, hparams)
    expected = models.preset_hyperparameters("pg19_rt_base")
    assert settings == expected.replace(
        compatibility=settings.compatibility, truncate_length=8192
    )
    variables = release.variables_by_name(small_models.without_memory(settings))
    release_names.check_shapes(variables, rt_base.shapes)


@small_models.FURTHER
def test_vocabulary_makes_a_model_of_texts(tmp_path):
    path = tmp_path / "vocab.subwords"
    write_vocabulary(path, ["the cat sat on the mat and the dog sat on the cat"], 48)
    # This model cuts its inputs to less than its longest sequence.
    lm = load("enwik8_local_cluster8k", vocabulary=str(path))
    h = lm.hyperparameters
    assert lm.preprocessor.sequence_length == h.truncate_length < h.max_sequence_length
    lm.compile(sampler="greedy")
    assert lm.generate("the cat", max_length=8).startswith("the cat")


def seq2seq_arrays(parts):
    """A checkpoint with the encoder's table, in several parts."""
    arrays = arrays_of("translate_local_cluster512")
    table = np.random.default_rng(0).normal(size=(50, 32)).astype("float32")
    scope = "sparse_transformer/symbol_modality_50_32/shared/weights"
    pieces = np.array_split(table, parts)
    return {**arrays, **{f"{scope}_{i}": p for i, p in enumerate(pieces)}}, table


@pytest.mark.parametrize("parts", [pytest.param(1, marks=small_models.FURTHER), 12])
def test_the_table_of_an_encoder_is_joined(parts, tmp_path):
    arrays, table = seq2seq_arrays(parts)
    path = write_checkpoint(tmp_path / "model.ckpt", arrays)
    hparams = hparams_of("translate_local_cluster512")
    lm = models.RoutingTransformerSeq2SeqLM.from_release_checkpoint(path, None, hparams)
    assert lm.hyperparameters.encoder_inputs == "tokens"
    name = "sparse_transformer/symbol_modality_50_32/shared/weights_0"
    np.testing.assert_array_equal(release.read_variables(lm)[name], table)


@pytest.mark.parametrize(
    "message, name, num_words",
    [
        ("`vocabulary`.*`encoder_embeddings`", "translate_local_cluster512", 2),
        ("`vocabulary`.* 120 .* 50 ", "pg19_local_cluster8k", 200),
    ],
)
def test_a_vocabulary_must_fit(message, name, num_words, tmp_path):
    text = " ".join(f"word{word}" for word in range(num_words))
    path = tmp_path / "vocab.subwords"
    write_vocabulary(path, [text], 120)
    with pytest.raises(ValueError, match=message):
        load(name, vocabulary=str(path))


def test_settings_that_no_variable_shows_are_told():
    names = ("query_shape", "memory_flange", "sparsity_cluster_attention_window")
    hparams = dict(zip(names, ([16], [16], 16)))
    checkpoint = checkpoints.ReleaseCheckpoint(prefix("enwik8_local_cluster8k"))
    _, lines = checkpoints.complete_settings(checkpoint, hparams=hparams)
    assert lines == [
        "share_qk is not given; True is used",
        "add_timing_signal is not given; False is used",
    ]


@pytest.mark.parametrize(
    "missing",
    [
        "embeddings/embedding",
        "decoder_layer_0/self_attention/self_attention/q/kernel",
        "decoder_layer_0/self_attention/self_attention/attention_nd/dense/kernel",
        "decoder_layer_0/self_attention/ffn/conv1/kernel",
    ],
)
def test_what_the_settings_are_read_from_is_named(missing, tmp_path):
    name = "pg19_released_hparams_json"
    arrays = arrays_of(name)
    del arrays[f"sparse_transformer/body/{missing}"]
    message = f": sparse_transformer/body/{missing}"
    assert_refused(message, name, arrays, tmp_path)


def test_weights_must_be_finite(tmp_path):
    name = "pg19_local_cluster8k"
    arrays = arrays_of(name)
    arrays["sparse_transformer/body/emb_dense/bias"][3] = np.nan
    assert_refused("ckpt'.*emb_dense/bias", name, arrays, tmp_path)


@pytest.mark.parametrize(
    "change, wanted",
    [
        ({"sparsity_strided_num_heads": None}, ": 0, .*=None"),
        ({"batch_size": "x"}, "='x'"),
        ({"query_shape": 64}, "=64"),
    ],
)
def test_hparams_of_another_kind_than_the_release_has(change, wanted):
    name = "wikitext103_local_cluster4k"
    (setting,) = change
    with pytest.raises(ValueError, match=f"`{setting}`.*{wanted}"):
        load(name, hparams={**hparams_of(name), **change})


@pytest.mark.parametrize("content", [None, "[1]", "{"])
def test_hparams_that_cannot_be_read(content, tmp_path):
    path = tmp_path / "hparams.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"`hparams`.*/hparams\.json'"):
        load("pg19_local_cluster8k", hparams=str(path))
