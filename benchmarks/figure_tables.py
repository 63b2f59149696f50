"""Tables and sentences of pages, from the record of `benchmarks.figures`.

A page has a block between `<!-- figures: NAME -->` and `<!-- end of NAME -->`.
"""

import pathlib
import textwrap

from absl import flags

from benchmarks import compare_patterns
from benchmarks import contenders
from benchmarks import contest
from benchmarks import decode
from benchmarks import decode_cost
from benchmarks import encoder
from benchmarks import patterns
from benchmarks import report
from benchmarks import scaling

ROOT = pathlib.Path(__file__).parents[1]
BOTH, STEP, GRAPH = "forward+backward", "train step", "TensorFlow graph"
OURS = ("token choice", "hashed", "local", "multipole")
KERAS_FULL = f"full attention (Keras {GRAPH})"
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
SCALED = (4096, 8192, 16384, 32768, 65536)
PATTERN_LENGTHS = (2048, 8192, 32768)
MODELS = ("full", "local", "hashed", "expert choice", "token choice")
# Kinds of heads of `benchmarks.decode_cost`, what matters most first.
STEP_KINDS = (
    "full",
    "routed, token choice",
    "hashed",
    "local",
    "multipole",
    decode_cost.TORCH_FULL,
    "routed, four clusters",
    "routed, expert choice",
    "random",
    "strided",
    "fixed",
    "cluster-strided",
)
WIDTH = 125


class Found:
    """What a record has, by the names that tables use.

    Args:
        results: `Record`.
    """

    def __init__(self, results):
        self.results = results

    def get(self, what, **settings):
        """Returns what a `Call` has found, or None."""
        return self.results.find({"what": what, **settings})

    def row(self, what, contender, length=8192, dtype="float32"):
        """Returns a `Row` that was measured or could not be; None if it is missing."""
        for row in rows_of(self.results, what):
            if (row.contender, row.length, row.dtype) == (contender, length, dtype):
                return row
        return None

    def layer(self, name, length=8192):
        """Returns the row of an attention layer; a name alone is of ours."""
        name = name if "(" in name else f"{name} ({GRAPH})"
        return self.row("attention", name, length)


def rows_of(results, what):
    """Returns the rows of a kind of contest."""
    rows = []
    for run in results.runs:
        if run["settings"].get("what") == what and "contender" in run:
            fields = {name: value for name, value in run.items() if name != "settings"}
            rows.append(contest.Row(**fields))
    return rows


def line(row):
    """Returns a row of a table of one length: the columns of `report`, no floor."""
    return f"| {' | '.join(report.cells(row)[:7])} |"


