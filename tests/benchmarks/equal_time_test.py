"""Training for the same time: steps follow the speed, and nothing is run twice."""

import json
import pathlib

import pytest

from benchmarks import compare_patterns
from benchmarks import equal_time
from tests import command_line

SPEEDS = {"local": 100_000.0, "multipole": 50_000.0, "full": 10.0}


@pytest.fixture
def calls(monkeypatch):
    """Replaces timing, training and scores; returns what was timed and trained."""
    calls = []

    def time_steps(models, rounds, hparams):
        calls.append(models)
        return [(SPEEDS[pattern], 7) for pattern, _ in models]

    def train(folder, pattern, key_shift, seed, steps, **settings):
        calls.append((pattern, steps, settings))
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


def test_steps_follow_the_speed_and_what_is_there_is_not_run_again(
    calls, tmp_path, capsys
):
    def run(patterns):
        options = command_line.parse(
            equal_time,
            f"--output_dir={tmp_path / 'runs'}",
            f"--results={tmp_path / 'figures.json'}",
            f"--plot={tmp_path / 'plot.png'}",
            f"--patterns={patterns}",
            "--minutes=3",
            "--length=100000",
        )
        equal_time.run(options)
        return capsys.readouterr().out.splitlines()

    def trained(pattern, steps, warm_up, eval_every):
        hparams = "max_sequence_length=100000,batch_tokens=100000"
        hparams += f",warmup_steps={warm_up}"
        settings = {"hparams": hparams, "eval_every": eval_every, "eval_examples": 8}
        return pattern, steps, settings

    lines = run("local,multipole")
    expected = [
        [("local", 1), ("multipole", 1)],
        trained("local", 180, 16, 18),
        trained("multipole", 90, 8, 9),
    ]
    assert calls == expected
    assert lines[2:] == [
        "| local | 100,000 | 180 | 18.0 million | 1.250 |",
        "| multipole | 50,000 | 90 | 9.0 million | 1.250 |",
    ]
    runs = compare_patterns.Figures(tmp_path / "figures.json").find(kind="bits")
    assert [run["curve"] for run in runs] == [[[0, 8.0], [2, 6.0]]] * 2
    assert (tmp_path / "plot.png").stat().st_size > 0

    assert run("local,multipole") == lines
    assert calls == expected
    assert run("local,full")[2] == lines[2]
    assert calls == [*expected, [("full", 1)], trained("full", 1, 1, 1)]
