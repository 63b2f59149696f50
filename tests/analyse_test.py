import csv
import dataclasses
import functools
import re
import sys

import numpy as np
import pytest

from routing_tf import models
from routing_tf.analysis import Probe
from routing_tf.analysis import looks
from routing_tf.analysis.windows import text_window
from routing_tf.cli import analyse
from routing_tf.training import evaluation
from routing_tf.training import loading
from routing_tf.training import run_folder
from tests import runs
from tests import small_problems

pytestmark = pytest.mark.usefixtures("eager", "loaded_once")

SETTINGS = {
    "num_layers": 2,
    "num_local_only_layers": 1,
    "hidden_dim": 16,
    "intermediate_dim": 16,
    "num_local_heads": 2,
    "num_routed_heads": 2,
    "num_clusters": 3,
    "attention_window": 6,
    "local_block_length": 8,
    "max_sequence_length": 48,
    "batch_tokens": 96,
}
PNG = b"\x89PNG\r\n\x1a\n"


def text_run(folder, text, routing, **changes):
    settings = models.preset_hyperparameters("byte_tiny")
    settings = settings.replace(**SETTINGS, routing=routing, **changes)
    options = {"files": str(text)}
    return runs.saved(folder, "text_files", settings, problem_options=options)


@pytest.fixture(scope="module")
def token_choice(tmp_path_factory, text):
    return text_run(tmp_path_factory.mktemp("token_choice"), text, "token_choice")


@pytest.fixture(scope="module")
def expert_choice(tmp_path_factory, text):
    return text_run(tmp_path_factory.mktemp("expert_choice"), text, "expert_choice")


