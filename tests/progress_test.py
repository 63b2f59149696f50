import io
import sys
import types

import pytest

from routing_tf.files import progress
from routing_tf.training import log


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def seconds(monkeypatch):
    """The time, which goes on as the test says."""
    seconds = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds[0])
    return seconds


def test_the_time_left_does_not_count_the_first_item(seconds, capsys):
    for item in progress.progress(iter("abcdef"), "batch", total=6):
        seconds[0] += 600 if item == "a" else 6
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["batch 1/6", "batch 3/6: 00:18 left", "batch 5/6: 00:06 left"]


@pytest.fixture
def clock(monkeypatch):
    """The clock of progress bars on a terminal, which goes on as the test says."""
    clock = [1000.0]
    for name in ("time.time", "tqdm.std.time"):
        monkeypatch.setattr(name, lambda: clock[0])
    return clock


def test_the_bar_of_training_does_not_count_it_either(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    problem = types.SimpleNamespace(metric_name="nats", train_split="train")
    problem.metric = lambda loss, split: loss
    with log.ProgressLog(tmp_path, 0, 60, problem) as bar:
        window = log.Window(num_losses=1)
        clock[0] += 600
        bar.progress(1, window)
        for step in (2, 3):
            clock[0] += 6
            window = log.Window(num_losses=1, num_timed=1, seconds=6.0, num_tokens=6.0)
            bar.progress(step, window)
    shown = sys.stderr.getvalue()
    assert "1/60 [00:00<?" in shown and "3/60 [00:12<05:42" in shown


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
