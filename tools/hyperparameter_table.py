"""Prints the tables of hyperparameters of docs/hyperparameters.md.

Usage: python tools/hyperparameter_table.py [--write | --output=FILE]
"""

import argparse
import pathlib

from routing_tf.settings import registries
from routing_tf.settings.hyperparameters import HYPERPARAMETERS
from routing_tf.settings.hyperparameters import by_subject

PAGE = pathlib.Path(__file__).parents[1] / "docs/hyperparameters.md"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", help="file to write instead of standard output")
    parser.add_argument("--write", action="store_true", help="renew the page itself")
    flags = parser.parse_args()
    if flags.write:
        PAGE.write_text(renewed(PAGE.read_text()))
    elif flags.output:
        pathlib.Path(flags.output).write_text(tables())
    else:
        print(tables(), end="")


def renewed(page):
    """Returns the text of a page with the tables of today."""
    before, start, rest = page.partition("<!-- hyperparameters -->\n")
    _, end, after = rest.partition("<!-- end of hyperparameters -->")
    return f"{before}{start}{tables()}{end}{after}"


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
