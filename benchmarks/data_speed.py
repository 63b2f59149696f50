"""How many tokens a second the data of training comes with, by problem.

    python -m benchmarks.data_speed

Prints a Markdown table. The data is made for the purpose: random bytes, or random
words of a small vocabulary, prepared as `datagen` prepares real ones and read from
disk. The problems take turns; the figure is the median of the rounds.
"""

import contextlib
import os
import pathlib
import statistics
import tempfile
import time

import numpy as np
from absl import app
from absl import flags
from absl import logging

from routing_tf import problems

_MEGABYTES = flags.DEFINE_integer("megabytes", 20, "Size of the data.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch_size", 8, "Windows in a batch.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 200, "Batches in a round.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds of each problem.", lower_bound=1)


def make_files(folder):
    """Writes raw files: integers like the release's enwik8, and words."""
    rng = np.random.default_rng(0)
    size = _MEGABYTES.value * 1_000_000
    words = np.array([f"w{i}" for i in range(5000)])
    for name, share in (("train", 1.0), ("valid", 0.01), ("test", 0.01)):
        count = int(size * share)
        rows = rng.integers(0, 256, (count // 8192 + 1, 8192)).tolist()
        lines = (" ".join(map(str, row)) for row in rows)
        (folder / f"{name}.txt").write_text("\n".join(lines))
        rows = words[rng.integers(0, len(words), (count // 500 + 1, 100))]
        text = "".join(f" {' '.join(row)} \n" for row in rows)
        (folder / f"wiki.{name}.tokens").write_text(f" \n = Words = \n \n{text}")
    (folder / "bytes").write_bytes(rng.integers(0, 256, size, "uint8").tobytes())


def make_problems(raw_dir, data_dir):
    """Returns prepared problems by a description."""
    whole = {"data_dir": str(data_dir)}
    found = {
        "text_files, bytes": problems.get(
            "text_files", files=str(raw_dir / "bytes"), sequence_length=8192
        ),
        "text_files, bytes, random lengths": problems.get(
            "text_files",
            files=str(raw_dir / "bytes"),
            sequence_length=8192,
            min_training_length=256,
        ),
        "enwik8, integers": problems.get("enwik8", **whole),
        "enwik8, packed as in the release": problems.get(
            "enwik8", packing="release", **whole
        ),
        "wikitext103, words": problems.get("wikitext103", **whole),
        "wikitext103, packed as in the release": problems.get(
            "wikitext103", packing="release", **whole
        ),
    }
    for problem in found.values():
        if problem.storage and not problem.has_own_files:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                list(problem.generate(str(raw_dir)))
        problem.prepare()
    return found


def tokens_per_second(problem, seed):
    """Reads batches for a while."""
    batches = problem.dataset("train", _BATCH.value, seed=seed).as_numpy_iterator()
    next(batches)
    start, count = time.perf_counter(), 0.0
    for _ in range(_STEPS.value):
        _, _, weights = next(batches)
        count += weights.sum()
    return count / (time.perf_counter() - start)


def main(argv):
    """Measures all problems and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        make_files(folder)
        found = make_problems(folder, folder / "data")
        rates = {name: [] for name in found}
        for round_number in range(_ROUNDS.value):
            for name, problem in found.items():
                rates[name].append(tokens_per_second(problem, round_number))
    print("| data | window | million tokens/s |\n| --- | --- | --- |")
    for name, problem in found.items():
        rate = statistics.median(rates[name]) / 1e6
        print(f"| {name} | {problem.sequence_length:,} | {rate:.1f} |")


if __name__ == "__main__":
    app.run(main)
