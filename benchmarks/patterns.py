"""All patterns of the package in one table, at equal width and budget of keys.

    python -m benchmarks.patterns --plot=docs/patterns.png
    python -m benchmarks.patterns --rows='token choice,block_top_k' --what=recall
    python -m benchmarks.patterns --print_only

For each pattern: accuracy of recall (`benchmarks.recall` at 128 tokens and 8 pairs, 32
keys for a query), bits per byte of the main job with relative positions
(`benchmarks.compare_patterns`), seconds and memory of forward+backward of a layer (8
heads of 64, 256 keys for a query), the size of its cache at 8,192 tokens, and how far
later tokens move earlier outputs. Keys are those of the token before (`key_shift=1`)
where a pattern has that. Figures go into a file at once, and a second call goes on from
there; all of it takes about five hours of two cores.
"""

import functools
import itertools
import math

import tqdm
from absl import app
from absl import flags

from benchmarks import compare_patterns
from benchmarks import contest
from benchmarks import pattern_heads
from benchmarks import processes
from benchmarks import recall_data
from benchmarks import recall_model
from benchmarks.report import say
from routing_tf.models.presets import preset_hyperparameters

WHAT = ("leak", "state", "cost", "recall", "language")
WINDOW, STATE_LENGTH, DEVICE = 256, 8192, "cpu"
WINDOWS = 128  # of the test split, to score
# Heads have relative positions where the pattern has them.
HPARAMS = "optimizer=adam,learning_rate=0.004,routed_relative_positions=true"
LARGEST_BYTES = 16 * 2**30
RECALL = {
    "length": 128,
    "pairs": 8,
    "window": 32,
    "num_clusters": 8,
    "steps": 800,
    "learning_rate": 3e-3,
    "seed": 0,
    "vocabulary": 512,
    "batch_size": 64,
    "width": 64,
    "key_dim": 64,
}
TOO_LARGE, TOO_LONG = "too large", "too long"


def recall(row, options):
    """Returns the accuracy of recall; None for a pattern without a causal form."""
    if row in pattern_heads.NOT_CAUSAL:
        return None
    is_routed = row in pattern_heads.ROUTED
    settings = recall_data.Settings(
        pattern=row,
        key_shift=pattern_heads.key_shift_of(row),
        options={"balance_rate": pattern_heads.BALANCE_RATE} if is_routed else {},
        synonyms=1,
        num_heads=1 + (row in pattern_heads.OF_TWO_HEADS),
        **RECALL,
    )
    return recall_model.train(settings, eval_every=RECALL["steps"])["accuracy"]


def language(row, options):
    """Returns bits per byte of the main job; None for a pattern without a causal form.

    Takes the figure of `compare_patterns` if its file has one, else trains a run.
    """
    if row in pattern_heads.NOT_CAUSAL:
        return None
    shift = pattern_heads.key_shift_of(row)
    steps = preset_hyperparameters(compare_patterns.PRESET).train_steps
    known = compare_patterns.Figures(options.compared).find(
        kind="bits",
        pattern=row,
        key_shift=shift,
        steps=steps,
        seed=0,
        windows=WINDOWS,
        files=None,
        hparams=HPARAMS,
    )
    if known:
        return known[-1]["bits_per_byte"]
    folder = compare_patterns.model_dir(
        options.output_dir, row, shift, steps, 0, HPARAMS
    )
    compare_patterns.train(folder, row, shift, 0, steps, hparams=HPARAMS)
    return compare_patterns.score(folder, WINDOWS)


