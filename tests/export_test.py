"""Tests of the command that writes SavedModels."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags

from routing_tf import models
from routing_tf import tokenizers
from routing_tf.cli import commands
from routing_tf.cli import export
from tests.models import small_models

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
on_tensorflow = pytest.mark.skipif(
    not ON_TENSORFLOW, reason="SavedModels are made on the TensorFlow backend"
)
LOCAL = {"num_layers": 1, "num_routed_heads": 0}


def run(*arguments):
    values = flags.FlagValues()
    export.define_flags(values)
    values(["export", *map(str, arguments)])
    return commands.command(export.run, values, ["export"])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A saved model of texts."""
    preprocessor = models.RoutingTransformerCausalLMPreprocessor(
        tokenizers.ByteTokenizer()
    )
    lm = small_models.language_model(
        preprocessor=preprocessor, vocabulary_size=258, **LOCAL
    )
    path = tmp_path_factory.mktemp("model") / "model.keras"
    lm.save(path)
    return path


def run_snippet(out):
    """Runs the Python that the command has printed."""
    _, _, snippet = out.partition("this uses it:\n\n")
    exec("\n".join(line.removeprefix("    ") for line in snippet.splitlines()), {})


@on_tensorflow
def test_exports_a_model_of_texts(path, tmp_path, capsys):
    arguments = [f"--model_dir={path}", f"--export_dir={tmp_path / 'served'}"]
    assert not run(*arguments, "--max_length=20")
    out = capsys.readouterr().out
    assert "\nscore(texts: string[?]) -> log_likelihoods: float32[?, ?], " in out
    assert "\ngenerate(texts: string[?], temperature: float32[], top_k: " in out
    assert "tensorflow_text" not in out
    served = tf.saved_model.load(str(tmp_path / "served"))
    assert served.generate(["a"])["token_ids"].shape == (1, 20)
    run_snippet(out)
    assert "It was" in capsys.readouterr().out


@pytest.mark.thorough
@on_tensorflow
@pytest.mark.parametrize(
    "tokenizer_class, options",
    [(tokenizers.SubwordTokenizer, [64]), (tokenizers.WordTokenizer, [])],
)
def test_only_subwords_need_tensorflow_text(tokenizer_class, options, tmp_path, capsys):
    texts = ["It was a dark night"]
    tokenizer = tokenizer_class(tokenizer_class.build_vocabulary(texts, *options))
    lm = small_models.language_model(
        preprocessor=models.RoutingTransformerCausalLMPreprocessor(tokenizer),
        vocabulary_size=tokenizer.vocabulary_size(),
        **{**LOCAL, "max_sequence_length": 64},
    )
    lm.save(tmp_path / "model.keras")
    served = tmp_path / "served"
    assert not run(f"--model_dir={tmp_path / 'model.keras'}", f"--export_dir={served}")
    out = capsys.readouterr().out
    assert ("import tensorflow_text" in out) == bool(options)
    run_snippet(out)
    assert "It was" in capsys.readouterr().out


@pytest.mark.thorough
@on_tensorflow
def test_exports_models_of_ids_and_images(tmp_path, capsys):
    small_models.language_model(**LOCAL).save(tmp_path / "ids.keras")
    image = {"image_height": 2, "image_width": 4, "max_sequence_length": 8}
    for num_classes in (None, 3):
        h = small_models.hyperparameters(**LOCAL, **image, num_classes=num_classes)
        model = models.RoutingImageTransformer(h)
        model.save(tmp_path / f"images_{num_classes}.keras")
    for name in ("ids", "images_None", "images_3"):
        model, served = tmp_path / f"{name}.keras", tmp_path / name
        assert not run(f"--model_dir={model}", f"--export_dir={served}")
        run_snippet(capsys.readouterr().out)


@on_tensorflow
def test_other_files_are_safe(path, tmp_path, capsys, monkeypatch):
    def export(self, folder, max_length, **options):
        (folder / "saved_model.pb").write_text(str(max_length))

    monkeypatch.setattr(models.RoutingTransformerCausalLM, "export", export)
    (tmp_path / "thesis.txt").write_text("words")
    arguments = [f"--model_dir={path}", f"--export_dir={tmp_path}"]
    assert run(*arguments) == 1
    assert "must be a new or empty folder, or an earlier" in capsys.readouterr().err
    assert run(f"--model_dir={path}", f"--export_dir={path}", "--overwrite") == 1
    assert not run(*arguments, "--overwrite")
    assert (tmp_path / "thesis.txt").read_text() == "words"
    # An earlier export is replaced.
    assert not run(*arguments, "--max_length=12")
    assert (tmp_path / "saved_model.pb").read_text() == "12"


@on_tensorflow
def test_mistakes_are_one_line_on_stderr(tmp_path, capsys):
    folder = f"--export_dir={tmp_path / 'served'}"
    assert run(f"--model_dir={tmp_path}", folder) == 1
    assert "`--model_dir` must hold a run" in capsys.readouterr().err
    with pytest.raises(flags.IllegalFlagValueError):
        run(f"--model_dir={tmp_path}", folder, "--max_length=0")
    assert not (tmp_path / "served").exists()


@pytest.mark.thorough
@on_tensorflow
def test_the_routing_scope_is_that_of_score(tmp_path):
    lm = small_models.language_model(num_layers=1, routing="expert_choice")
    lm.save(tmp_path / "model.keras")
    ids = small_models.inputs()["token_ids"]
    for scope in ("full", "prefix"):
        model, served = tmp_path / "model.keras", tmp_path / scope
        arguments = [f"--model_dir={model}", f"--export_dir={served}"]
        assert not run(*arguments, f"--routing_scope={scope}")
        served = tf.saved_model.load(str(served))
        score = served.score(ids, np.ones_like(ids, "bool"))["log_likelihood"]
        expected = [s.log_likelihood for s in lm.score(ids, routing_scope=scope)]
        np.testing.assert_allclose(score, expected, atol=1e-3)


@pytest.mark.skipif(ON_TENSORFLOW, reason="what other backends say")
def test_other_backends_say_how(path, tmp_path, capsys):
    assert run(f"--model_dir={path}", f"--export_dir={tmp_path / 'served'}") == 1
    assert (
        "Run `KERAS_BACKEND=tensorflow python -m routing_tf.export "
        f"--model_dir={path} --export_dir={tmp_path / 'served'}`"
    ) in capsys.readouterr().err