@pytest.fixture(scope="module")
def shifted(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("shifted")
    return text_run(folder, text, "token_choice", routed_key_shift=1, local_dilation=2)


@pytest.fixture
def run(works):
    return functools.partial(works, analyse)


def causality(run, model_dir, *arguments):
    """Runs `--what=causality`: cells of the table by part, and the lines after it."""
    out = run(
        "--what=causality",
        f"--model_dir={model_dir}",
        "--num_windows=2",
        "--num_perturbations=2",
        "--eval_examples=3",
        *arguments,
    )
    lines = out.splitlines()
    parts = [line.split() for line in lines if line.startswith("block_")]
    assert all(len(cells) == 8 for cells in parts)
    return {" ".join(cells[:2]): cells[2:] for cells in parts}, lines[-3:]


def test_a_model_of_token_choice_is_strictly_causal(token_choice, run):
    table, (scores, difference, verdict) = causality(run, token_choice)
    assert list(table) == [
        "block_0 local_heads",
        "block_0 output",
        "block_1 routed_heads",
        "block_1 local_heads",
        "block_1 output",
    ]
    assert all(cells == ["0"] * 6 for cells in table.values())
    numbers = re.findall(r"\d+\.\d+", scores)
    assert len(numbers) == 2 and numbers[0] == numbers[1]
    assert difference == (
        "difference, prefix - full: +0.00000 +- 0.00000 (standard error over 3 "
        "windows, paired)"
    )
    assert verdict == "no earlier output moved: strictly causal"


def test_default_numbers_of_windows():
    look = looks.Look(lm=None, problem=None, output_dir=None)
    assert look.num_examples("causality") == 64
    assert look.num_examples("decoding") == 4
    for given, expected in ((0, None), (7, 7)):
        asked = dataclasses.replace(look, eval_examples=given)
        assert asked.num_examples("decoding") == expected


@pytest.mark.thorough
def test_decoding_scores_what_one_pass_scores(token_choice, run, monkeypatch):
    # What is exported is tested with the function itself.
    compare = functools.partial(looks.compare_decoding, with_export=False)
    monkeypatch.setattr(looks, "compare_decoding", compare)
    out = run("--what=decoding", f"--model_dir={token_choice}", "--eval_examples=1")
    lines = out.splitlines()
    (one_pass,) = re.findall(r"one parallel pass: (\d\.\d{5})", out)
    assert f"token by token: {one_pass}" in lines
    assert "held-out bits per byte of 1 windows" in lines


@pytest.mark.thorough
def test_a_model_of_expert_choice_leaks(expert_choice, run):
    table, (scores, difference, verdict) = causality(run, expert_choice)
    for part in ("block_0 local_heads", "block_0 output"):
        assert table[part] == ["0"] * 6
    assert table["block_1 local_heads"] == ["0"] * 6
    for part in ("block_1 routed_heads", "block_1 output"):
        share, mean, largest, *stack = table[part]
        assert stack == [share, mean, largest]  # nothing leaks below
        assert 0 < float(share.rstrip("%")) <= 100
        assert 0 < float(mean) < float(largest)
    begin = "later tokens reach earlier outputs by block_1 routed_heads: at "
    assert verdict.startswith(begin)
    share, mean, _ = (cell.rstrip("%") for cell in table["block_1 output"][:3])
    shown = [float(number) for number in re.findall(r"([\d.]+)%", verdict)]
    np.testing.assert_allclose(shown, [float(share), 100 * float(mean)], atol=0.1)
    full, prefix = map(float, re.findall(r"\d+\.\d+", scores))
    found = float(re.search("full: (.*) [+]-", difference)[1])
    np.testing.assert_allclose(found, prefix - full, atol=2e-4)


def test_divergences_and_clusters(expert_choice, run):
    options = ["--num_runs=2", "--length=32"]
    out = run("--what=jsd", f"--model_dir={expert_choice}", *options)
    assert "of 2 runs, each with two random heads on 32 tokens of test" in out
    lines = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    place = lines.index(["layer", "local/local", "local/routed", "routed/routed"])
    first, second = lines[place + 1 : place + 3]
    assert first[0] == "block_0" and first[2:] == ["-", "-"]
    for cell in (first[1], *second[1:]):
        mean, deviation = map(float, cell.split(" +- "))
        assert 0 < mean < 0.7 and deviation < 0.4
    assert "queries left out" in out
    (cells,) = [cells for cells in lines if cells[0] == "block_1 routed_heads"]
    shares = [float(cell.rstrip("%")) for cell in cells[1:]]
    assert 0 <= shares[0] <= 100 / 3 <= shares[1] <= 100
    assert 0 < shares[3] < 100
    # Before any training all clusters count the same.
    assert cells[5:] == ["33.33%", "33.33%", "1.0000"]


def test_maps_of_a_text(token_choice, tmp_path, run):
    text = "aßb\nabc"
    out = run(
        "--what=maps",
        f"--model_dir={token_choice}",
        f"--text={text}",
        f"--output_dir={tmp_path / 'new' / 'folder'}",
        "--layer=1",
        "--head=1",
        "--cluster=2",
    )
    files = ["block_0.png", "block_1.png", "block_1_cluster.png"]
    paths = [tmp_path / "new" / "folder" / name for name in files]
    assert all(path.read_bytes().startswith(PNG) for path in paths)
    lm = loading.load_language_model(token_choice)
    members = (
        Probe(lm).attention(text_window(lm, text))[1].clusters["routed_heads"].members
    )
    members = members[0, 1, :, 2]
    assert f"cluster 2: {members.sum()} of 9 tokens: {paths[2]}" in out


def test_reads_of_a_text(shifted, tmp_path, run):
    text = 'one "two"\tone\ntwo one'
    lm = loading.load_language_model(shifted)
    weights = Probe(lm).attention(text_window(lm, text))[1].maps["routed_heads"][0, 1]
    token = int(np.flatnonzero(weights.any(axis=-1)[:-1])[-1])
    arguments = [f"--text={text}", "--layer=1", "--head=1", f"--token={token}"]
    arguments += [f"--model_dir={shifted}", f"--output_dir={tmp_path}"]
    out = run("--what=reads", *arguments)
    rows = [line.split() for line in out.splitlines()]
    assert "at a distance of 32 or more" in out
    assert sum(row[2:3] in (["block_0"], ["block_1"]) for row in rows) == 8
    with open(tmp_path / "reads.tsv", encoding="utf-8", newline="") as file:
        _, *table = csv.reader(file, dialect="excel-tab")
    shown = ["<start>", *text.replace("\t", "⇥").replace("\n", "↵")]
    assert [row[:2] for row in table] == [[str(i), c] for i, c in enumerate(shown)]
    place = weights[token].argmax()
    assert table[token][-3:-1] == [str(place), shown[place]]
    before, (this, following) = "".join(shown[:token])[-24:], shown[token : token + 2]
    line = f'token {token} "{this}" after "{before}", followed by "{following}", reads'
    assert line in out.splitlines()
    assert next(int(row[2]) for row in rows if row[1:2] == ["token"]) == place
    assert (tmp_path / "reads.png").read_bytes().startswith(PNG)


def test_reads_of_held_out_text(expert_choice, run, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = run("--what=reads", f"--model_dir={expert_choice}")
    names = sorted(path.name for path in (expert_choice / "reads").iterdir())
    assert names == ["reads.png", "reads.tsv"]
    assert re.search(r"^block_1 routed_heads [01], every token: ", out, re.MULTILINE)
    (token,) = re.findall(r"^token (\d+) .* reads$", out, re.MULTILINE)
    first = re.search(r"^  \d\.\d{3}  token +(\d+) ", out, re.MULTILINE)
    assert int(token) - int(first[1]) >= 16  # beyond two blocks of 8
    shown = out.splitlines()[-1]
    assert len(re.findall(r"\x1b\[1;4m.\x1b\[0m", shown)) == 1
    assert len(re.sub(r"\x1b\[[0-9;]+m|<start>", "", shown)) == 47


@pytest.fixture(scope="module")
def image_run(tmp_path_factory):
    changes = f"{runs.IMAGE_HPARAMS},num_routed_heads=1,routing=expert_choice"
    settings = runs.settings(changes, "digits_small")
    return runs.saved(tmp_path_factory.mktemp("images"), "test_checkers", settings)


@pytest.mark.thorough
def test_images(image_run, run):
    table, lines = causality(run, image_run)
    assert table["block_0 routed_heads"][0] != "0"
    assert table["block_0 local_heads"] == ["0"] * 6
    assert lines[0].startswith("held-out bits per dimension: ")
    run("--what=maps", f"--model_dir={image_run}")
    assert [path.name for path in (image_run / "maps").iterdir()] == ["block_0.png"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--what=jsd", "--length=9"], "`--length` must be left out with an image mod"),
        (["--what=maps", "--head=1"], "cluster whose tokens are shown in a text"),
        (["--what=maps", "--text=a"], "takes texts. Received: one of images"),
        (["--what=reads"], "an image model; use --what=maps"),
        (["--what=reads", "--text=a"], "an image model; use --what=maps"),
    ],
)
def test_what_images_do_not_have(image_run, refused, arguments, message):
    assert message in refused(analyse, f"--model_dir={image_run}", *arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--what=jsd", "--text=a"], "--text has no effect with --what=jsd; remove it"),
        (["--what=maps", "--seed=2", "--num_runs=3"], "--seed have no effect"),
        (["--what=causality", "--length=9"], "--length has no effect"),
        (["--what=jsd", "--length=49"], "must not exceed the model's `max_sequence_"),
        (["--what=reads", "--cluster=1"], "--cluster has no effect"),
        (["--what=maps", "--token=1"], "--token has no effect"),
        (["--what=reads", "--length=49"], "must not exceed the model's `max_sequence_"),
        (["--what=reads", "--length=9", "--token=9"], "to 8. Received: --token=9"),
        (["--what=reads", "--length=9", "--head=4"], "1, 2, 3]. Received: --head=4"),
        (["--what=maps", "--text="], "`--text` must not be empty. Received: --text=''"),
        (["--what=maps", "--text=a", "--layer=0"], "the layers with clusters, [1]"),
        (["--what=maps", "--text=a", f"--output_dir={__file__}/x"], "can be written"),
        (["--what=jsd", "--problem=enwik"], "`name` must be a registered problem"),
        (["--what=jsd", "--problem=test_checkers"], "needs an image model of"),
    ],
)
def test_flags_that_do_not_fit(token_choice, refused, arguments, message):
    assert message in refused(analyse, f"--model_dir={token_choice}", *arguments)


