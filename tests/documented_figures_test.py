"""The figures of the README and the documentation are those of the records.

The records are the files in `benchmarks` that the documented commands print, and the
tables of measurements in `benchmarks/README.md`.
"""

import functools
import math
import pathlib
import re
import statistics
import subprocess
import sys

import pytest

from benchmarks import compare_patterns
from benchmarks import context
from benchmarks import patterns
from benchmarks import recall
from routing_tf import layers
from routing_tf import models
from routing_tf import optimizers
from routing_tf import problems
from routing_tf import tokenizers
from routing_tf import zoo
from routing_tf.version import __version__
from tests import command_line

ROOT = pathlib.Path(__file__).parents[1]
BENCHMARKS = "docs/benchmarks.md"
ADAM = "optimizer=adam,learning_rate=0.004"
RELATIVE = f"{ADAM},routed_relative_positions=true"
WIKITEXT, ADDRESSES = "valid.txt,test.txt", "sotu.txt"
# What the tables call the patterns, as `(pattern, routing scope)` of the records.
ROWS = {
    "full attention": ("full", "full"),
    "local": ("local", "full"),
    "hashed": ("hashed", "full"),
    "random": ("random", "full"),
    'expert choice, scored in the scope `"full"`': ("expert choice", "full"),
    'expert choice, scored in the scope `"prefix"`': ("expert choice", "prefix"),
    "token choice": ("token choice", "full"),
}
FIGURE = re.compile(r"(?<![\w.])\d+\.\d{2,}(?![\w.]*\d)")


def read(page):
    """Returns a page with all white space as single spaces."""
    return " ".join((ROOT / page).read_text().split())


def rows_below(heading, page=BENCHMARKS):
    """Returns the rows of the first table below a heading, lists of plain cells."""
    text = (ROOT / page).read_text().partition(heading)[2]
    lines = text[text.index("\n|") :].partition("\n\n")[0].strip().splitlines()
    cells = [line.strip("|").replace("**", "").split("|") for line in lines[2:]]
    return [[cell.strip() for cell in row] for row in cells]


options_of = command_line.parse


def recall_of(*arguments):
    record = f"--results={ROOT / 'benchmarks/recall.json'}"
    return recall.Benchmark(options_of(recall, record, *arguments))


@functools.cache
def recalled(*arguments):
    """Returns the accuracies that `benchmarks.recall` prints, by pattern and scope."""
    rows = [line.strip("| ").split(" | ") for line in recall_of(*arguments).table()]
    shown = {"both": "full"}
    return {
        (pattern, shown.get(scope, scope)): [cell.partition(" (")[0] for cell in cells]
        for pattern, _, scope, _, *cells in rows[2:]
    }


MAIN = (
    "--learning_rates=0.003,0.01",
    "--key_shifts=1",
    "--sizes=128x8,256x16",
    "--seeds=0,1,2",
)


def values_of(pattern, shift, scope="full", steps=900, files=None, hparams=None):
    """Returns the bits per byte of all seeds."""
    record = compare_patterns.Figures(ROOT / "benchmarks/patterns.json")
    keys = {"kind": "bits", "pattern": pattern, "key_shift": shift, "steps": steps}
    found = record.find(**keys, files=files, hparams=hparams)
    return [run["bits_per_byte"][scope] for run in found]


def bits(*arguments, spread=True, **settings):
    """Returns bits per byte as `benchmarks.compare_patterns` prints them, or ""."""
    values = values_of(*arguments, **settings)
    if not values:
        return ""
    more = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 and spread else ""
    return f"{statistics.mean(values):.3f}{more}"


def mean(*arguments, **settings):
    return bits(*arguments, spread=False, **settings)


def row_of(name):
    """Returns the pattern and scope of a row of a table of language models."""
    return ROWS[name.replace(", window of 64", "")]


def test_recall():
    found = recalled(*MAIN)
    rows = rows_below("### Recall")
    assert {ROWS[name] for name, *_ in rows} == set(found)
    for name, _, *cells in rows:
        assert cells == found[ROWS[name]], name


def test_recall_of_keys_that_come_again_as_other_tokens():
    for name, *cells in rows_below("### Reading beyond", "docs/induction.md"):
        assert cells == [recalled_as_others(name, column) for column in (0, 1)], name


