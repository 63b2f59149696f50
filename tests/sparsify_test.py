"""Tests of the command that changes models of keras_hub."""

import functools

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from routing_tf.cli import analyse
from routing_tf.cli import evaluate
from routing_tf.cli import export
from routing_tf.cli import generate
from routing_tf.cli import sparsify
from routing_tf.retrofit import scoring
from tests import command_line

run = functools.partial(command_line.run, sparsify)
TEXT = "a cab, a bad cab; add a bead\n" * 8


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    """Returns a folder with a small GPT-2, and files of text."""
    folder = tmp_path_factory.mktemp("preset")
    letters = [
        *sorted(set(TEXT.replace(" ", "Ġ").replace("\n", "Ċ"))),
        "ad",
        "<|endoftext|>",
    ]
    tokenizer = keras_hub.models.GPT2Tokenizer(
        {letter: number for number, letter in enumerate(letters)}, merges=["a d"]
    )
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(letters),
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=256,
    )
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, 32)
    lm = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor)
    lm.save_to_preset(str(folder / "gpt2"))
    (folder / "calibration.txt").write_text(TEXT)
    (folder / "other.txt").write_text(TEXT[::-1])
    return folder


def arguments_for(preset, tmp_path):
    sizes = {"num_recent": 8, "attention_window": 8, "num_clusters": 4, "length": 64}
    return [
        f"--preset={preset / 'gpt2'}",
        f"--calibration={preset / 'calibration.txt'}",
        f"--output_dir={tmp_path / 'sparse'}",
        f"--evaluate={preset / 'other*'}",
        "--keep_full=1",
        *(f"--{name}={size}" for name, size in sizes.items()),
    ]


def test_a_changed_model_is_written_and_scored_once(
    preset, tmp_path, capsys, monkeypatch
):
    scored, score, stop_after = [], scoring.nats, 4

    def nats(lm, row):
        if len(scored) == stop_after:
            raise KeyboardInterrupt
        scored.append(row)
        return score(lm, row)

    monkeypatch.setattr(scoring, "nats", nats)
    arguments = arguments_for(preset, tmp_path)
    assert run(*arguments) == 130
    out = capsys.readouterr().out
    assert "MultipoleHeads" in out and "`keep_full`" in out and "from_preset" in out
    stop_after = 6
    assert run(*arguments) == 0
    assert len(scored) == 6  # three windows of two models
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("nats per token: ")
    assert run(*arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert run(*arguments[:3], "--num_recent=9") == 1
    assert "`--num_recent` must be that of the call" in capsys.readouterr().err
    lm = keras_hub.models.CausalLM.from_preset(str(tmp_path / "sparse"))
    sparse = sum(score(lm, row) for row in scored[:3]) / 3
    original = keras_hub.models.CausalLM.from_preset(str(preset / "gpt2"))
    full = sum(score(original, row) for row in scored[:3]) / 3
    assert f"{sparse:.4f}; with full attention {full:.4f}" in said
    assert sparse != full


@pytest.fixture(scope="module")
def sparse(preset):
    """Returns a folder with the changed model."""
    assert run(*arguments_for(preset, preset)[:3], "--num_clusters=4") == 0
    return preset / "sparse"


@pytest.mark.usefixtures("eager")
@pytest.mark.thorough
def test_other_commands_take_the_changed_model(preset, sparse, capsys):
    lm = keras_hub.models.CausalLM.from_preset(str(sparse))
    lm.compile(sampler="greedy")
    flags = ["--sampler=greedy", "--prompt=a cab", "--max_length=20"]
    capsys.readouterr()
    assert command_line.run(generate, f"--model_dir={sparse}", *flags) == 0
    expected = lm.generate("a cab", max_length=20)
    assert len(expected) > len("a cab")
    assert capsys.readouterr().out.strip("\n") == expected.strip("\n")

    flags = [f"--texts={preset / 'other.txt'}", "--length=50"]
    assert command_line.run(evaluate, f"--model_dir={sparse}", *flags) == 0
    said = capsys.readouterr().out.splitlines()
    start, text = lm.preprocessor.tokenizer.start_token_id, TEXT[::-1]
    ids, total = np.asarray(lm.preprocessor.tokenizer(text)), 0.0
    for row in np.split(ids, range(50, len(ids), 50)):
        given = np.concatenate([[start], row[:-1]])[None]
        inputs = {"token_ids": given, "padding_mask": np.ones_like(given)}
        logits = keras.ops.convert_to_numpy(lm(inputs))[0].astype("float64")
        shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        total -= np.log2(shares[np.arange(len(row)), row]).sum()
    assert said[-1] == f"held-out bits per byte: {total / len(text):.4f}"
    assert "strictly causal: no later token influences a score" in said

    flags = ["--what=causality", f"--text={text[:40]}"]
    assert command_line.run(analyse, f"--model_dir={sparse}", *flags) == 0
    assert "strictly causal" in capsys.readouterr().out


@pytest.mark.slow
def test_the_changed_model_is_exported(sparse, tmp_path):
    lm = keras_hub.models.CausalLM.from_preset(str(sparse))
    served = tmp_path / "served"
    flags = [f"--model_dir={sparse}", f"--export_dir={served}"]
    assert command_line.run(export, *flags) == 0
    ids = np.arange(40, dtype="int32")[None] % lm.backbone.vocabulary_size
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    served = tf.saved_model.load(str(served))
    np.testing.assert_allclose(served.serve(inputs), lm(inputs), atol=1e-5)


@pytest.mark.parametrize(
    "command, flags, message",
    [
        (generate, ["--stream"], "--stream has no effect with a model of keras_hub"),
        (generate, ["--prompt=" + TEXT], "`--max_length` must be longer than every"),
        (analyse, ["--what=reads"], "`--what` must be causality, and `--text` given"),
        (evaluate, [], "`--model_dir` must hold a run"),
    ],
)
def test_mistakes_with_the_changed_model(command, flags, message, sparse, refused):
    assert refused(command, f"--model_dir={sparse}", *flags).startswith(message)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"preset": "{}"}, "`--preset` must be a preset of a language model"),
        ({"keep_full": "first"}, "`--keep_full` must be auto, none, or numbers"),
        ({"keep_full": "7"}, "`--keep_full` must be 'auto' or indices"),
        ({"output_dir": "{}"}, "`--output_dir` must be a new or empty folder"),
        ({"calibration": None}, "`--calibration` must be given"),
        ({"evaluate": "{}/no*"}, "`--evaluate` must name existing files"),
        ({"length": "250"}, "`--evaluate` must have a text of at least 250"),
        ({"num_clusters": "999"}, "`--calibration` must have at least as many tokens"),
        ({"clusters_per_query": "9"}, "`--clusters_per_query` must be at most"),
    ],
)
def test_mistakes(flags, message, preset, tmp_path, refused):
    (tmp_path / "file").touch()
    given = [
        each
        for each in arguments_for(preset, tmp_path)
        if each[2:].partition("=")[0] not in flags
    ]
    for name, value in flags.items():
        given += [] if value is None else [f"--{name}={value.format(tmp_path)}"]
    assert refused(sparsify, *given).startswith(message)
    assert not (tmp_path / "sparse").exists()
