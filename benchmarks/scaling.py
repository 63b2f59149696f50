"""Time and memory against the length with the paper's number of clusters, its root.

    python -m benchmarks.scaling --output=scaling.json --plot=scaling.png

Forward+backward of our routed heads with sqrt(length) clusters and as long windows,
rounded to multiples of 8, beside full attention. Fits the exponents of time and memory
by least squares in logarithms, and prints them. `benchmarks/README.md` explains more.
"""

import numpy as np
from absl import app
from absl import flags

from benchmarks import contenders
from benchmarks import contest
from benchmarks import report

LENGTHS = ["4096", "8192", "16384", "32768", "65536"]


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    contest.define_flags(values, LENGTHS, ["float32"], contenders.TORCH_FULL)
    contest.define_sizes(values)


def main(argv):
    return contest.command(argv, benchmark)


def benchmark(options):
    """Runs all lengths, prints tables and exponents, draws a plot."""
    kinds = ["forward+backward"]
    rows = contest.run(options, contenders.scaling, kinds, print_exponents)
    panels = [("seconds", _seconds), ("memory of a run, MiB", run_mebibytes)]
    title = "forward+backward, sqrt(length) clusters, causal"
    report.plot_lines(options.plot, rows, panels, title)


def print_exponents(contest_, rows):
    """Prints the exponents of time and memory of each contender."""
    del contest_
    found = {}
    for what, value in _EXPONENTS.items():
        for (name, dtype), points in report.curves(rows, value).items():
            if len(points) > 1:
                found.setdefault(f"{name}, {dtype}", {})[what] = fit(points)
    lines = ["| contender | exponent of time | of memory |", "| --- " * 3 + "|"]
    for name, exponents in found.items():
        shown = (f"{exponents[x]:.2f}" if x in exponents else "" for x in _EXPONENTS)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    report.say("\n".join(lines))
    return {"exponents": found}


def fit(points):
    """Returns the slope of a line through the logarithms of points `(x, y)`."""
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def run_mebibytes(row):
    """Returns what the runs added to the memory of the process, in MiB."""
    if row.peak_bytes is None or row.peak_bytes <= row.bytes_before:
        return None
    return (row.peak_bytes - row.bytes_before) / 2**20


def _seconds(row):
    return row.seconds


_EXPONENTS = {"time": _seconds, "memory": run_mebibytes}


if __name__ == "__main__":
    define_flags()
    app.run(main)