def recalled_as_others(name, column):
    """Returns a cell of the table of exploring heads, whose rows have these names."""
    size, clusters = (("128x8", 16), ("256x16", 32))[column]
    arguments = (
        *("--key_shifts=1", "--synonyms=4", "--steps=1600", "--seeds=0,1,2"),
        *("--exploring_queries=32", f"--sizes={size}"),
    )
    if name == "token choice, with the three settings":
        changes = "balance_rate=0.01,decay=0.99,anchor_weight=0.5,clusters_per_query=2"
        arguments += (f"--num_clusters={clusters}", f"--options={changes}")
    if name == "token choice, no exploring":
        arguments += ("--exploring_queries=0", "--seeds=0,1")
    pattern = name.partition(",")[0]
    return recalled(*arguments, f"--patterns={pattern}")[pattern, "full"][0]


def test_what_routing_makes_of_the_matches():
    options = "--patterns=token choice", "--key_shifts=1", "--sizes=256x16"
    found = recall_of(*options, "--seeds=0,1,2", "--diagnose").diagnoses()[2:]
    found = [line.strip("| ").split(" | ")[3:8] for line in found]
    found = [[cell.partition(" ")[0] for cell in row] for row in found]
    rows = rows_below("and then recall rises.")
    assert len(rows) == 5
    assert all(row in found for row in rows)


def test_language():
    speeds = compare_patterns.Figures(ROOT / "benchmarks/patterns.json")
    rows = rows_below("### Language modelling")
    assert len(rows) == 12
    for name, shift, cell, speed, *contexts in rows:
        pattern, scope = row_of(name)
        shift = int(shift)
        assert cell == bits(pattern, shift, scope), name
        timed = speeds.find(
            kind="speed", pattern=pattern, key_shift=shift, hparams=None
        )
        if scope == "full":
            assert speed == f"{timed[-1]['tokens_per_second']:,}", name
        if any(contexts):
            assert contexts == context_of(pattern, shift), (name, shift)


def context_of(pattern, shift):
    """Returns the cells of a row that `benchmarks.context` prints."""
    options = options_of(context, "--num_spans=32")
    record = compare_patterns.Figures(ROOT / "benchmarks/context.json")
    lengths = sorted(map(int, options.contexts))
    for line in context.table(record, options, lengths)[2:]:
        name, row_shift, *cells = line.strip("| ").split(" | ")
        if (name, int(row_shift)) == (pattern, shift):
            return ["" if cell == "-" else cell for cell in cells]
    raise AssertionError(f"no figures of {pattern}, {shift}")


def test_ten_times_the_steps():
    rows = rows_below("**Ten times the steps.**")
    found = {}
    for name, shift, *cells in rows[:6]:
        pattern, _ = row_of(name)
        found[pattern, int(shift)] = cells
        values = [bits(pattern, int(shift), steps=steps) for steps in (900, 9000)]
        assert cells == values, name
    # Of the printed figures.
    means = {
        key: [float(cell.partition(" ")[0]) for cell in cells]
        for key, cells in found.items()
    }
    others = [means[key] for key in (("local", 1), ("full", 1), ("token choice", 0))]
    choice = means["token choice", 1]
    expected = [[f"{a - b:.3f}" for a, b in zip(other, choice)] for other in others]
    assert [row[2:] for row in rows[6:]] == expected


@pytest.mark.parametrize(
    "heading, hparams", [("**By Adam.**", ADAM), ("**Relative positions.**", RELATIVE)]
)
def test_other_settings(heading, hparams):
    for name, *cells in rows_below(heading):
        pattern, scope = row_of(name)
        for shift, cell in enumerate(cells):
            if cell:
                assert cell == bits(pattern, shift, scope, hparams=hparams), name


def test_prose():
    for name, *cells in rows_below("**Prose.**"):
        pattern, _ = row_of(name)
        expected = [bits(pattern, 1, files=files) for files in (WIKITEXT, ADDRESSES)]
        assert cells == expected, name


def all_patterns():
    record = compare_patterns.Figures(ROOT / "benchmarks/all_patterns.json")
    return patterns.table(record, options_of(patterns))


def test_all_patterns():
    assert "\n".join(all_patterns()) in (ROOT / BENCHMARKS).read_text()