def test_a_model_with_an_encoder(tmp_path, refused):
    settings = models.preset_hyperparameters("byte_tiny").replace(
        **{**SETTINGS, "num_encoder_layers": 1, "max_input_length": 16}
    )
    runs.saved(tmp_path, "test_copy", settings)
    said = refused(analyse, "--what=causality", f"--model_dir={tmp_path}")
    assert "must hold a run of a model without an encoder" in said
    assert "'test_copy'" in said


@pytest.mark.thorough
def test_the_metric_and_the_split_of_the_problem(tmp_path, run, monkeypatch):
    settings = models.preset_hyperparameters("byte_tiny").replace(**SETTINGS)
    runs.saved(tmp_path, "test_words", settings)
    missing = {"train", "validation"}
    monkeypatch.setattr(small_problems.Words, "missing", missing)
    _, (scores, difference, _) = causality(run, tmp_path)
    problem = run_folder.RunConfig.load(tmp_path).make_problem()
    lm = loading.load_language_model(tmp_path)
    nats = evaluation.evaluate(lm, problem, "test", 3).nats_per_token
    (found,) = re.findall(r"held-out perplexity per word: (\S+) in the", scores)
    np.testing.assert_allclose(float(found), np.exp(5 * nats), rtol=1e-4)
    assert difference.startswith("difference, prefix - full in bits per token: +0.0")


def test_maps_need_matplotlib(token_choice, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = refused(analyse, "--what=maps", f"--model_dir={token_choice}")
    assert "install it with `pip install matplotlib`" in said


def test_reads_are_text_without_matplotlib(token_choice, run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = run("--what=reads", f"--model_dir={token_choice}", f"--output_dir={tmp_path}")
    assert "install it with `pip install matplotlib`" in out
    assert (tmp_path / "reads.tsv").exists() and not list(tmp_path.glob("*.png"))
