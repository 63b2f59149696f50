"""Tables, JSON files and plots of what was measured."""

import dataclasses
import itertools
import json
import pathlib
import sys

import tqdm

COLUMNS = (
    "contender",
    "dtype",
    "median",
    "times as fast",
    "least and greatest round",
    "peak memory",
    "before",
    "of the floor",
)


def say(text):
    """Prints to standard output, past the progress bar."""
    tqdm.tqdm.write(text + "\n", file=sys.stdout)


def heading(about):
    """Returns what stands above all tables: date, machine, versions, rates.

    Args:
        about: dict as `benchmarks.contest.run` makes it.
    """
    versions = ", ".join(f"{name} {text}" for name, text in about["versions"].items())
    rates = ", ".join(
        f"{each['operations_per_second'] / 1e9:,.0f} GFLOP/s in {dtype} "
        f"({each['library']})"
        for dtype, each in about["matrix_products"].items()
    )
    return (
        f"{about['date']}, {about['machine']}.\n{versions}.\nMatrix products: {rates}."
    )


def table(rows):
    """Returns a table in Markdown, under a heading, of rows of one length and kind."""
    first = rows[0]
    lines = [f"### {first.passes}, {first.length:,} tokens", ""]
    lines += [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    return "\n".join([*lines, *(_line(cells(row)) for row in rows)])


def cells(row):
    """Returns the cells of a row as strings."""
    missing = row.seconds is None
    return [
        row.contender,
        row.dtype,
        row.note if missing else duration(row) + f" ({row.note})" * bool(row.note),
        _shown(row.ratio, "{:.2f}"),
        _shown(row.ratio_low, f"{{:.2f}} to {row.ratio_high or 0:.2f}"),
        _shown(row.peak_bytes, "{:,.0f} MiB", 2**-20),
        _shown(row.bytes_before, "{:,.0f} MiB", 2**-20),
        _shown(row.floor_fraction, "{:.0%}"),
    ]


def duration(row):
    """Returns the time of a run in words: seconds, tokens per second or per token."""
    if row.passes == "train step":
        return f"{row.units / row.seconds:,.0f} tokens/s"
    if row.passes == "decode":
        return f"{1e3 * row.seconds / row.units:,.2f} ms per token"
    return f"{row.seconds:.4f} s" if row.seconds < 1 else f"{row.seconds:.2f} s"


def write_json(path, about, rows, **more):
    """Writes all that is known; nothing if there is no path."""
    if path:
        rows = [dataclasses.asdict(row) for row in rows]
        text = json.dumps({**about, "rows": rows, **more}, indent=1)
        pathlib.Path(path).write_text(text + "\n")


def plot_lines(path, rows, panels, title):
    """Draws quantities against the length, both in logarithms.

    Args:
        path: picture to write; nothing is drawn without one.
        rows: the rows.
        panels: list of pairs: a label of the axis, and a function of a row that
            returns a number, or None for no point.
        title: one line above.
    """
    if not path:
        return
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels) + 4, 6), layout="constrained")
    names = list(dict.fromkeys(row.contender for row in rows))
    colours = dict(zip(names, itertools.cycle(colormaps["tab20"].colors)))
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    handles = {}
    for axes, (label, value) in zip(all_axes, panels):
        for (name, dtype), points in curves(rows, value).items():
            style = "--" if dtype == "bfloat16" else "-"
            (handles[f"{name}, {dtype}"],) = axes.plot(
                *zip(*points), style, marker=".", color=colours[name]
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="length, tokens", ylabel=label)
        axes.grid(alpha=0.3)
    figure.legend(
        handles.values(), handles, loc="outside right upper", fontsize="x-small"
    )
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def curves(rows, value):
    """Returns the points `(length, value)` by pairs of contender and dtype, sorted."""
    found = {}
    for row in rows:
        number = None if row.seconds is None else value(row)
        if number is not None:
            key = row.contender, row.dtype
            found.setdefault(key, []).append((row.length, number))
    return {key: sorted(points) for key, points in found.items()}


def plot_bars(path, rows, panels, title):
    """Draws a bar of each row; see `plot_lines`."""
    rows = [row for row in rows if row.seconds is not None][::-1]
    if not path or not rows:
        return
    from matplotlib.figure import Figure

    names = [f"{row.contender}, {row.dtype}, {row.length:,}" for row in rows]
    height = 1.5 + 0.25 * len(rows)
    figure = Figure(figsize=(5 * len(panels) + 4, height), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (label, value) in zip(all_axes, panels):
        axes.barh(names, [value(row) or 0 for row in rows])
        axes.set_xlabel(label)
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def mebibytes(row):
    """Returns the peak memory of a row in MiB, or None."""
    return row.peak_bytes and row.peak_bytes / 2**20


def _line(cells):
    return f"| {' | '.join(cells)} |"


def _shown(value, form, factor=1):
    return "" if value is None else form.format(factor * value)
