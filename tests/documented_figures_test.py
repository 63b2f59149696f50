"""The figures of the README and the documentation are those of the records.

The records are the files in `benchmarks` that the documented commands print.
"""

import functools
import json
import math
import pathlib
import re
import shlex
import statistics

import pytest

from benchmarks import compare_patterns
from benchmarks import context
from benchmarks import equal_time
from benchmarks import figure_tables
from benchmarks import patterns
from benchmarks import recall
from benchmarks import record
from benchmarks.retrofit import __main__ as retrofit
from benchmarks.retrofit import continuation
from benchmarks.retrofit import needles
from benchmarks.retrofit import speed as retrofit_speed
from benchmarks.retrofit import training
from routing_tf import __version__
from routing_tf import layers
from routing_tf import models
from routing_tf import optimizers
from routing_tf import problems
from routing_tf import tokenizers
from routing_tf import zoo
from tests import command_line
from tests.commands_test import COMMANDS
from tests.commands_test import define

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[1]
BENCHMARKS = "docs/benchmarks.md"
SETTINGS = "docs/cluster_settings.md"
INDUCTION = "docs/induction.md"
EXISTING_MODELS = "docs/existing_models.md"
ADAM = "optimizer=adam,learning_rate=0.004"
RELATIVE = f"{ADAM},routed_relative_positions=true"
SEVERAL_CLUSTERS = (
    "num_clusters=64,clusters_per_query=4,anchor_weight=0.5,centroid_decay=0.99"
)
FOUR_OF_64 = "multipole_four_clusters"
# Training of a model that reads 132 keys.
FEW_KEYS = (
    *("--keys=132", "--fit_steps=70", "--fit_learning_rate=3e-4"),
    *("--steps=60", "--learning_rate=1e-3"),
)
# Recall of keys that come again as other tokens.
AS_OTHERS = ("--key_shifts=1", "--synonyms=4", "--steps=1600", "--seeds=0,1,2")
WIKITEXT, ADDRESSES = "valid.txt,test.txt", "sotu.txt"
# What the tables call the patterns, as `(pattern, routing scope)` of the records.
ROWS = {
    "full attention": ("full", "full"),
    "local": ("local", "full"),
    "hashed": ("hashed", "full"),
    **{name: (name, "full") for name in ("random", "sliding", "strided", "fixed")},
    'expert choice, scored in the scope `"full"`': ("expert choice", "full"),
    'expert choice, scored in the scope `"prefix"`': ("expert choice", "prefix"),
    "token choice": ("token choice", "full"),
}
# Results have three digits, times in milliseconds two.
FIGURE = re.compile(r"(?<![\w.])\d{1,3}\.(?:\d{3,}|\d\d(?= ms))(?![\w.]*\d)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.S)
RECALL = re.compile(r"`python\s+-m\s+benchmarks.recall\s+--print_only\s+(.*?)`", re.S)
# Figures that sentences of a page have besides those of the tables of benchmarks.
OWN_FIGURES = {
    "README.md": "",
    "docs/choosing_heads.md": "",
    "docs/faq.md": "",
    "docs/recipes.md": "0.666 0.689 0.671 0.985 1.288 0.482 0.490 0.671 0.644 "
    "4.379 4.057",
}


def read(page):
    """Returns a page with all white space as single spaces."""
    return " ".join((ROOT / page).read_text().split())


def rows_below(heading, page=BENCHMARKS):
    """Returns the rows of the first table at or below a heading: plain cells."""
    text = (ROOT / page).read_text()
    text = text[text.index(heading) :]
    lines = text[text.index("|") :].partition("\n\n")[0].splitlines()
    cells = [line.strip("|").replace("**", "").split("|") for line in lines[2:]]
    return [[cell.strip() for cell in row] for row in cells]


def recall_of(*arguments):
    record = f"--results={ROOT / 'benchmarks/recall.json'}"
    return recall.Benchmark(command_line.parse(recall, record, *arguments))


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


def shown(values, missing=""):
    """Returns mean and deviation of values as the benchmarks print them."""
    if not values:
        return missing
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def bits(*arguments, **settings):
    """Returns bits per byte as `benchmarks.compare_patterns` prints them, or ""."""
    return shown(values_of(*arguments, **settings))


def mean(*arguments, **settings):
    return bits(*arguments, **settings).partition(" ")[0]


def row_of(name):
    """Returns the pattern and scope of a row of a table of language models."""
    return ROWS[name.replace(", window of 64", "")]


def test_feed_forward_layers():
    record = compare_patterns.Figures(ROOT / "benchmarks/feed_forwards.json")
    speeds = {run["pattern"]: run for run in record.find(kind="speed")}
    fastest = speeds["token choice"]["tokens_per_second"]

    def bits_after(name, steps):
        runs = record.find(kind="bits", pattern=name, steps=steps, seed=0)
        return shown([run["bits_per_byte"]["full"] for run in runs[:1]], missing="-")

    rows = rows_below("## What feed-forward", "docs/experts_and_memories.md")
    for name, *cells in rows:
        name = name.replace("GEGLU in each block", "token choice")
        speed = speeds[name]["tokens_per_second"]
        steps = round(900 * speed / fastest)
        assert cells == [
            f"{speeds[name]['weights']:,}",
            f"{speed:,}",
            bits_after(name, 900),
            f"{bits_after(name, steps)}, {steps} steps",
        ]
    assert len(rows) == len(speeds)


@pytest.mark.parametrize(
    "length,arguments",
    [
        ("2,048 tokens, 260 keys", ()),
        ("2,048 tokens, 132 keys", ("--keys=132",)),
        ("4,096 tokens, 260 keys", ("--lengths=4096",)),
        (
            "8,192 tokens, 260 keys",
            ("--lengths=8192", "--num_windows=1"),
        ),
        (
            "On JAX, 2,048 tokens, 260 keys",
            ("--results=benchmarks/retrofit/jax.json", "--num_windows=1"),
        ),
    ],
)
def test_losses_of_a_trained_model(length, arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = command_line.parse(retrofit, *arguments)
    lines = retrofit.tables(retrofit.record.Record(options.results), options)
    printed = [row for row in cells_of(lines[5:]) if "-" not in row]
    assert rows_below(length, EXISTING_MODELS) == printed


@pytest.mark.parametrize(
    "head,command,arguments",
    [
        ("one step", retrofit_speed, ("--lengths=2048,8192,32768",)),
        ("all tokens at once", retrofit_speed, ("--what=prefill", "--lengths=8192")),
        ("right answers", needles, ()),
        ("nats beyond full attention, 2,048 tokens, 260 ", training, ()),
        (
            "nats beyond full attention, 2,048 tokens, 132 ",
            training,
            FEW_KEYS,
        ),
        (
            "nats beyond full attention, 8,192 tokens, 132 ",
            training,
            (*FEW_KEYS, "--scored_length=8192", "--num_windows=1"),
        ),
        ("nats per token, the last 256 ", continuation, ()),
        (
            "nats per token, the last 4,096 of 16,384 ",
            continuation,
            (
                "--length=16384",
                "--continuation=4096",
                "--num_windows=1",
                "--read=8192,16384",
                "--contenders=multipole with 128 clusters,"
                "multipole with far_distance=4096,multipole with far_distance=1024",
            ),
        ),
        (
            "nats per token, the last 4,096 of 65,536 ",
            continuation,
            (
                "--length=65536",
                "--continuation=4096",
                "--num_windows=1",
                "--read=8192,65536",
                "--contenders=multipole with far_distance=1024,"
                "multipole with far_distance=1024 without means",
            ),
        ),
    ],
)
def test_times_and_answers_of_a_trained_model(head, command, arguments):
    file = command_line.parse(command).results
    options = command_line.parse(command, f"--results={ROOT / file}", *arguments)
    lines = command.table(retrofit.record.Record(options.results), options)
    assert rows_below(f"| {head}", EXISTING_MODELS) == cells_of(lines[2:])


def cells_of(lines):
    """Returns the cells of the rows of a table in Markdown."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_recall():
    found = recalled(*MAIN)
    rows = rows_below("### Recall")
    assert {ROWS[name] for name, *_ in rows} == set(found)
    for name, _, *cells in rows:
        assert cells == found[ROWS[name]], name


def test_recall_of_keys_that_come_again_as_other_tokens():
    for name, *cells in rows_below("## Reading beyond", SETTINGS):
        assert cells == [recalled_as_others(name, column) for column in (0, 1)], name


# Options of recall: tokens of a block, members, clusters read, and decay.
MEANS = (
    "share_query_key=True,normalization=layer,num_sinks=0,num_recent=0,"
    "block_length=%s,attention_window=%s,clusters_per_query=%s,choice=centroid,"
    "balance_rate=0.01,decay=%s"
)
# Pattern and steps of the main job.
CENTROIDS_IN_LANGUAGE = {
    "token choice, 1 of 16": ("token choice", 900),
    "multipole, 1 of 16": ("multipole", 900),
    "multipole, 4 of 64": (FOUR_OF_64, 900),
    "multipole, 1 of 16, 9,000 steps": ("multipole", 9000),
}
# Clusters, tokens of a block, members and clusters read.
CLUSTERS_READ = ((16, 16, 17, 1), (32, 16, 16, 2), (64, 8, 24, 4))
# Clusters at 128 tokens, and options of learned and random centroids.
CENTROIDS_IN_RECALL = {
    "token choice, 1 of 8": (8, "balance_rate=0.01", "balance_rate=0.01,decay=1.0"),
    "token choice, exploring, 2 of 16 or 32 (learned ones with anchors)": (
        16,
        "balance_rate=0.01,decay=0.99,anchor_weight=0.5,clusters_per_query=2",
        "balance_rate=0.01,decay=1.0,clusters_per_query=2",
    ),
    **{
        f"multipole, {reads} of {clusters}": (
            clusters,
            *(MEANS % (block, window, reads, decay) for decay in (0.99, 1.0)),
        )
        for clusters, block, window, reads in CLUSTERS_READ
    },
}


def test_centroids_that_learn_or_not_in_language():
    rows = rows_below("## Finding what", INDUCTION)
    assert [name for name, *_ in rows] == list(CENTROIDS_IN_LANGUAGE)
    random = "centroid_decay=1.0"
    for name, *cells in rows:
        pattern, steps = CENTROIDS_IN_LANGUAGE[name]
        columns = (None, random, "qk_norm=true", f"qk_norm=true,{random}")
        for cell, hparams in zip(cells, columns, strict=True):
            values = values_of(pattern, 1, steps=steps, hparams=hparams)
            expected = f"{shown(values)} ({len(values)})" if values else "not run"
            assert cell == expected, (name, hparams)


def test_centroids_that_learn_or_not_in_recall():
    rows = rows_below("Recall of 8 pairs", INDUCTION)
    assert [name for name, *_ in rows] == list(CENTROIDS_IN_RECALL)
    for name, *cells in rows:
        clusters, *options = CENTROIDS_IN_RECALL[name]
        pattern = name.partition(",")[0]
        for column, cell in enumerate(cells):
            longer, is_random = divmod(column, 2)
            scaled = clusters * 2 if longer and pattern != "multipole" else clusters
            arguments = (
                *AS_OTHERS,
                f"--sizes={('128x8', '256x16')[longer]}",
                f"--num_clusters={scaled}",
                f"--exploring_queries={32 if 'exploring' in name else 0}",
                f"--patterns={pattern}",
                f"--options={options[is_random]}",
            )
            found = recall_of(*arguments).table()[-1].strip("| ").rpartition(" | ")[2]
            assert cell == found.replace("-", "not run"), (name, column)


def test_sentences_of_centroids():
    (by_mass,) = values_of("multipole_by_mass", 1)
    hparams = "num_local_heads=0,num_routed_heads=6"
    (alone,) = values_of("multipole", 1, hparams=hparams)
    for sentence in (
        f"by mass, the main job has {by_mass:.3f} (one seed)",
        f"(`{hparams}`), the main job has {alone:.3f} (one seed)",
        f"learned and random ones have {pair_of('needles_single_1_1024')} in needles, "
        f"{pair_of('mad_fuzzy')} in fuzzy recall, and {pair_of('mad_copying')} in "
        "copying.",
    ):
        assert sentence in read(INDUCTION)


def pair_of(task):
    """Returns scores of multipole heads with learned and random centroids."""
    runs = record.Record(ROOT / "benchmarks/tasks/runs.json").runs
    scores = {
        json.dumps(run["settings"], sort_keys=True): run["score"]
        for run in runs
        if run["settings"]["task"] == task
        and run["settings"]["pattern"].startswith("multipole")
    }
    (pair,) = [
        (scores[key.replace(random, "")], score)
        for key, score in scores.items()
        if (random := '"centroid_decay": 1.0, ') in key
    ]
    return "{:.3f} and {:.3f}".format(*pair)


def recalled_as_others(name, column):
    """Returns a cell of the table of exploring heads, whose rows have these names."""
    size, clusters = (("128x8", 16), ("256x16", 32))[column]
    arguments = (
        *AS_OTHERS,
        *("--exploring_queries=32", f"--sizes={size}"),
    )
    if name == "token choice, exploring, with the three settings":
        changes = "balance_rate=0.01,decay=0.99,anchor_weight=0.5,clusters_per_query=2"
        arguments += (f"--num_clusters={clusters}", f"--options={changes}")
    if name == "token choice, no exploring":
        arguments += ("--exploring_queries=0", "--seeds=0,1")
    pattern = name.partition(",")[0]
    return recalled(*arguments, f"--patterns={pattern}")[pattern, "full"][0]


def test_recall_of_equal_keys_with_positions_of_rank():
    arguments = (
        *("--key_shifts=1", "--sizes=512x64", "--windows=64", "--steps=2400"),
        *("--num_clusters=32", "--exploring_queries=32", "--patterns=token choice"),
    )
    options = "balance_rate=0.03,decay=0.99,%smax_relative_position=32"
    for name, *cells in rows_below("**Positions of rank", SETTINGS):
        weight = name.rpartition(" ")[2]
        anchors = "" if name == "no anchors" else f"anchor_weight={weight},"
        given = (*arguments, f"--options={options % anchors}")
        for seed, cell in enumerate(cells):
            found = recalled(*given, f"--seeds={seed}")["token choice", "full"]
            assert found == [cell], (name, seed)


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
        keys = {"pattern": pattern, "key_shift": shift, "hparams": None}
        timed = speeds.find(kind="speed", **keys)
        if scope == "full":
            assert speed == f"{timed[-1]['tokens_per_second']:,}", name
        if any(contexts):
            assert contexts == context_of(pattern, shift), (name, shift)


def context_of(pattern, shift):
    """Returns the cells of a row that `benchmarks.context` prints."""
    options = command_line.parse(context, "--num_spans=32")
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
    assert [row[2:] for row in rows[8:]] == expected
    for row, hparams in zip(
        rows[6:8], ("qk_norm=true", "qk_norm=true,centroid_decay=1.0")
    ):
        values = [
            values_of("multipole", 1, steps=n, hparams=hparams) for n in (900, 9000)
        ]
        assert row[2:] == [shown(each, "not run") for each in values]


def test_equal_time():
    record = compare_patterns.Figures(ROOT / "benchmarks/equal_time.json")
    lines = equal_time.table(command_line.parse(equal_time), record)
    expected = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert rows_below("**Equal time on long contexts.**") == expected


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
    return patterns.table(record, command_line.parse(patterns))


def test_language_with_a_norm_of_queries_and_keys():
    page, tokens, several = SETTINGS, "token choice", SEVERAL_CLUSTERS
    rows = {
        "full": ("full", "qk_norm=true"),
        "local": ("local", "qk_norm=true"),
        "hashed, 32 buckets": ("hashed", "num_clusters=32,qk_norm=true"),
        **{
            f"token choice, {n} clusters": (tokens, f"qk_norm=true,num_clusters={n}")
            for n in (8, 32, 64)
        },
        "token choice, as in the main job (16 clusters)": (tokens, "qk_norm=true"),
        "token choice, 64 clusters, three settings, 4 clusters per query": (
            *(tokens, f"{several},qk_norm=true"),
        ),
        "multipole, 64 clusters, 4 clusters per query": (FOUR_OF_64, "qk_norm=true"),
        "the same, random centroids": (FOUR_OF_64, "qk_norm=true,centroid_decay=1.0"),
    }
    found = rows_below("| heads, with `qk_norm=true`", page)
    assert sorted(name for name, *_ in found) == sorted(rows)
    for name, *cells in found:
        pattern, hparams = rows[name]
        for cell, files in zip(cells, (None, ADDRESSES), strict=True):
            values = values_of(pattern, 1, files=files, hparams=hparams)
            assert cell == shown(values, "-"), (name, files)
    longer = shown(values_of(tokens, 1, steps=954), "not run")
    assert f"gain as much: {longer}." in read(page)


def test_sentences_of_settings_on_the_addresses():
    tokens, several = "token choice", SEVERAL_CLUSTERS
    fewer = f"{several},num_local_heads=4,num_routed_heads=2"
    for pattern, hparams in (
        ("local", None),
        (tokens, None),
        (tokens, fewer),
        ("local", "use_gate=true"),
        (tokens, f"use_gate=true,{several}"),
        (tokens, f"attention_window=128,{several}"),
    ):
        values = values_of(pattern, 1, files=ADDRESSES, hparams=hparams)
        assert shown(values, "not run") in read(SETTINGS), hparams
    of_fewer = values_of(tokens, 1, files=ADDRESSES, hparams=fewer)
    local = values_of("local", 1, files=ADDRESSES, hparams=None)
    leads = [a - b for a, b in zip(local, of_fewer, strict=True)]
    mean, later = (statistics.mean(each) for each in (leads, leads[3:]))
    for sentence in (
        f"**{mean:.3f} better than local heads** (six seeds, each compared with the "
        f"same seed of local heads: {min(leads):.3f} to {max(leads):.3f})",
        f"the other three, run afterwards, have {later:.3f}.",
    ):
        assert sentence in read(SETTINGS)
    normed = "qk_norm=true,num_local_heads=4,num_routed_heads=2"
    of_multipole = values_of(FOUR_OF_64, 1, files=ADDRESSES, hparams=normed)
    sentences = [f"they reach {shown(of_multipole)}."]
    fixed = values_of(
        FOUR_OF_64, 1, files=ADDRESSES, hparams=f"{normed},centroid_decay=1.0"
    )
    random, learned = (
        " and ".join(f"{value:.3f}" for value in each[: len(fixed)])
        for each in (fixed, of_multipole)
    )
    sentences.append(f"{random}, with learned ones {learned}.")
    for hparams, sentence in (
        (None, "{:.3f} better than local heads without the norm ({:.3f} to {:.3f})"),
        (
            "qk_norm=true",
            "{:.3f} better than local heads with the norm ({:.3f} to {:.3f})",
        ),
    ):
        local = values_of("local", 1, files=ADDRESSES, hparams=hparams)
        leads = [a - b for a, b in zip(local, of_multipole, strict=True)]
        sentences.append(
            sentence.format(statistics.mean(leads), min(leads), max(leads))
        )
    assert all(sentence in read(SETTINGS) for sentence in sentences)
    uneven = f"{fewer},balance_rate=0,revive_centroids_after=20"
    first = of_fewer[0]
    (other,) = values_of(tokens, 1, files=ADDRESSES, hparams=uneven)
    sentence = f"its first seed has {other:.3f} in place of {first:.3f}."
    assert sentence in read(SETTINGS)


def test_all_patterns():
    assert "\n".join(all_patterns()) in (ROOT / BENCHMARKS).read_text()


def test_pages_have_the_figures_of_speed():
    found = figure_tables.blocks(record.Record(ROOT / "benchmarks/figures.json"))
    for name, lines in found.items():
        text = (ROOT / figure_tables.PAGES[name]).read_text()
        assert figure_tables.renewed(text, name, lines) == text, name


def prose(text):
    """Returns a text without its code, its tables and the learning rates of runs."""
    text = re.sub(r"learning rate (of )?[\d.]+", "", CODE.sub("", text))
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


def figures_of_tables():
    """Returns the figures of tables that tests above compare with the records.

    Those of times as sentences have them too, with three digits.
    """
    names = BENCHMARKS, SETTINGS, INDUCTION, EXISTING_MODELS
    pages = [(ROOT / page).read_text() for page in names]
    lines = [line for page in pages for line in page.splitlines() if line[:1] == "|"]
    found = FIGURE.findall("\n".join(lines))
    return {*found, *(f"{float(figure):.3f}" for figure in found)}


@pytest.mark.parametrize("page", OWN_FIGURES)
def test_figures_of_sentences_are_those_of_tables(page):
    found = set(FIGURE.findall(prose((ROOT / page).read_text())))
    own = set(OWN_FIGURES[page].split())
    assert found >= own and len(found) > len(own)
    assert found - own <= figures_of_tables()


def test_figures_of_recall_are_those_that_commands_print():
    """Each paragraph has its commands; some speak of one without its `--steps`, too."""
    text = (ROOT / BENCHMARKS).read_text().partition("### Recall")[2]
    num_found = 0
    for paragraph in re.split(r"\n\n|\n- ", text.partition("### Language")[0]):
        printed = set()
        for command in RECALL.findall(paragraph):
            arguments = shlex.split(" ".join(command.split()))
            if "--diagnose" in arguments:
                continue
            without = [x for x in arguments if not x.startswith("--steps")]
            for given in (arguments, without):
                cells = sum(recalled(*given).values(), [])
                printed |= set(FIGURE.findall(" ".join(cells)))
        found = set(FIGURE.findall(prose(paragraph))) - {"0.11"}
        if printed:
            assert found <= printed, paragraph
            num_found += len(found)
    assert num_found > 20


def test_recall_without_the_shift_and_without_balance():
    cells = sum(recalled(MAIN[0], "--key_shifts=0", *MAIN[2:]).values(), [])
    assert sum(cell.partition(" ")[0] > "0.110" for cell in cells) == 1
    unbalanced = "--patterns=token choice", "--options=balance_rate=0.0"
    found = recalled("--key_shifts=1", "--sizes=128x8", *unbalanced)
    (cell,) = found["token choice", "full"]
    assert f"token choice reaches {cell} at 128 tokens" in read(BENCHMARKS)


def test_sentence_of_training_by_adam():
    names = "token choice", "local"
    choice, local = (bits(name, 1, files=WIKITEXT, hparams=ADAM) for name in names)
    sentence = f"By Adam, token choice reaches {choice} and local heads {local}."
    assert sentence in read(BENCHMARKS)


def test_sentences_of_the_readme():
    """Here a figure in the place of another one would mislead most."""
    cells_of = {pattern: cells for (pattern, _), cells in recalled(*MAIN).items()}
    large = {name: cells[1].partition(" ")[0] for name, cells in cells_of.items()}
    (means,) = recalled(
        *AS_OTHERS,
        *("--sizes=128x8", "--num_clusters=32", "--patterns=multipole"),
        f"--options={MEANS % (16, 16, 2, 1.0)}",
    )["multipole", "full"]
    names = "token choice", "local", "full"
    routed, local, full = (mean(name, 1) for name in names)
    later = [mean(name, 1, steps=9000) for name in ("full", "token choice")]
    by_norm = [mean(name, 1, hparams="qk_norm=true") for name in (names[0], names[2])]
    normed = mean("multipole", 1, steps=9000, hparams="qk_norm=true")
    for sentence in (
        f"predicts {large['token choice']} of the values. With local heads in that "
        f"layer it predicts {large['local']}, and with full attention {large['full']}.",
        f"predicts {means[:5]} of 8 values in 128 tokens.",
        f"reaches {routed} bits per byte in 900 steps, local heads {local}, full "
        f"attention {full}; with",
        f"it is {by_norm[0]} against {by_norm[1]}. After 9,000 steps full attention "
        f"without the norm has {later[0]}, token choice {later[1]}; multipole heads "
        f"with it {normed}.",
    ):
        assert sentence in read("README.md")


def test_sizes_of_caches_in_the_guide():
    rows = [line.strip("| ").split(" | ") for line in all_patterns()[2:]]
    cache_of = {name: cells[-1] for name, *cells in rows}
    assert (
        f"from {cache_of['linear']} (`FeatureMapHeads`, row `linear`) over "
        f"{cache_of['full']} (`FullHeads`) to {cache_of['native_sparse']} "
        "(`NativeSparseHeads`)"
    ) in read("docs/choosing_heads.md")


def test_the_guide_has_the_tables_of_the_benchmarks():
    found = recalled(*MAIN)
    for name, *cells in rows_below("| heads | recall", "docs/choosing_heads.md"):
        pattern, scope = ROWS[name]
        accuracies = [cell.partition(" ")[0] for cell in found[pattern, scope]]
        assert cells == [*accuracies, mean(pattern, 1, scope)], name


def test_pages_agree_on_the_main_job():
    for page in ("README.md", "docs/training.md", "docs/model_card.md"):
        text = read(page)
        assert "1.39 to 1.41" in text and "1.45 or 1.46" in text, page
    for page in ("docs/training.md", "docs/model_card.md"):
        assert "8.39" in read(page)


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


def test_the_page_of_flags_has_all_flags():
    found = {name for command in COMMANDS for name in define(command)}
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
        (layers, "attention heads blocks"),
        (zoo, "other_heads experts_and_memories downsampling recurrence"),
        (models, "models"),
        (problems, "problems"),
        (tokenizers, "tokenizers"),
        (optimizers, "optimizers"),
    ],
)
def test_the_reference_has_every_public_name(module, pages):
    names = []
    for page in pages.split():
        table, documented = listed(f"{page}.md")
        assert table == documented, page
        names += documented
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value)
    }
    if module is layers:  # the zoo adds its own names
        public -= set(vars(zoo))
    assert len(names) == len(set(names))
    assert public <= set(names)
    assert all(hasattr(module, name) for name in names)
