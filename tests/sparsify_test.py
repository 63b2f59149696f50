"""Tests of the command that changes models of keras_hub."""

import functools

import keras
import keras_hub
import pytest

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
    lm = keras_hub.models.CausalLM.from_preset(str(tmp_path / "sparse"))
    sparse = sum(score(lm, row) for row in scored[:3]) / 3
    original = keras_hub.models.CausalLM.from_preset(str(preset / "gpt2"))
    full = sum(score(original, row) for row in scored[:3]) / 3
    assert f"{sparse:.4f}; with full attention {full:.4f}" in said
    assert sparse != full


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"preset": "{}"}, "`--preset` must be a preset of a language model"),
        ({"keep_full": "first"}, "`--keep_full` must be auto, none, or numbers"),
        ({"keep_full": "7"}, "`--keep_full` must be 'auto' or indices"),
        ({"output_dir": "{}"}, "`--output_dir` must be a new or empty folder"),
        ({"calibration": None}, "`--calibration` must be given"),
        ({"evaluate": "{}/no*"}, "`--evaluate` must name existing files"),
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