def measured():
    """Returns all rows of the tables of measurements, lists of cells."""
    lines = (ROOT / "benchmarks/README.md").read_text().splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]


@pytest.mark.parametrize("heading", ["### One attention layer", "### A training step"])
def test_times(heading):
    found = measured()
    for name, *cells in rows_below(heading):
        numbers = [cell for cell in cells if re.match(r"[\d.,]+ (s|tokens/s)$", cell)]
        (median,) = numbers
        rows = [row for row in found if row[0] == name and median in row]
        assert rows, (name, median)
        assert set(filter(None, cells)) <= {*rows[0], "689 MiB", "790 MiB"}, name


def test_times_of_decoding():
    found = measured()
    for name, *cells in rows_below("### Decoding"):
        for cell in cells:
            expected = cell.replace(" ms", " ms per token")
            assert any(row[0] == name and expected in row for row in found), cell


def seconds(contender):
    """Returns the time of one layer at 8,192 tokens, as sentences have it."""
    rows = rows_below("### One attention layer")
    times = [row[2] for row in rows if row[:2] == [contender, "float32"]]
    return f"{float(times[0].removesuffix(' s')):.3f} s"


def milliseconds(contender, column):
    rows = rows_below("### Decoding")
    return next(row[column] for row in rows if row[0] == contender)


def sentences():
    """Yields pages and what they must hold, with figures from the records."""
    cells_of = {pattern: cells for (pattern, _), cells in recalled(*MAIN).items()}
    large = {name: cells[1].partition(" ")[0] for name, cells in cells_of.items()}
    yield (
        "README.md",
        f"predicts {large['token choice']} of the values. With local heads in that "
        f"layer it predicts {large['local']}, and with full attention {large['full']}.",
    )
    names = "token choice, with the three settings", "hashed"
    taught, hashed = (recalled_as_others(name, 0)[:5] for name in names)
    yield (
        "README.md",
        f"one head then predicts {taught}, and a hashed head that explores {hashed}.",
    )
    scores = {name: mean(name, 1) for name in ("token choice", "local", "full")}
    routed, local, full = scores.values()
    yield (
        "README.md",
        f"reaches {routed} bits per byte after 900 steps, with local heads {local} and "
        f"with full attention {full}. After 9,000 steps full attention is ahead, with "
        f"{mean('full', 1, steps=9000)} against {mean('token choice', 1, steps=9000)}.",
    )
    yield "README.md", f"the {routed} of the comparison is the mean of three"
    cached = "cache token choice (TensorFlow graph)"
    dense = "cache dense (TensorFlow graph)"
    yield (
        "README.md",
        f"takes {milliseconds(cached, 1)} with 1,024 tokens of context and "
        f"{milliseconds(cached, 3)} with 65,536. With full attention it takes "
        f"{milliseconds(dense, 1)} and {milliseconds(dense, 3)}.",
    )
    graph = [f"{name} (TensorFlow graph)" for name in ("token choice", "local")]
    others = ["KmeansAttention (PyTorch)", "full attention (PyTorch)"]
    eager = [seconds(name) for name in (*graph, *others)]
    yield (
        "README.md",
        f"takes {eager[0]} with routing, {eager[1]} with local heads, {eager[2]} with "
        f"the PyTorch package routing-transformer, and {eager[3]} with PyTorch's full",
    )
    names = ("token choice", "local")
    xla = [seconds(f"{name} (TensorFlow XLA)") for name in names]
    jax = [seconds(f"{name} (JAX)") for name in names]
    yield (
        "README.md",
        f"routing takes {xla[0]} (local heads {xla[1]}), and on JAX {jax[0]} "
        f"({jax[1]}), longer",
    )
    yield (
        "docs/choosing_heads.md",
        f"token choice takes {eager[0]}, with local heads {eager[1]}, and with "
        f"PyTorch's full attention {eager[3]}",
    )
    yield (
        "docs/choosing_heads.md",
        "Without the shift, token choice is no better than local heads "
        f"({mean('token choice', 0)} and {mean('local', 0)} bits per byte)",
    )
    yield (
        "docs/faq.md",
        f"token choice reaches {mean('token choice', 0)} bits per byte without it and "
        f"{routed} with it",
    )
    yield (
        "docs/recipes.md",
        f"token choice reaches {routed} bits per byte, full attention {full} and local "
        f"heads {local}",
    )
    prose = {
        (name, files): bits(name, 1, files=files)
        for name in names
        for files in (WIKITEXT, ADDRESSES)
    }
    adam = {name: bits(name, 1, files=WIKITEXT, hparams=ADAM) for name in names}
    yield (
        BENCHMARKS,
        f"By Adam, token choice reaches {adam['token choice']} and local heads "
        f"{adam['local']}.",
    )
    yield (
        "docs/recipes.md",
        f"token choice reaches {prose['token choice', WIKITEXT]} bits per byte and "
        f"local heads {prose['local', WIKITEXT]}; on the State of the Union addresses "
        f"{prose['token choice', ADDRESSES]} and {prose['local', ADDRESSES]}",
    )


