import functools
import os
import signal
import sys

import keras
import pytest
from absl import flags

from routing_tf.analysis import looks
from routing_tf.cli import analyse
from routing_tf.cli import commands
from routing_tf.cli import convert
from routing_tf.cli import datagen
from routing_tf.cli import evaluate
from routing_tf.cli import export
from routing_tf.cli import flag_kinds
from routing_tf.cli import generate
from routing_tf.cli import sparsify
from routing_tf.cli import train
from routing_tf.generation import display
from routing_tf.generation import texts
from routing_tf.layers.heads import routed
from routing_tf.models import build
from routing_tf.training import engines
from routing_tf.training import trainer
from tests.command_line import ROOT
from tests.command_line import parse
from tests.command_line import python
from tests.first_checks_test import SLOW
from tests.first_checks_test import alone

COMMANDS = (analyse, convert, datagen, evaluate, export, generate, sparsify, train)
PATHS = "model_dir data_dir raw_dir files texts init_checkpoint prompt_file output_file"
PATHS += " output_dir export_dir hparams_file vocabulary calibration evaluate"


def define(command):
    values = flags.FlagValues()
    command.define_flags(values)
    return values


@pytest.fixture
def options():
    return parse(train, "--model_dir=x")


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_that_are_paths(command, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    values = define(command)
    paths = set(PATHS.split()).intersection(values)
    if command is convert:
        paths.add("checkpoint")
    assert paths
    for name in paths:
        values[name].parse("~/runs/x")
        assert values[name].value == "/home/somebody/runs/x"
        for empty in ("", " "):
            with pytest.raises(flags.IllegalFlagValueError, match=f"--{name}="):
                values[name].parse(empty)


def test_lists_of_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    values = define(train)
    values["files"].parse("~/a*.txt, b.txt,")
    assert values.files == "/home/somebody/a*.txt,b.txt"
    with pytest.raises(flags.IllegalFlagValueError, match="--files=,"):
        values["files"].parse(",")
    options = flag_kinds.parse_problem_options(["test_files=~/a,b"])
    assert options == {"test_files": f"/home/somebody/a,{os.path.abspath('b')}"}
    options = flag_kinds.parse_problem_options(['source_files="a,b",c', "folder=a,b"])
    assert options == {
        "source_files": f'"{os.path.abspath("a,b")}",{os.path.abspath("c")}',
        "folder": os.path.abspath("a,b"),
    }
    with pytest.raises(
        ValueError, match="`--problem_option=vocabulary`.*'vocabulary='"
    ):
        flag_kinds.parse_problem_options(["vocabulary="])


def test_train_says_that_it_was_stopped_before_the_first_step(monkeypatch, capfd):
    before = signal.getsignal(signal.SIGTERM)
    stops = functools.partial(signal.raise_signal, signal.SIGTERM)
    monkeypatch.setattr(commands, "main", lambda *_: stops())
    try:
        with pytest.raises(SystemExit, match="0"):
            train.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "repeat the whole command" in capfd.readouterr().err


def test_nothing_is_named_twice():
    with pytest.raises(
        ValueError, match="`--problem_option=folder`.*'folder=b' .*folder='"
    ):
        flag_kinds.parse_problem_options(["folder=a", "folder=b"])
    options = parse(train, "--model_dir=m", "--files=a", "--problem_option=files=b")
    with pytest.raises(ValueError, match="`--files`.*`--problem_option=files`"):
        commands.problem_fields(options)


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


@pytest.mark.parametrize(
    "command, argument, code, answer",
    [
        *((command, "--help", 0, "flags:") for command in COMMANDS),
        (train, "--hlep", 1, "Unknown command line flag"),
    ],
)
def test_flags_are_read_before_anything_slow_is_imported(
    command, argument, code, answer
):
    name = command.__name__.rpartition(".")[2]
    done, imported = alone(ROOT, name, argument)
    assert done.returncode == code
    assert answer in done.stdout + done.stderr
    assert str(ROOT) not in done.stdout
    assert not imported & SLOW


def test_copies_equal_what_they_are_copies_of():
    owned = {
        "ROUTING_SCOPES": routed.ROUTING_SCOPES,
        "PRECISIONS": tuple(build.POLICIES),
        "STRATEGIES": engines.STRATEGIES,
        "ON_NAN": trainer.ON_NAN,
        "MAX_DEFAULT_LENGTH": texts.MAX_DEFAULT_LENGTH,
        "DEFAULT_LABELS": display.DEFAULT_LABELS,
        "DEFAULT_LENGTHS": looks.DEFAULT_LENGTHS,
        "DEFAULT_EXAMPLES": looks.DEFAULT_EXAMPLES,
    }
    copied = {
        name: getattr(flag_kinds, name) for name in vars(flag_kinds) if name.isupper()
    }
    assert copied == owned


def test_keras_without_a_backend(options, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    with pytest.raises(SystemExit, match="KERAS_BACKEND=None"):
        commands.command(lambda _: None, options, [""])


def test_notes_of_tensorflow_are_left_out(monkeypatch, capfd):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    notes = b"I0000 0.1 port.cc:153] oneDNN is on\nE0000 0.2 bad.cc:1] bad\n"
    no_gpu = b"E0000 0.3 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA\n"
    for level in (None, "2", "3"):
        if level is not None:
            monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
        with commands.without_notes_of_tensorflow():
            os.write(2, notes + no_gpu)
        assert capfd.readouterr().err == "E0000 0.2 bad.cc:1] bad\n"
        assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == (level or "3")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    with commands.without_notes_of_tensorflow():
        os.write(2, b"I0000 0.3 port.cc:153] oneDNN is on\n")
    assert "oneDNN" in capfd.readouterr().err  # as whoever set it wants


def test_a_process_keeps_its_backend(options, capsys):
    running = keras.backend.backend()
    (other,) = set(commands.BACKENDS) - {running}
    options.backend = other
    assert commands.command(lambda _: None, options, [""]) == 1
    assert capsys.readouterr().err == (
        "error: `--backend` must be that of the Keras that this process has imported "
        f"already, {running}. Received: --backend={other}\n"
    )


def test_another_backend_of_keras(options, monkeypatch, capsys):
    monkeypatch.setattr("keras.backend.backend", lambda: "torch")
    assert commands.command(lambda _: None, options, [""]) == 1
    assert capsys.readouterr().err == (
        "error: The backend of Keras must be tensorflow or jax. Received: torch. Pass "
        "--backend or set KERAS_BACKEND\n"
    )


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_interrupt_ends_a_command(is_wrapped, options, capsys):
    def run(options):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if is_wrapped:  # by C code that finds it, whose error Keras raises again
                raise SystemError("returned a result") from None
            raise

    assert commands.command(run, options, ["evaluate"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_other_system_errors_stay(options):
    def run(options):
        raise SystemError("system_error")

    with pytest.raises(SystemError, match="system_error"):
        commands.command(run, options, ["evaluate"])


@pytest.mark.thorough
def test_the_first_line_of_a_command_is_no_error(tmp_path):
    """Also where TensorFlow finds no driver of a GPU, of which it tells as an error."""
    (tmp_path / "run.json").touch()  # so that TensorFlow is imported
    arguments = ("-m", "routing_tf.evaluate", f"--model_dir={tmp_path}")
    done = python(*arguments, TF_CPP_MIN_LOG_LEVEL=None)
    assert done.returncode == 1
    assert done.stderr.startswith("error: `--model_dir` must hold a run.json")


def test_messages_name_flags(options, capsys):
    def run(options):
        raise ValueError(
            "`seed` must be small. Received: seed=3, --hparams=seed=4 in 'seed=5', "
            "with my_seed=6 and model_dir='x'"
        )

    assert commands.command(run, options, ["train"]) == 1
    assert capsys.readouterr().err == (
        "error: `--seed` must be small. Received: --seed=3, --hparams=seed=4 in "
        "'seed=5', with my_seed=6 and --model_dir='x'\n"
    )