def cost(row, options, length):
    """Returns the seconds and bytes of forward+backward, or why there are none."""
    # Logits, weights, and the gradients of both.
    matrices = 4 * 4 * pattern_heads.NUM_HEADS * length**2
    if row in pattern_heads.QUADRATIC and matrices > LARGEST_BYTES:
        return TOO_LARGE
    case = processes.Case(
        row,
        "tensorflow",
        "benchmarks.pattern_heads:forward_and_backward",
        {"row": row, "length": length, "window": WINDOW},
        length=length,
    )
    try:
        with processes.started(case, DEVICE, options.timeout) as worker:
            worker.run()
            seconds = sorted(worker.run(options.rounds))[options.rounds // 2]
            peak = worker.peak_bytes() - worker.bytes_before
    except processes.WorkerError as error:
        if any(name in str(error) for name in ("out of memory", "ResourceExhausted")):
            return TOO_LARGE
        return TOO_LONG if "no answer" in str(error) else f"failed: {error}"
    if peak > LARGEST_BYTES:
        return TOO_LARGE
    return {"seconds": round(seconds, 4), "bytes": peak}


def state(row, options):
    """Returns the bytes of a cache; None for a pattern without one."""
    return pattern_heads.state_bytes(row, STATE_LENGTH, WINDOW)


def leak(row, options):
    """Returns how far later tokens move earlier outputs."""
    return pattern_heads.leak(row)


def measures(options):
    """Returns functions of a row and the flags, by what they measure."""
    found = {"leak": leak, "state": state}
    for length in contest.lengths_of(options):
        found[f"cost at {length}"] = functools.partial(cost, length=length)
    return {**found, "recall": recall, "language": language}


def measure(options, figures):
    """Measures what the figures lack, the quick things of all rows first."""
    rows = contest.check_list("rows", options.rows, pattern_heads.ROWS)
    chosen = contest.check_list("what", options.what, WHAT)
    todo = [
        (name, row, function)
        for name, function in measures(options).items()
        for row in rows
        if name.split()[0] in chosen and not figures.find(kind=name, row=row)
    ]
    for name, row, function in tqdm.tqdm(todo, unit="figure", disable=None):
        value = function(row, options)
        figures.add(kind=name, row=row, value=value)
        say(f"{row}, {name}: {value}")


def table(figures, options):
    """Returns the lines of the table of all rows that have figures."""
    lengths = contest.lengths_of(options)
    heads = ["pattern", "`key_shift`", "leak", "recall", "bits per byte"]
    heads += [*(f"{n:,} tokens" for n in lengths), f"cache at {STATE_LENGTH:,}"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in pattern_heads.ROWS:
        if not figures.find(row=row):
            continue
        get = functools.partial(_figure, figures, row)
        cells = [row, str(pattern_heads.key_shift_of(row)), _leak(row, get("leak"))]
        cells += [_scopes(get("recall")), _scopes(get("language"))]
        cells += [_cost(get(f"cost at {length}")) for length in lengths]
        size = get("state")
        cells += ["" if size is None else f"{size / 2**20:,.2f} MiB"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _figure(figures, row, kind):
    found = figures.find(kind=kind, row=row)
    return found[-1]["value"] if found else None


def _leak(row, value):
    if row in pattern_heads.NOT_CAUSAL:
        return "not causal"
    return "" if value is None else f"{value:.2g}"


def _scopes(values):
    """Figures in both routing scopes, `"full"` first, where they differ."""
    return " / ".join(f"{value:.3f}" for value in (values or {}).values())


def _cost(value):
    if not isinstance(value, dict):
        return value or ""
    return f"{value['seconds']:.2f} s, {value['bytes'] / 2**20:,.0f} MiB"


def draw(figures, length):
    """Returns a figure of bits per byte against the seconds of a layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots()
    points = {}
    for row in pattern_heads.ROWS:
        bits = _figure(figures, row, "language")
        seconds = _figure(figures, row, f"cost at {length}")
        if bits and isinstance(seconds, dict):
            # What sampling can reach.
            points[row] = seconds["seconds"], list(bits.values())[-1]
            is_routed = row in pattern_heads.ROUTED
            axes.plot(*points[row], "o", color="tab:red" if is_routed else "tab:blue")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.margins(0.12, 0.1)
    axes.set(
        xlabel=f"seconds of forward+backward of a layer, {length:,} tokens",
        ylabel="bits per byte of the main job",
    )
    axes.grid(alpha=0.3)
    figure.draw_without_rendering()  # settles where points and labels lie
    _write_names(axes, points)
    return figure


def _write_names(axes, points):
    """Writes a name beside each point, where it lies on no other name or point."""
    frame = axes.get_window_extent()
    pixels = axes.figure.dpi / 72  # of a point of type
    style = {"xytext": (0, 0), "textcoords": "offset points", "fontsize": 8}
    line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.5}
    centres = {name: axes.transData.transform(at) for name, at in points.items()}
    radius = 4 * pixels
    taken = [
        (x - radius, y - radius, x + radius, y + radius) for x, y in centres.values()
    ]
    for name, (x, y) in centres.items():
        label = axes.annotate(name, points[name], arrowprops=line, **style)
        size = label.get_window_extent().size
        for distance, angle in itertools.product(range(8, 90, 4), range(0, 360, 30)):
            box = _box(x, y, size, distance * pixels, math.radians(angle))
            inside = frame.x0 < box[0] and box[2] < frame.x1
            inside &= frame.y0 < box[1] and box[3] < frame.y1
            if inside and not any(_meet(box, other) for other in taken):
                break
        taken.append(box)
        label.set_position(((box[0] - x) / pixels, (box[1] - y) / pixels))


def _box(x, y, size, distance, angle):
    """Returns the box (left, bottom, right, top) of a name in a direction."""
    width, height = size
    right, up = distance * math.cos(angle), distance * math.sin(angle)
    left = x + right - (width if right < 0 else 0)
    return left, y + up - height / 2, left + width, y + up + height / 2


def _meet(one, other):
    """Whether two boxes (left, bottom, right, top) share a place."""
    apart = one[2] < other[0] or other[2] < one[0]
    return not (apart or one[3] < other[1] or other[3] < one[1])


def benchmark(options):
    """Measures what is missing, prints the table and draws the plot."""
    figures = compare_patterns.Figures(options.results)
    if not options.print_only:
        measure(options, figures)
    print("\n".join(table(figures, options)))
    if options.plot:
        lengths = contest.lengths_of(options)
        length = min(lengths, key=lambda n: abs(n - STATE_LENGTH))
        draw(figures, length).savefig(options.plot, dpi=150)


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    flags.DEFINE_list(
        "rows",
        list(pattern_heads.ROWS),
        f"Any of: {', '.join(pattern_heads.ROWS)}.",
        **define,
    )
    flags.DEFINE_list("what", list(WHAT), f"Any of: {', '.join(WHAT)}.", **define)
    flags.DEFINE_list(
        "lengths", ["2048", "8192", "32768"], "Numbers of tokens.", **define
    )
    flags.DEFINE_integer("rounds", 3, "Timed runs.", lower_bound=1, **define)
    flags.DEFINE_float("timeout", 600.0, "Seconds that runs may take.", **define)
    flags.DEFINE_string("output_dir", "runs/patterns", "Folder of the runs.", **define)
    flags.DEFINE_string(
        "results", "benchmarks/all_patterns.json", "File of the figures.", **define
    )
    flags.DEFINE_string(
        "compared",
        "benchmarks/patterns.json",
        "File of the figures of `benchmarks.compare_patterns`, which are taken over.",
        **define,
    )
    flags.DEFINE_string("plot", None, "Plot to write: .png, .svg, .pdf.", **define)
    flags.DEFINE_bool("print_only", False, "Print what the file has.", **define)


def main(argv):
    return contest.command(argv, benchmark)


if __name__ == "__main__":
    define_flags()
    app.run(main)
