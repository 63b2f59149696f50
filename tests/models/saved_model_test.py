"""SavedModels, as the command writes them, against the models they are made of."""

import contextlib
import functools
import io
import json
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

from routing_tf import models
from routing_tf import tokenizers
from routing_tf.cli import export
from routing_tf.layers.support import backends
from routing_tf.models.score import TokenScorer
from tests import command_line
from tests import tracing
from tests.models import small_models
from tests.models import small_seq2seq

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
on_tensorflow = pytest.mark.skipif(
    not ON_TENSORFLOW, reason="SavedModels are made on the TensorFlow backend"
)
LENGTH = 20
TEXTS = ["It was dark", "b", "déjà vu"]
PROMPTS = ["It was", "a", ""]
IMAGES = {
    "image_height": 2,
    "image_width": 4,
    "num_channels": 2,
    "vocabulary_size": 7,
    "max_sequence_length": 16,
    "num_layers": 1,
}
# What a process does that has TensorFlow and nothing else.
FRESH = """
import json, sys
sys.modules["routing_tf"] = sys.modules["keras_hub"] = None  # cannot be imported
import tensorflow as tf
path, modules, calls = json.loads(sys.argv[1])
for module in modules:
    __import__(module)
served = tf.saved_model.load(path)
results = []
for name, arguments in calls:
    outputs = getattr(served, name)(**arguments)
    results.append({key: value.numpy().tolist() for key, value in outputs.items()})
decode = lambda value: value.decode("utf-8")
print(json.dumps(results, default=decode))
"""


def text_model(tokenizer=None, **changes):
    tokenizer = tokenizer or tokenizers.ByteTokenizer()
    preprocessor = models.RoutingTransformerCausalLMPreprocessor(
        tokenizer, sequence_length=LENGTH
    )
    settings = {
        "vocabulary_size": tokenizer.vocabulary_size(),
        "max_sequence_length": LENGTH,
        "num_layers": 1,
    }
    return small_models.language_model(
        preprocessor=preprocessor, **{**settings, **changes}
    )


def greedy(lm, inputs, **options):
    lm.compile(sampler="greedy")
    return lm.generate(inputs, **options)


run = functools.partial(command_line.run, export)


def load(model, folder, *arguments):
    """Exports a model; returns what the Python printed by the command has loaded."""
    return load_and_listen(model, folder, *arguments)[0]


def load_and_listen(model, folder, *arguments):
    """Does that, and returns what the command and that Python have printed, too."""
    model.save(folder / "model.keras")
    paths = f"--model_dir={folder / 'model.keras'}", f"--export_dir={folder / 'served'}"
    names = {}
    with tracing.traced(), contextlib.redirect_stdout(io.StringIO()) as out:
        assert not run(*paths, *arguments)
        _, _, snippet = out.getvalue().partition("this uses it:\n\n")
        exec(textwrap.dedent(snippet), names)
    return names["served"], out.getvalue()