def sentences_of_recall():
    """Yields what the page of benchmarks says of recall in other settings."""
    rates, shifted = "--learning_rates=0.003,0.01", "--key_shifts=1"
    seeds = "--seeds=0,1,2"
    unshifted = recalled(rates, "--key_shifts=0", MAIN[2], seeds)
    cells = [cell for row in unshifted.values() for cell in row if cell]
    full = unshifted["full", "full"]
    assert max(cell.partition(" ")[0] for cell in cells if cell not in full) <= "0.110"
    yield f"they reach {full[0]} at 128 tokens, and {full[1]} at 256"
    names = ("token choice", "hashed", "local")
    widths = recalled(
        *(rates, shifted, "--sizes=256x16", "--windows=64,128"),
        "--patterns=local,hashed,token choice",
    )
    choice, hashed, local = (" and ".join(widths[name, "full"]) for name in names)
    yield (
        f"token choice reaches {choice}, hashed heads {hashed}, and local heads {local}"
    )
    longer = (shifted, "--sizes=512x64", "--windows=64")
    steps = "--steps=2400"
    (choice,), (hashed,), (local,), (full,) = (
        recalled(rates, *longer, steps)[name, "full"] for name in (*names, "full")
    )
    yield (
        f"token choice reaches {choice} after 2,400 steps, full attention {full}, "
        f"hashed heads {hashed}, and local heads {local}"
    )
    early = recalled(rates, *longer)
    (full,), (choice,) = early["full", "full"], early["token choice", "full"]
    assert {early[name, "full"][0] for name in names} == {choice}
    yield (
        f"full attention is at {full}, and token choice, local heads and hashed heads "
        f"have not begun to learn ({choice} each)"
    )
    two = recalled(*longer, steps, "--num_heads=2", "--patterns=token choice")
    yield f"reach {two['token choice', 'full'][0]} after 2,400 steps"
    similar = recalled(shifted, "--synonyms=4", seeds)
    full, hashed, choice = (
        similar[name, "full"][0] for name in ("full", "hashed", "token choice")
    )
    known = [("full", "full"), ("hashed", "full"), ("token choice", "full")]
    others = [cell for key, (cell, *_) in similar.items() if key not in known]
    others = sorted(cell.partition(" ")[0] for cell in others if cell)
    yield (
        f"full attention is at {full}, hashed heads at {hashed}, token choice at "
        f"{choice}, and all others between {others[0]} and {others[-1]}"
    )
    unbalanced = "--patterns=token choice", "--options=balance_rate=0.0"
    found = recalled(shifted, "--sizes=128x8", *unbalanced)["token choice", "full"]
    yield f"token choice reaches {found[0]} at 128 tokens"


def sentences_of_all_patterns():
    """Yields what the guide to heads says of the patterns of other systems."""
    rows = [line.strip("| ").split(" | ") for line in all_patterns()[2:]]
    bits_of = {name: cells[2] for name, _, *cells in rows if cells[2]}
    cache_of = {name: cells[-1] for name, *cells in rows}
    choice, threshold = bits_of["token choice"], bits_of["expert threshold"]
    yield f"in which token choice reaches {choice}"
    yield f"come near to that with {threshold} bits per byte"
    found = (
        *("full", "local", "random", "hashed", "expert choice", "token choice"),
        *("expert threshold", "random_blocks"),
    )
    others = sorted(bits_of[name] for name in bits_of if name not in found)
    yield (
        f"Random blocks follow with {bits_of['random_blocks']}; the remaining groups "
        f"lie between {others[0]} and {others[-1]}"
    )
    linear, native = cache_of["linear"], cache_of["native_sparse"]
    yield (
        f"from {linear} (`FeatureMapHeads`, row `linear`) over {cache_of['full']} "
        f"(`FullHeads`) to {native} (`NativeSparseHeads`)"
    )


