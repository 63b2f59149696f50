"""Prints the tables of hyperparameters of docs/hyperparameters.md.

Usage: python tools/hyperparameter_table.py [--output=FILE]
"""

import argparse
import pathlib

from routing_tf.settings import registries
from routing_tf.settings.hyperparameters import HYPERPARAMETERS
from routing_tf.settings.hyperparameters import by_subject


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
    lines = []
    for subject, names in by_subject().items():
        lines += [f"## {subject}", "", "| name | default | meaning |"]
        lines.append("| --- | --- | --- |")
        for name in names:
            own = HYPERPARAMETERS[name]
            meaning = own.meaning.replace("|", r"\|")
            if own.values.registry:
                choices = registries.choices(own.values)
                listed = ", ".join(f'`"{choice}"`' for choice in choices)
                meaning = meaning.replace("{names}", listed)
            lines.append(f"| `{name}` | `{as_flag(own.default)}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def as_flag(value):
    """Returns a value as `--hparams` takes it."""
    is_word = value is None or isinstance(value, bool)
    return str(value).lower() if is_word else str(value)


if __name__ == "__main__":
    main()
