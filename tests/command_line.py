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
    values([command.__name__, *map(str, arguments)])
    return values


def run(command, *arguments, argv=("command",)):
    """Runs the command of a module; returns the exit code."""
    return commands.command(command.run, parse(command, *arguments), argv) or 0


def python(*arguments, folder=ROOT, **variables):
    """Runs Python in a process of its own, which finds the package.

    Args:
        *arguments: those of Python.
        folder: where it runs.
        **variables: further variables of its environment; None for none.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={name: value for name, value in environment.items() if value is not None},
    )
