import configparser
import functools
import importlib
import os
import shutil
import subprocess
import sys

import pytest

from routing_tf import __main__ as front
from routing_tf.cli import datagen
from tests.command_line import ROOT
from tests.command_line import python

run = functools.partial(python, "-m", "routing_tf")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_commands_are_listed(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["routing_tf", *arguments])
    assert front.main() == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(front.COMMANDS)
    assert lines[1].startswith("  train     Trains a language model and reports how")


def test_every_command_is_one():
    there = {
        path.stem
        for path in (ROOT / "routing_tf" / "cli").glob("*.py")
        if "commands.main(" in path.read_text()
    }
    assert there == set(front.COMMANDS)
    for name in there:
        stub = importlib.import_module(f"routing_tf.{name}")
        command = importlib.import_module(f"routing_tf.cli.{name}")
        for part in ("__doc__", "define_flags", "main", "run"):
            assert getattr(stub, part) is getattr(command, part)


def test_a_command_runs_as_by_its_own_name():
    done = run("evaluate", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Scores held-out data with the last checkpoint")
    assert "python -m routing_tf.evaluate:" in done.stdout
    done = run("evaluate", "--model_dir=no/where")
    assert done.returncode == 1
    assert done.stderr.startswith("error: `--model_dir` must hold a run")


def test_help_has_required_flags_first_and_others_by_subject():
    lines = run("datagen", "--help").stdout.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  --")]
    others = [f"--{name}:" for name in datagen.FLAGS]
    required = ["--problem:", "--data_dir:"]
    assert names == [*required, *[name for name in others if name not in required]]
    lines = run("evaluate", "--help").stdout.splitlines()
    assert "    (default: test)" in lines


def test_unknown_commands(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["routing_tf", "trian"])
    assert front.main() == 1
    err = capsys.readouterr().err
    assert err.startswith("error: The first argument must be a command. Received: ")
    assert "Did you mean 'train'?" in err


def test_the_console_script():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    scripts = config["options.entry_points"]["console_scripts"].split("\n")
    name, _, place = scripts[1].partition(" = ")
    module, _, function = place.partition(":")
    assert name == "routing-tf"
    assert getattr(importlib.import_module(module), function) is front.main


def test_what_is_required_is_told_with_its_choices():
    done = run("analyse", "--model_dir=x")
    assert done.returncode == 1
    assert "--what must be given (causality|decoding|jsd|maps|reads): " in done.stderr
    required = run("analyse", "-h").stdout.partition("--model_dir:")[2]
    assert "Required." in required.partition("\n  --")[0]


@pytest.mark.slow
def test_the_console_script_of_an_installed_wheel(tmp_path):
    pytest.importorskip("setuptools")
    copied = tmp_path / "source"
    for path in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        copied.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, copied)
    shutil.copytree(ROOT / "routing_tf", copied / "routing_tf")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([*build, copied], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    place = tmp_path / "installed"
    install = [*pip, "install", "-q", "--no-deps", "--no-index", "--target", place]
    subprocess.run([*install, wheel], check=True)

    def run_script(*arguments):
        return subprocess.run(
            [place / "bin" / "routing-tf", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(place)},
        )

    listed = run_script()
    assert listed.returncode == 0
    for name in front.COMMANDS:
        assert f"\n  {name} " in listed.stdout
        shown = run_script(name, "--help")
        assert shown.returncode == 0 and "Required." in shown.stdout
    refused = run_script("evaluate", "--model_dir=no/where")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: `--model_dir` must hold a run")
    for data in ("problems/builders/checksums.tsv", "settings/release_sets.json"):
        assert (place / "routing_tf" / data).exists()
