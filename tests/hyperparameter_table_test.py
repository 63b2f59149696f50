"""The documented hyperparameters are those that there are."""

import pathlib
import sys

from tools import hyperparameter_table

ROOT = pathlib.Path(__file__).parents[1]


def test_the_documentation_holds_the_tables():
    tables = hyperparameter_table.tables()
    assert f"<!-- hyperparameters -->\n{tables}<!-- end of hyperparameters -->" in (
        (ROOT / "docs/hyperparameters.md").read_text()
    )


def test_the_command_writes_a_file(monkeypatch, capsys, tmp_path):
    for flags in ([], [f"--output={tmp_path / 'table.md'}"]):
        monkeypatch.setattr(sys, "argv", ["hyperparameter_table.py", *flags])
        hyperparameter_table.main()
    tables = hyperparameter_table.tables()
    assert capsys.readouterr().out == tables == (tmp_path / "table.md").read_text()