def test_sentences():
    for page, sentence in sentences():
        assert sentence in read(page), page


def test_sentences_of_recall():
    for sentence in sentences_of_recall():
        assert sentence in read(BENCHMARKS)


def test_sentences_of_all_patterns():
    for sentence in sentences_of_all_patterns():
        assert sentence in read("docs/choosing_heads.md")


def test_the_readme_has_no_other_figures():
    known = " ".join(sentence for page, sentence in sentences() if page == "README.md")
    of_the_main_job = {"1.40", "1.41", "1.47"}
    text = read("README.md").partition("## What it buys")[2]
    found = set(FIGURE.findall(text))
    assert len(found) > 20
    assert found == {*FIGURE.findall(known), *of_the_main_job}


def test_the_guide_has_the_tables_of_the_benchmarks():
    found = recalled(*MAIN)
    for name, *cells in rows_below("| heads | recall", "docs/choosing_heads.md"):
        pattern, scope = ROWS[name]
        accuracies = [cell.partition(" ")[0] for cell in found[pattern, scope]]
        assert cells == [*accuracies, mean(pattern, 1, scope)], name


def test_pages_agree_on_the_main_job():
    for page in ("README.md", "docs/training.md", "docs/model_card.md"):
        text = read(page)
        assert "1.40 or 1.41" in text and "1.47" in text, page
    for page in ("docs/training.md", "docs/model_card.md"):
        assert "8.12" in read(page)


def test_the_model_card_describes_the_model(eager):
    lm = models.RoutingTransformerCausalLM.from_preset("python_small")
    groups = [
        {type(group): group.num_heads for group in block.attention.head_groups}
        for block in lm.backbone.blocks
    ]
    local, routed = layers.LocalHeads, layers.RoutedHeads
    assert groups == [{local: 6}] * 2 + [{routed: 4, local: 2}] * 2
    number = sum(math.prod(weight.shape) for weight in lm.trainable_weights)
    card = read("docs/model_card.md")
    assert f"{number:,} weights" in card
    assert "The first two layers have 6 local heads" in card
    assert "the last two have 2 local heads and 4 routed heads of 32" in card


def test_the_readme_is_a_front_door():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert lines.index("```python") < 40
    assert not any(line.startswith("| ") for line in lines)


COMMANDS = ["analyse", "convert", "datagen", "evaluate", "export", "generate", "train"]


def test_the_page_of_flags_has_all_flags():
    found = set()
    for name in COMMANDS:
        command = [sys.executable, "-m", f"routing_tf.{name}", "--help"]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        own = shown.stdout.partition(f"routing_tf.{name}:\n")[2]
        flag_names = re.findall(r"^  --(?:\[no\])?(\w+):", own, re.M)
        assert flag_names, shown.stderr
        found |= set(flag_names)
    page = (ROOT / "docs/flags.md").read_text()
    assert found == set(re.findall(r"`--(\w+)`", page)) - {"help"}


def test_the_citation_has_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def listed(page):
    """Returns the names in the table of an API page, and those that it documents."""
    text = (ROOT / "docs/api" / page).read_text()
    table = re.findall(r"^   (\w+)$", text.partition("autosummary::")[2], re.M)
    return table, re.findall(r"^\.\. auto(?:class|function):: (\w+)", text, re.M)


@pytest.mark.parametrize(
    "module, pages",
    [
        (layers, ("attention.md", "heads.md", "blocks.md")),
        (
            zoo,
            (
                *("other_heads.md", "experts_and_memories.md", "downsampling.md"),
                "recurrence.md",
            ),
        ),
        (models, ("models.md",)),
        (problems, ("problems.md",)),
        (tokenizers, ("tokenizers.md",)),
        (optimizers, ("optimizers.md",)),
    ],
)
def test_the_reference_has_every_public_name(module, pages):
    names = []
    for page in pages:
        table, documented = listed(page)
        assert table == documented, page
        names += documented
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value)
    }
    assert len(names) == len(set(names))
    assert public <= set(names)
    assert all(hasattr(module, name) for name in names)
