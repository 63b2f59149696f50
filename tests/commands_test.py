import os
import runpy
import sys

import pytest
from absl import flags

import routing_tf
from routing_tf import analyse
from routing_tf import commands
from routing_tf import convert
from routing_tf import datagen
from routing_tf import evaluate
from routing_tf import export
from routing_tf import generate
from routing_tf import train

COMMANDS = (analyse, convert, datagen, evaluate, export, generate, train)
PATHS = {
    "model_dir",
    "data_dir",
    "raw_dir",
    "files",
    "texts",
    "init_checkpoint",
    "prompt_file",
    "output_file",
    "output_dir",
    "export_dir",
    "hparams_file",
    "vocabulary",
}


def define(command):
    values = flags.FlagValues()
    command.define_flags(values)
    return values


@pytest.fixture
def options():
    values = define(evaluate)
    values(["evaluate", "--model_dir=x"])
    return values


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_that_are_paths(command, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    values = define(command)
    paths = PATHS.intersection(values)
    if command is convert:
        paths.add("checkpoint")
    assert paths
    for name in paths:
        values[name].parse("~/runs/x")
        assert values[name].value == "/home/somebody/runs/x"
        for empty in ("", " "):
            with pytest.raises(flags.IllegalFlagValueError, match="must be a path"):
                values[name].parse(empty)


def test_lists_of_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    values = define(train)
    values["files"].parse("~/a*.txt, b.txt,")
    assert values.files == "/home/somebody/a*.txt,b.txt"
    with pytest.raises(flags.IllegalFlagValueError, match="must be a path"):
        values["files"].parse(",")
    options = commands.parse_problem_options(["test_files=~/a,b"])
    assert options == {"test_files": f"/home/somebody/a,{os.path.abspath('b')}"}
    with pytest.raises(ValueError, match="must name a path. Received: 'vocabulary='"):
        commands.parse_problem_options(["vocabulary="])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_all_flags(command):
    values = define(command)
    shown = values.get_key_flags_for_module(command.__name__)
    assert {flag.name for flag in shown} == set(values)


@pytest.mark.parametrize("flush", [True, False])
def test_nobody_reads(flush, options, monkeypatch):
    receiver, sender = os.pipe()
    os.close(receiver)
    with open(sender, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        code = commands.command(lambda _: print("text", flush=flush), options, [""])
    assert code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_keras_without_a_backend(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    monkeypatch.delitem(sys.modules, "routing_tf.commands")
    monkeypatch.delattr(routing_tf, "commands")
    with pytest.raises(SystemExit, match="error: Keras must have a backend that it"):
        runpy.run_path(command.__file__)


def test_another_backend_of_keras(options, monkeypatch, capsys):
    monkeypatch.setattr("keras.backend.backend", lambda: "torch")
    assert commands.command(lambda _: None, options, [""]) == 1
    assert capsys.readouterr().err == (
        "error: The backend of Keras must be tensorflow or jax. Received: torch. Pass "
        "--backend or set KERAS_BACKEND\n"
    )
