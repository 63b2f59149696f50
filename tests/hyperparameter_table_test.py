"""The documented hyperparameters are those that there are."""

import sys

import pytest

from tools import hyperparameter_table

pytestmark = pytest.mark.slow


def test_the_documentation_holds_the_tables(monkeypatch, tmp_path):
    page = hyperparameter_table.PAGE.read_text()
    assert hyperparameter_table.tables() in page
    assert hyperparameter_table.renewed(page) == page
    old = tmp_path / "page.md"
    old.write_text(page.replace("| `num_layers` |", "| `depth` |"))
    monkeypatch.setattr(hyperparameter_table, "PAGE", old)
    monkeypatch.setattr(sys, "argv", ["hyperparameter_table.py", "--write"])
    hyperparameter_table.main()
    assert old.read_text() == page


def test_the_command_writes_a_file(monkeypatch, capsys, tmp_path):
    for flags in ([], [f"--output={tmp_path / 'table.md'}"]):
        monkeypatch.setattr(sys, "argv", ["hyperparameter_table.py", *flags])
        hyperparameter_table.main()
    tables = hyperparameter_table.tables()
    assert capsys.readouterr().out == tables == (tmp_path / "table.md").read_text()
