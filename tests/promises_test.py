import pytest

from tools import break_promises


def test_every_promise_can_be_broken():
    """What an entry changes stands once in its file, and its tests are there."""
    assert len(break_promises.promises()) > 50


def test_an_entry_that_fits_no_longer_is_refused(tmp_path):
    folder = tmp_path / "tests" / "promises"
    folder.mkdir(parents=True)
    (tmp_path / "code.py").write_text("x = 1\n")
    entry = {"kind": "fault", "text": "x", "test": "code.py", "file": "code.py"}
    entry |= {"old": "y = 1", "new": ""}
    lines = [f'{name} = "{value}"' for name, value in entry.items()]
    (folder / "area.toml").write_text("\n".join(["[[promise]]", *lines]))
    with pytest.raises(ValueError, match=r"area\.toml, .* 1: `old` "):
        break_promises.promises(tmp_path)
