import io
import sys

import pytest

from routing_tf.files import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def seconds(monkeypatch):
    """The time, which goes on as the test says."""
    seconds = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds[0])
    return seconds


def test_lines_now_and_then(seconds, capsys):
    for _ in progress.progress(iter("abcdef"), "batch", total=6):
        seconds[0] += 6
    assert capsys.readouterr().err == ("batch 2/6: 00:24 left\nbatch 4/6: 00:12 left\n")


def test_what_is_done_soon_tells_nothing(capsys):
    assert list(progress.progress([1, 2], "batch")) == [1, 2]
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "SECONDS_BEFORE_PROGRESS", 0)
    assert list(progress.progress([1, 2], "batch")) == [1, 2]
    assert "2/2" in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(progress.progress([1, 2], "batch", verbose=False)) == [1, 2]
    assert sys.stderr.getvalue() == ""
