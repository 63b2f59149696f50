"""Draws how many queries see their match in their cluster, by step of training.

Usage: python tools/exploring_picture.py [--output=docs/exploring.png]

The runs are those of `benchmarks/recall.json` whose commands are in docs/induction.md
and docs/cluster_settings.md and in which a query reads one cluster: a key comes again
as another token, and routing was looked at while training.
"""

import argparse
import pathlib
import statistics

from matplotlib.figure import Figure

from benchmarks import record

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIZE = {"synonyms": 4, "length": 128, "pairs": 8, "window": 32, "steps": 1600}
BALANCE = 0.01


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default=ROOT / "docs/exploring.png")
    draw(lines(ROOT / "benchmarks/recall.json")).savefig(
        parser.parse_args().output, dpi=150
    )


def lines(path):
    """Returns the runs of a record: dict from the name of a line to a list of them."""
    found = {}
    for run in record.Record(path).runs:
        settings = run["settings"]
        is_one = all(settings.get(k) == v for k, v in SIZE.items())
        balance = settings["options"].get("balance_rate", BALANCE)
        reads_one = settings["options"].get("clusters_per_query", 1) == 1
        if "diagnosis" in run and is_one and reads_one and balance == BALANCE:
            found.setdefault(name_of(settings), []).append(run)
    return found


def name_of(settings):
    """Returns what a line shows."""
    parts = [settings["pattern"]]
    if settings["pattern"] != "hashed":
        is_fixed = settings["options"].get("decay") == 1
        parts.append(f"{'random' if is_fixed else 'learned'} centroids")
    if number := settings.get("exploring_queries", 0):
        parts.append(f"{number} exploring")
    return ", ".join(parts)


def draw(runs_of_lines):
    """Draws lines: dict from names to lists of runs, the mean of which is shown."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name, runs in sorted(runs_of_lines.items()):
        shares = [
            {step: found["found_by_any"] for step, found in run["diagnosis"]}
            for run in runs
        ]
        steps = sorted(set.intersection(*map(set, shares)))
        means = [statistics.mean(share[step] for share in shares) for step in steps]
        seeds = f"{len(runs)} seed{'s' if len(runs) > 1 else ''}"
        axes.plot(steps, means, label=f"{name} ({seeds})")
    axes.set(
        xlabel="step",
        ylabel="queries that see their match",
        ylim=(-0.02, 1.02),
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


if __name__ == "__main__":
    main()
