"""Training for the same time: steps follow the speed, and nothing is run twice."""

import json
import pathlib

import pytest

from benchmarks import compare_patterns
from benchmarks import equal_time
from tests import command_line

SPEEDS = {"local": 100.0, "multipole": 50.0}


@pytest.fixture
def calls(monkeypatch):
    """Replaces timing, training and scores; returns what was trained."""
    calls = []

    def time_steps(models, rounds, hparams):
        return [(SPEEDS[pattern], 7) for pattern, _ in models]

    def train(folder, pattern, key_shift, seed, steps, **settings):
        calls.append((pattern, steps, settings["hparams"]))
        pathlib.Path(folder).mkdir(parents=True)
        lines = [{"step": 0, "loss": 6.0}]
        lines += [{"step": at, "held_out_bits_per_byte": 8.0 - at} for at in (0, 2)]
        pathlib.Path(folder, "metrics.jsonl").write_text(
            "\n".join(json.dumps(line) for line in lines)
        )

    monkeypatch.setattr(compare_patterns, "time_steps", time_steps)
    monkeypatch.setattr(compare_patterns, "train", train)
    monkeypatch.setattr(compare_patterns, "score", lambda *_: {"full": 1.25})
    return calls


def test_steps_follow_the_speed_and_a_second_call_trains_nothing(
    calls, tmp_path, capsys
):
    options = command_line.parse(
        equal_time,
        f"--output_dir={tmp_path / 'runs'}",
        f"--results={tmp_path / 'figures.json'}",
        f"--plot={tmp_path / 'plot.png'}",
        "--patterns=local,multipole",
        "--minutes=3",
        "--length=100",
    )
    equal_time.run(options)
    settings = "max_sequence_length=100,batch_tokens=100,warmup_steps="
    assert calls == [
        ("local", 180, settings + "16"),
        ("multipole", 90, settings + "8"),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "| local | 100 | 180 | 0.0 million | 1.250 |",
        "| multipole | 50 | 90 | 0.0 million | 1.250 |",
    ]
    runs = compare_patterns.Figures(options.results).find(kind="bits")
    assert [run["curve"] for run in runs] == [[[0, 8.0], [2, 6.0]]] * 2
    assert (tmp_path / "plot.png").stat().st_size > 0

    equal_time.run(options)
    assert len(calls) == 2
    assert capsys.readouterr().out.splitlines() == lines