def call_in_fresh_process(path, *calls, modules=()):
    """Returns the outputs of functions of a SavedModel, in a process of its own."""
    settings = json.dumps([str(path), modules, calls])
    done = command_line.python("-I", "-c", FRESH, settings, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def lm():
    """A model that reads what followed; others see below."""
    return text_model(routing="token_choice", routed_key_shift=1, local_key_shift=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def exported(lm, folder):
    """What is served, and what was printed.

    Blocks of clusters, whose number depends on the data, cannot be made while the model
    is exported: XLA could not compile them.
    """
    save, called = tf.saved_model.save, []

    def save_for_xla(*arguments, **options):
        called.append(backends.may_follow_data())
        save(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.distribution, "list_devices", lambda: ["cpu:0"])
        patch.setattr(tf.saved_model, "save", save_for_xla)
        assert backends.may_follow_data()
        result = load_and_listen(lm, folder)
    assert called == [False]
    return result


@pytest.fixture(scope="module")
def served(exported):
    return exported[0]


@on_tensorflow
@pytest.mark.thorough
def test_what_the_command_prints(exported):
    out = exported[1]
    assert "\nscore(texts: string[?]) -> log_likelihoods: float32[?, ?], " in out
    assert "\ngenerate(texts: string[?], temperature: float32[], top_k: " in out
    assert "tensorflow_text" not in out
    assert "\nIt was" in out


@on_tensorflow
@pytest.mark.thorough
def test_tensorflow_alone_serves_texts(lm, exported, folder):
    ids = [[65, 66, 67], [65, 66, 0], [67, 0, 0]]
    mask = [[True] * 3, [True, True, False], [True, False, False]]
    rows = {"token_ids": ids, "padding_mask": mask}
    score, one, continued, ids_score, ids_continued = call_in_fresh_process(
        folder / "served",
        ("score", {"texts": TEXTS}),
        ("score", {"texts": TEXTS[:1]}),
        ("generate", {"texts": PROMPTS, "temperature": 0.0}),
        ("score_ids", rows),
        ("generate_ids", {**rows, "temperature": 0.0}),
    )
    expected = lm.score(TEXTS)
    for index, result in enumerate(expected):
        size = score["num_tokens"][index]
        assert size == result.num_tokens
        assert score["num_bytes"][index] == result.num_bytes
        assert score["padding_mask"][index] == [i < size for i in range(11)]
        for name in ("log_likelihoods", "token_ids"):
            actual = score[name][index][:size]
            np.testing.assert_allclose(actual, getattr(result, name), atol=1e-5)
    np.testing.assert_allclose(
        [*score["log_likelihood"], *one["log_likelihood"]],
        [result.log_likelihood for result in [*expected, expected[0]]],
        atol=1e-4,
    )
    assert continued["texts"] == greedy(lm, PROMPTS, max_length=LENGTH + 1)
    texts = ["?@A", "?@", "A"]
    for actual, result in zip(ids_score["log_likelihoods"], lm.score(texts)):
        expected = np.pad(result.log_likelihoods, (0, 3 - result.num_tokens))
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    same = lm.preprocessor.tokenizer.detokenize(ids_continued["token_ids"])
    assert same == greedy(lm, texts, max_length=LENGTH + 1)


@on_tensorflow
@pytest.mark.thorough
def test_signatures_are_the_functions(served):
    functions = {"score", "generate", "score_ids", "generate_ids"}
    assert set(served.signatures) == {*functions, "serving_default"}
    score = served.signatures["score"](texts=tf.constant(TEXTS))
    default = served.signatures["serving_default"](texts=tf.constant(TEXTS))
    assert default.keys() == score.keys()
    np.testing.assert_array_equal(default["log_likelihood"], score["log_likelihood"])
    expected = served.score(TEXTS)
    np.testing.assert_array_equal(score["log_likelihood"], expected["log_likelihood"])
    settings = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "seed": 5, "length": 10}
    inputs = {name: tf.constant(value) for name, value in settings.items()}
    continued = served.signatures["generate"](texts=tf.constant(PROMPTS), **inputs)
    expected = served.generate(PROMPTS, **settings)
    assert (continued["texts"].numpy() == expected["texts"].numpy()).all()
    assert expected["token_ids"].shape == (3, 10)


@on_tensorflow
@pytest.mark.thorough
def test_the_seed_decides(served):
    def ids(texts, **settings):
        return served.generate(texts, **settings)["token_ids"].numpy()

    first = ids(PROMPTS, seed=1)
    np.testing.assert_array_equal(first, ids(PROMPTS, seed=1))
    assert (first != ids(PROMPTS, seed=2)).any(axis=1).all()
    # Rows are drawn apart from each other, whatever rows follow.
    np.testing.assert_array_equal(ids(PROMPTS[::-1], seed=1)[:1], ids([""], seed=1))
    same = ids(["a", "a"], seed=1)
    assert (same[0] != same[1]).any()


@on_tensorflow
@pytest.mark.thorough
def test_any_number_of_rows(served):
    assert served.score([])["log_likelihood"].shape == (0,)
    assert served.generate([])["token_ids"].shape == (0, LENGTH)
    empty = served.score([""])
    assert empty["log_likelihood"].numpy() == [0.0]
    assert empty["num_tokens"].numpy() == [0]


@on_tensorflow
@pytest.mark.thorough
def test_nothing_is_written(served):
    before = [variable.numpy() for variable in served.weights]
    assert len(before) > 10
    outputs = []
    for _ in range(2):
        outputs.append(served.score(TEXTS)["log_likelihoods"].numpy())
        served.generate(PROMPTS)
    np.testing.assert_array_equal(*outputs)
    for variable, value in zip(served.weights, before):
        np.testing.assert_array_equal(variable.numpy(), value)
    for function in served.signatures.values():
        graph = function.graph.as_graph_def()
        nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
        assert not [node.op for node in nodes if "Assign" in node.op]


TWO = {"token_ids": [[5, 5]]}


@on_tensorflow
@pytest.mark.parametrize(
    "name, arguments, match",
    [
        ("score", {"texts": ["a" * (LENGTH + 1)]}, "`max_length`.* 20 "),
        ("generate", {"texts": ["a" * (LENGTH + 1)]}, r"`length`.* 20 .*\[21\]"),
        ("generate", {"texts": ["aaa"], "length": 2}, r"`length`.* 20 .*\[3\]"),
        (
            "generate",
            {"texts": ["a"], "length": LENGTH + 1},
            r"`length`.* 20\..*\[21\]",
        ),
        ("generate", {"texts": ["a"], "temperature": -1.0}, r"`temperature`.*\[-1\]"),
        ("generate", {"texts": ["a"], "top_p": 0.0}, r"`top_p`.* \[0\]"),
        (
            "score_ids",
            {"token_ids": [[258]], "padding_mask": [[True]]},
            r" 257\. .*\[258\]",
        ),
        (
            "score_ids",
            {**TWO, "padding_mask": [[False, True]]},
            r"`padding_mask`.*\[\[0 1\]\]",
        ),
        (
            *("generate_ids", {**TWO, "padding_mask": [[True, True]] * 2}),
            r"`padding_mask`.*`token_ids`.*\[2 2\] \[1 2\]",
        ),
        ("generate", {"texts": ["a"], "length": -1}, r"`length`.* 20\..*\[-1\]"),
    ],
)
@pytest.mark.thorough
def test_refused_inputs(served, name, arguments, match):
    with pytest.raises(tf.errors.InvalidArgumentError, match=match):
        getattr(served, name)(**arguments)


@pytest.fixture
def ending(served):
    """Serves a model that writes one letter or ends a text."""
    (bias,) = [weight for weight in served.weights if weight.shape == (258,)]
    before = bias.numpy()
    bias.assign(np.where(np.isin(np.arange(258), (1, 70)), 100.0, 0.0))
    yield served
    bias.assign(before)


@on_tensorflow
@pytest.mark.thorough
def test_rows_stop_at_the_end_id(ending):
    result = ending.generate(["It was"] * 8, temperature=50.0, seed=3)
    ids, mask = result["token_ids"].numpy(), result["padding_mask"].numpy()
    lengths = mask.sum(axis=1)
    assert len(set(lengths)) > 1
    for row, keep, length, text in zip(ids, mask, lengths, result["texts"].numpy()):
        assert keep[:length].all() and (row[length:] == 0).all()
        assert length == LENGTH or row[length - 1] == 1
        assert (row[: length - 1] != 1).all()
        assert text.decode().startswith("It was")


@on_tensorflow
@pytest.mark.thorough
def test_a_model_that_sees_later_tokens(tmp_path):
    lm = small_models.language_model(
        routing="hashed", num_layers=1, compatibility="trained"
    )
    with pytest.raises(ValueError, match="'prefix'.*compatibility='trained'"):
        lm.export(tmp_path, routing_scope="prefix")
    served = load(lm, tmp_path, "--max_length=11")
    x = small_models.inputs((3, 3), buffer=3)
    ids = served.generate(x["token_ids"], x["padding_mask"], temperature=0.0)
    start = {name: np.pad(value, [(0, 0), (1, 8)]) for name, value in x.items()}
    start["padding_mask"][:, 0] = True
    expected = greedy(lm, start, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(ids["token_ids"], np.asarray(expected)[:, 1:])


@on_tensorflow
@pytest.mark.thorough
def test_padding_with_influence_is_refused(tmp_path):
    lm = small_models.language_model(
        num_layers=1, routing="expert_choice", compatibility="exact"
    )
    with tracing.traced():
        lm.export(tmp_path)
    served = tf.saved_model.load(str(tmp_path))
    ids = small_models.inputs()["token_ids"]
    score = served.score(ids, np.ones_like(ids, "bool"))["log_likelihood"]
    expected = [result.log_likelihood for result in lm.score(ids)]
    np.testing.assert_allclose(score, expected, atol=1e-4)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[5 5"):
        served.score(ids[:, :5], np.ones_like(ids[:, :5], "bool"))


@on_tensorflow
@pytest.mark.thorough
def test_only_subwords_need_tensorflow_text(tmp_path):
    texts = ["It was a dark night", "It was"]
    vocabulary = tokenizers.SubwordTokenizer.build_vocabulary(texts, 64)
    tokenizer = tokenizers.SubwordTokenizer(vocabulary)
    lm = text_model(tokenizer, num_routed_heads=0, max_sequence_length=64)
    _, out = load_and_listen(lm, tmp_path)
    assert "\nIt was" in out and "import tensorflow_text" in out
    score, continued = call_in_fresh_process(
        tmp_path / "served",
        ("score", {"texts": texts}),
        ("generate", {"texts": ["It was", ""], "temperature": 0.0}),
        modules=["tensorflow_text"],
    )
    expected = [result.log_likelihood for result in lm.score(texts)]
    np.testing.assert_allclose(score["log_likelihood"], expected, atol=1e-4)
    assert continued["texts"][0].startswith("It was")
    ids, mask = continued["token_ids"], np.array(continued["padding_mask"])
    again = lm.preprocessor.tokenizer.detokenize(np.where(mask, ids, 0))
    assert continued["texts"] == again


@on_tensorflow
@pytest.mark.thorough
def test_a_model_with_an_encoder(tmp_path):
    lm = small_seq2seq.language_model(
        vocabulary_size=258,
        **small_seq2seq.LOCAL,
        preprocessor=models.RoutingTransformerSeq2SeqLMPreprocessor(
            tokenizers.ByteTokenizer(),
            encoder_sequence_length=small_seq2seq.INPUT_LENGTH,
            decoder_sequence_length=small_models.LENGTH,
        ),
    )
    served = load(lm, tmp_path, "--max_length=16")
    assert set(served.signatures) == {"generate", "generate_ids", "serving_default"}
    # Without the settings of sampling among its inputs.
    inputs = served.signatures["serving_default"].structured_input_signature[1]
    assert set(inputs) == {"texts"}
    default = served.signatures["serving_default"](texts=tf.constant(["hello"]))
    assert default["texts"].numpy() == served.generate(["hello"])["texts"].numpy()
    result = served.generate(["hello", "du"], temperature=0.0, length=15)
    texts = [text.decode() for text in result["texts"].numpy()]
    assert texts == greedy(lm, ["hello", "du"], max_length=16)
    ids = [[106, 103, 110, 110, 113, 1]]
    mask = np.ones_like(ids, "bool")
    same = served.generate_ids(ids, mask, temperature=0.0, length=15)["token_ids"]
    np.testing.assert_array_equal(same, result["token_ids"][:1])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"{small_seq2seq.INPUT_LENGTH} "
    ):
        served.generate(["a" * small_seq2seq.INPUT_LENGTH])
    lm = small_seq2seq.language_model(encoder_inputs="embeddings")
    with pytest.raises(ValueError, match="encoder_inputs='embeddings'"):
        lm.export(tmp_path)


@on_tensorflow
@pytest.mark.parametrize(
    "changes",
    [
        {"num_classes": 3, "routing": "expert_choice"},
        {"num_classes": None, "routing": "hashed", "compatibility": "trained"},
    ],
)
@pytest.mark.thorough
def test_images(changes, tmp_path):
    settings = small_models.hyperparameters(**{**IMAGES, **changes})
    model = models.RoutingImageTransformer(settings)
    small_models.randomize(model, 0)
    served = load(model, tmp_path)
    labels = [1, 2] if model.hyperparameters.num_classes else None
    first = {"num_images": 2} if labels is None else {"labels": labels}
    images = served.generate(**first, temperature=0.0)["images"]
    assert images.dtype == "uint8"
    expected = model.generate(num_images=2, labels=labels, sampler="greedy")
    np.testing.assert_array_equal(images, expected)
    drawn = [
        served.generate(**first, seed=seed)["images"].numpy() for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()
    given = {} if labels is None else {"labels": labels}
    score = served.score(images=drawn[0], **given)
    inputs = {name: np.asarray(value) for name, value in given.items()}
    inputs["images"] = drawn[0].astype("int32")
    inputs["padding_mask"] = np.ones_like(drawn[0], "bool")
    nats = TokenScorer(model).score(inputs, inputs["images"])
    np.testing.assert_allclose(score["log_likelihoods"], -nats, atol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`images`.* \[\[*7 "):
        served.score(images=np.full_like(drawn[0], 7), **given)


@on_tensorflow
def test_refused_exports(tmp_path):
    lm = small_models.language_model(num_layers=1, truncate_length=16)
    with pytest.raises(ValueError, match="`max_length`.*max_length=17"):
        lm.export(tmp_path, max_length=17)
    with pytest.raises(ValueError, match="`max_length`.*max_length=0"):
        lm.export(tmp_path, max_length=0)
    with pytest.raises(
        ValueError, match="`max_length`.* 1,048,576.*max_length=1,000,000,000"
    ):
        lm.export(tmp_path, max_length=10**9)
    with pytest.raises(ValueError, match="`routing_scope`.*routing_scope='both'"):
        lm.export(tmp_path, routing_scope="both")
    model = models.RoutingImageTransformer(small_models.hyperparameters(**IMAGES))
    with pytest.raises(ValueError, match="`max_length`.*max_length=8"):
        model.export(tmp_path, max_length=8)
    assert not any(tmp_path.iterdir())


def test_other_formats_are_left_to_keras(tmp_path, monkeypatch):
    """XLA could compile what it exports: shapes do not follow the data."""
    calls = []

    def export(self, *arguments):
        calls.append((*arguments, backends.may_follow_data()))

    monkeypatch.setattr(keras.Model, "export", export)
    monkeypatch.setattr(keras.distribution, "list_devices", lambda: ["cpu:0"])
    lm = small_models.language_model(num_layers=1)
    lm.export(tmp_path, format="onnx")
    lm.export(tmp_path, input_signature=[1], verbose=True)
    assert calls == [
        (tmp_path, "onnx", None, None, False),
        (tmp_path, "tf_saved_model", True, [1], False),
    ]


@on_tensorflow
def test_other_files_are_safe(tmp_path, capsys, monkeypatch):
    def export(self, folder, max_length, **options):
        (folder / "saved_model.pb").write_text(str(max_length))

    monkeypatch.setattr(models.RoutingTransformerCausalLM, "export", export)
    path, folder = tmp_path / "model.keras", tmp_path / "folder"
    small_models.language_model(num_layers=1, num_routed_heads=0).save(path)
    folder.mkdir()
    (folder / "thesis.txt").write_text("words")
    arguments = [f"--model_dir={path}", f"--export_dir={folder}"]
    assert run(*arguments) == 1
    assert "must be a new or empty folder, or an earlier" in capsys.readouterr().err
    assert run(f"--model_dir={path}", f"--export_dir={path}", "--overwrite") == 1
    assert not run(*arguments, "--overwrite")
    assert (folder / "thesis.txt").read_text() == "words"
    # An earlier export is replaced.
    assert not run(*arguments, "--max_length=12")
    assert (folder / "saved_model.pb").read_text() == "12"
    # The printed Python keeps within what the SavedModel takes.
    assert not run(*arguments, "--max_length=2")
    assert "tf.constant([[3, 1]])" in capsys.readouterr().out


@pytest.mark.skipif(ON_TENSORFLOW, reason="what other backends say")
def test_other_backends_say_how(tmp_path, capsys):
    lm, path, served = text_model(), tmp_path / "model.keras", tmp_path / "served"
    lm.save(path)
    with pytest.raises(
        ValueError, match=r"`KERAS_BACKEND=tensorflow .*routing_tf\.export "
    ):
        lm.export(served)
    paths = f"--model_dir={path}", f"--export_dir={served}"
    assert run(*paths) == 1
    command = f"python -m routing_tf.export {' '.join(paths)}"
    assert f"Run `KERAS_BACKEND=tensorflow {command}`" in capsys.readouterr().err
    assert not served.exists()
    done = command_line.python(*command.split()[1:], KERAS_BACKEND="tensorflow")
    assert done.returncode == 0, done.stderr
    loaded = tf.saved_model.load(str(served))  # holds its variables
    score = loaded.score(TEXTS)
    expected = [result.log_likelihood for result in lm.score(TEXTS)]
    np.testing.assert_allclose(score["log_likelihood"], expected, atol=1e-4)