def table(heads, rows):
    """Returns the lines of a table in Markdown; none if there are no rows."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines] if rows else []


def contest_table(rows):
    """Returns the lines of a table of rows of one length."""
    rows = [report.cells(row)[:7] for row in rows if row]
    return table(list(report.COLUMNS[:7]), rows)


def times_as_fast(row, other):
    """Returns how many times as fast a row is as another one, or None.

    From what both are in turns with the same reference, where there is that.
    """
    if row is None or other is None or None in (row.seconds, other.seconds):
        return None
    if row.ratio and other.ratio:
        return row.ratio / other.ratio
    return other.seconds / row.seconds


def pays_from(ratios):
    """Returns the least length from which on a ratio is above one, or None.

    Args:
        ratios: dict from the length to the ratio.
    """
    least = None
    for length in sorted(ratios, reverse=True):
        if ratios[length] <= 1:
            break
        least = length
    return least


def about(found):
    about = found.get("machine")
    if about is None:
        return []
    versions = ", ".join(f"{name} {text}" for name, text in about["versions"].items())
    text = f"Measured on {about['date']}, on {about['machine']}, with {versions}."
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def main_job(found):
    job = found.get("main job")
    if job is None:
        return []
    cells = [
        f"{job['seconds']:,.0f} s",
        f"{job['processor_seconds']:,.0f} s",
        f"{job['peak_bytes'] / 2**20:,.0f} MiB",
        f"{job['bits_per_byte']:.2f}",
    ]
    heads = ["the main job", "of processors", "peak memory", "held-out bits per byte"]
    return table(heads, [cells])


def layer(found):
    names = [contenders.KMEANS]
    for name in (*OURS, "expert choice"):
        ways = contenders.WAYS if name not in ("hashed", "multipole") else [GRAPH]
        names += [f"{name} ({way})" for way in ways]
    names += [contenders.TORCH_FULL, KERAS_FULL]
    rows = [found.row("attention", name) for name in names]
    rows += [
        row
        for row in rows_of(found.results, "attention")
        if row.length == 8192 and row.dtype == "bfloat16"
    ]
    return contest_table(rows)


def layers():
    """Returns the names of contenders by what tables call them, the peers first."""
    names = (contenders.TORCH_FULL, KERAS_FULL, contenders.KMEANS, *OURS)
    return {name: name if "(" in name else f"{name} ({GRAPH})" for name in names}


def lengths(found):
    """Returns the times of forward and backward pass by length."""
    rows, notes = [], []
    for shown, name in layers().items():
        cells = []
        for length in LENGTHS:
            row = found.row("attention", name, length)
            cells.append("" if row is None else _seconds(row))
            if row is not None and row.seconds is None:
                note = f"- {shown}, {length:,} tokens: {row.note.replace(': ', ', ')}."
                notes.append(note)
        if any(cells):
            rows.append([shown, *cells])
    lines = table(["tokens", *(f"{n:,}" for n in LENGTHS)], rows)
    return [*lines, *[""] * bool(notes), *notes]


def _seconds(row):
    return "-" if row.seconds is None else f"{row.seconds:.3f} s"


def pays(found):
    """Returns from which length on heads are faster than full attention."""
    rows = []
    for name in OURS:
        cells = [
            _pays(found, name, full) for full in (contenders.TORCH_FULL, KERAS_FULL)
        ]
        decoding = _decoding_pays(found, name)
        if any(cells):
            rows.append([name, *cells, decoding])
    heads = ["faster from so many tokens on than", "PyTorch's full attention"]
    return table(
        [*heads, "Keras' full attention", "a decoding step of full heads"], rows
    )


def _pays(found, name, full):
    """The least length in words."""
    ratios = _ratios(found, name, full)
    least = pays_from(ratios)
    if least is None:
        return f"not up to {max(ratios):,}" if ratios else ""
    most, ratio = _longest_measured(ratios)
    return f"{least:,} ({ratio:.1f} times at {most:,})"


def _longest_measured(ratios):
    """Returns the longest length at which both could run, and its ratio."""
    most = max(n for n in ratios if ratios[n] != float("inf"))
    return most, ratios[most]


def _ratios(found, name, full):
    """Returns how many times as fast as full attention heads are, by length.

    Full attention that cannot run is slower.
    """
    ratios = {}
    for length in LENGTHS:
        row, other = found.layer(name, length), found.layer(full, length)
        if row and other and row.seconds:
            ratios[length] = times_as_fast(row, other) or float("inf")
    return ratios


def _decoding_pays(found, name):
    run = found.get(
        "step", kind={"token choice": "routed, token choice"}.get(name, name)
    )
    if run is None:
        return ""
    ratios = {
        each["length"]: each["reference_seconds"] / each["seconds"]
        for each in run["contexts"]
    }
    least = pays_from(ratios)
    return "" if least is None else f"{least:,} ({ratios[least]:.1f} times)"


def decoding(found):
    rows = []
    for name in (decode.REFERENCE, f"cache {OURS[0]} ({GRAPH})"):
        rows.append(
            [name, *(_milliseconds(found, name, n) for n in (1024, 8192, 65536))]
        )
    name = f"whole prefix {OURS[0]} ({GRAPH})"
    rows.append([name, *(_milliseconds(found, name, n) for n in (1024, 8192, 65536))])
    rows = [row for row in rows if any(row[1:])]
    return table(["", "1,024 tokens", "8,192 tokens", "65,536 tokens"], rows)


def _milliseconds(found, name, length):
    row = found.row("decode", name, length)
    if row is None or row.seconds is None:
        return ""
    return f"{1e3 * row.seconds / row.units:,.2f} ms"


def steps(found):
    """Returns the times of decoding steps of one layer by context."""
    rows = []
    for kind in STEP_KINDS:
        run = found.get("step", kind=kind)
        if run:
            times = [f"{1e3 * each['seconds']:.2f} ms" for each in run["contexts"]]
            rows.append([kind, *times])
    return table(["heads", *(f"{n:,}" for n in CONTEXTS)], rows)


def caches(found):
    """Returns the table of `benchmarks.decode_cost`."""
    rows, some = [], (1024, 8192, 65536)
    for kind in STEP_KINDS:
        run = found.get("step", kind=kind)
        if run:
            contexts = [each for each in run["contexts"] if each["length"] in some]
            rows.append([kind, *decode_cost.cells(contexts)])
    return table(decode_cost.heads_of(some), rows)


def train_step(found):
    rows = rows_of(found.results, STEP)
    first = [row for row in rows if row.contender == contenders.PACKAGE]
    return contest_table(first + [row for row in rows if row not in first])


def scaled(found):
    rows = []
    for name in ("expert choice", OURS[0]):
        name = f"{name} ({GRAPH})"
        each = [found.row("scaling", name, length) for length in SCALED]
        if not all(row and row.seconds for row in each):
            continue
        exponent = scaling.fit([(row.length, row.seconds) for row in each])
        rows.append([name, *map(_seconds, each), f"{exponent:.2f}"])
    return table(["heads", *(f"{n:,}" for n in SCALED), "exponent of time"], rows)


def models(found):
    run = found.get("models")
    if run is None:
        return []
    speeds = {(e["pattern"], e["key_shift"]): e for e in run["models"]}
    rows = [
        [name, *(f"{speeds[name, shift]['tokens_per_second']:,}" for shift in (0, 1))]
        for name in MODELS
    ]
    return table(["heads", "tokens/s, `key_shift=0`", "`key_shift=1`"], rows)


def data(found):
    run = found.get("data")
    return table(["data", "window", "million tokens/s"], run["rows"]) if run else []


def classifier(found):
    """Returns the table of `benchmarks.encoder`."""
    run = found.get("encoder")
    return encoder.table(run["lengths"]) if run else []


def all_patterns(found):
    """Returns the table of `benchmarks.patterns`, which has a file of its own."""
    if not any(run["settings"]["what"] == "patterns" for run in found.results.runs):
        return []
    options = flags.FlagValues()
    patterns.define_flags(options)
    options(["patterns"])
    figures = compare_patterns.Figures(ROOT / options.results)
    return patterns.table(figures, options)


def targets(found):
    """Returns what was wanted on two cores of a CPU, and what the record has."""

    def ratio(name, other, what="attention", **settings):
        return times_as_fast(found.row(what, name, **settings), found.row(what, other))

    expert, choice = (f"{name} ({GRAPH})" for name in ("expert choice", OURS[0]))
    steps = f"expert choice sinusoids ({GRAPH})"
    rows = [
        ("expert choice, float32, against `KmeansAttention`", "2.5 times as fast")
        + (ratio(expert, contenders.KMEANS),),
        ("the same in bfloat16, against float32 `KmeansAttention`", "4.5")
        + (ratio(expert, contenders.KMEANS, dtype="bfloat16"),),
        ("token choice, float32, against `KmeansAttention`", "2.5")
        + (ratio(choice, contenders.KMEANS),),
        ("token choice: its time in that of expert choice", "at most 1.3")
        + (ratio(expert, choice),),
        *(
            (f"{name}: JAX against TensorFlow", "0.8")
            + (ratio(f"{name} (JAX)", f"{name} ({GRAPH})"),)
            for name in ("expert choice", "local", "token choice")
        ),
        ("token choice on JAX against `KmeansAttention`", "1.2")
        + (ratio(f"{OURS[0]} (JAX)", contenders.KMEANS),),
        ("expert choice against PyTorch's full causal attention", "7")
        + (ratio(expert, contenders.TORCH_FULL),),
        ("train step against `RoutingTransformerLM`", "2.2")
        + (ratio(steps, contenders.PACKAGE, STEP),),
        ("a decoded token: 65,536 tokens of context in 1,024", "at most 1.2 times")
        + (_decoded(found),),
    ]
    shown = [[what, wanted, f"{x:.2f}"] for what, wanted, x in rows if x is not None]
    return table(["what", "wanted", "measured"], shown)


def _decoded(found):
    name = f"cache {OURS[0]} ({GRAPH})"
    rows = [found.row("decode", name, length) for length in (65536, 1024)]
    if not all(row and row.seconds for row in rows):
        return None
    return rows[0].seconds / rows[1].seconds


def readme(found):
    """Returns the paragraph of the README, of what the record has."""
    about, core = found.get("machine"), found.layer(OURS[0])
    if about is None or core is None:
        return []
    names = {
        OURS[0]: "with routing",
        "local": "with local heads",
        contenders.KMEANS: "with the PyTorch package routing-transformer",
        contenders.TORCH_FULL: "with PyTorch's full attention",
        KERAS_FULL: "with Keras'",
    }
    each = [_took(found.layer(name), words) for name, words in names.items()]
    machine = about["machine"].split(",")[0]
    text = (
        "A forward and backward pass of one attention layer at 8,192 tokens takes "
        f"{_listed(each)} (TensorFlow, {machine}; "
        "[settings](docs/benchmarks.md#how-fast))."
    )
    others = {f"{OURS[0]} (TensorFlow XLA)": "With XLA", f"{OURS[0]} (JAX)": "on JAX"}
    ways = [
        f"{words} {_seconds(row)}"
        for name, words in others.items()
        if (row := found.row("attention", name)) and row.seconds
    ]
    if len(ways) == 2:
        text += f" {ways[0]}, {ways[1]}."
    ratios = _ratios(found, OURS[0], contenders.TORCH_FULL)
    if least := pays_from(ratios):
        most, ratio = _longest_measured(ratios)
        text += (
            f" Routing is faster than PyTorch's full attention from {least:,} tokens "
            f"on, {ratio:.1f} times at {most:,}."
        )
    text += _decoding_words(found)
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _took(row, words):
    return f"{_seconds(row)} {words}" if row and row.seconds else ""


def _listed(words):
    *others, last = filter(None, words)
    return f"{', '.join(others)}, and {last}" if others else last


def _decoding_words(found):
    names = f"cache {OURS[0]} ({GRAPH})", decode.REFERENCE
    cells = [[_milliseconds(found, name, n) for n in (1024, 65536)] for name in names]
    if not all(sum(cells, [])):
        return ""
    (short, long), (dense_short, dense_long) = cells
    return (
        f" A decoded token takes {short} with 1,024 tokens of context and {long} with "
        f"65,536; with full attention {dense_short} and {dense_long}."
    )


_BENCHMARKS = "docs/benchmarks.md"
_BLOCKS = {
    "how fast": ("README.md", readme),
    "machine": (_BENCHMARKS, about),
    "main job": (_BENCHMARKS, main_job),
    "layer": (_BENCHMARKS, layer),
    "lengths": (_BENCHMARKS, lengths),
    "pays": (_BENCHMARKS, pays),
    "train step": (_BENCHMARKS, train_step),
    "models": (_BENCHMARKS, models),
    "scaling": (_BENCHMARKS, scaled),
    "patterns": (_BENCHMARKS, all_patterns),
    "decode": (_BENCHMARKS, decoding),
    "step": (_BENCHMARKS, steps),
    "targets": ("benchmarks/README.md", targets),
    "caches": ("docs/decoding_and_serving.md", caches),
    "data": ("docs/data.md", data),
    "encoder": ("docs/recipes.md", classifier),
}
PAGES = {name: page for name, (page, _) in _BLOCKS.items()}


def blocks(results):
    """Returns the lines of all blocks for which the record has something."""
    found = Found(results)
    made = {name: lines_of(found) for name, (_, lines_of) in _BLOCKS.items()}
    return {name: lines for name, lines in made.items() if lines}


def renewed(text, name, lines):
    """Returns the text of a page with the lines of a block.

    Raises:
        ValueError: if the page has no such block.
    """
    start, end = f"<!-- figures: {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(
            f"A page with a block must have the lines {start.strip()} and {end}. "
            f"Received: {PAGES.get(name)} without them"
        )
    return f"{before}{start}" + "".join(f"{x}\n" for x in lines) + f"{end}{after}"


def write(results, root=ROOT):
    """Puts all blocks into the pages."""
    for name, lines in blocks(results).items():
        page = root / PAGES[name]
        page.write_text(renewed(page.read_text(), name, lines))
