"""Prints the tables of hyperparameters of docs/hyperparameters.md.

Usage: python tools/hyperparameter_table.py [--output=FILE]
"""

import argparse
import dataclasses
import inspect
import pathlib
import re

from routing_tf.cli import known_names
from routing_tf.models import Hyperparameters


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", help="file to write instead of standard output")
    flags = parser.parse_args()
    if flags.output:
        pathlib.Path(flags.output).write_text(tables())
    else:
        print(tables(), end="")


def tables():
    """Returns a table of each subject, in Markdown."""
    meanings = descriptions()
    fields = {field.name: field for field in dataclasses.fields(Hyperparameters)}
    lines = []
    for subject, names in known_names.HYPERPARAMETERS.items():
        lines += [f"## {subject}", "", "| name | default | meaning |"]
        lines.append("| --- | --- | --- |")
        for name in names:
            default = as_flag(fields[name].default)
            lines.append(f"| `{name}` | `{default}` | {meanings[name]} |")
        lines.append("")
    return "\n".join(lines)


def descriptions():
    """Returns what the docstrings say of each hyperparameter, by name."""
    items = []
    for cls in reversed(Hyperparameters.__bases__):
        arguments = inspect.getdoc(cls).partition("\nArgs:\n")[2]
        items += re.findall(r"^    (\w+): (.*(?:\n     .*)*)", arguments, re.MULTILINE)
    return {name: " ".join(text.split()).replace("|", r"\|") for name, text in items}


def as_flag(value):
    """Returns a value as `--hparams` takes it."""
    is_word = value is None or isinstance(value, bool)
    return str(value).lower() if is_word else str(value)


if __name__ == "__main__":
    main()
