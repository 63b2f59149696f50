"""Runs commands in this process."""

from absl import flags

from routing_tf.cli import commands


def parse(command, *arguments):
    """Returns the flags of a command's module after its arguments are read."""
    values = flags.FlagValues()
    command.define_flags(values)
    values([command.__name__, *map(str, arguments)])
    return values


def run(command, *arguments, argv=("command",)):
    """Runs the command of a module; returns the exit code."""
    return commands.command(command.run, parse(command, *arguments), argv) or 0
