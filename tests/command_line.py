"""Runs commands in this process, and Python in processes of its own."""

import os
import pathlib
import subprocess
import sys

from absl import flags

from routing_tf.cli import commands

ROOT = pathlib.Path(__file__).parents[1]


def parse(command, *arguments):
    """Returns the flags of a command's module after its arguments are read."""
    values = flags.FlagValues()
    command.define_flags(values)
    assert len(values([command.__name__, *map(str, arguments)])) == 1
    return values


def run(command, *arguments, argv=("command",)):
    """Runs the command of a module; returns the exit code."""
    return commands.command(command.run, parse(command, *arguments), argv) or 0


def start(*arguments, folder=ROOT, stderr=subprocess.PIPE, **variables):
    """Starts Python in a process of its own, which finds the package.

    Args:
        *arguments: those of Python.
        folder: where it runs.
        stderr: where its errors go, as `subprocess` has it.
        **variables: further variables of its environment; None for none.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=folder,
        env={name: value for name, value in environment.items() if value is not None},
    )


def python(*arguments, **options):
    """Runs Python as `start` does, to its end."""
    process = start(*arguments, **options)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
