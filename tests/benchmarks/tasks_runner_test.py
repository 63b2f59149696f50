"""The runner of the field's tasks: runs, records, and the page of their tables."""

import functools
import json
import pathlib
import re
import shlex

import keras
import numpy as np
import pytest

from benchmarks import recall_model
from benchmarks.tasks import __main__ as runner
from benchmarks.tasks import copying
from benchmarks.tasks import network
from benchmarks.tasks.settings import TASKS
from benchmarks.tasks.settings import Settings
from benchmarks.tasks.task import SCORES
from benchmarks.tasks.task import Task
from benchmarks.tasks.task import published
from routing_tf.models import Hyperparameters
from tests import command_line

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = "hidden_dim=8,key_dim=8,attention_window=8,local_block_length=4,num_clusters=2"
parse = functools.partial(command_line.parse, runner)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Makes the task `tiny`, two steps between validations, and short streams."""
    task = Task(
        *("tiny", copying.induction, 16, 17, f"{SMALL},train_steps=4"),
        batch_size=2,
        train_rows=5,
        test_rows=10,
        contexts=(24, 2**20),
        published=published("a peer: .123", "a paper, by its settings"),
    )
    monkeypatch.setitem(TASKS, "tiny", task)
    for name, value in (("STEPS_PER_EPOCH", 2), ("VALIDATED", 4), ("PIECE", 8)):
        monkeypatch.setattr(network, name, value)


@pytest.fixture
def folders(tmp_path):
    return [f"--output={tmp_path / 'runs.json'}", f"--runs_dir={tmp_path / 'runs'}"]


def test_a_run_from_the_command_to_the_table(folders, capsys, monkeypatch, eager):
    arguments = [*folders, "--only=tiny", "--patterns=token choice", "--stop_at=0"]
    runner.benchmark(parse(*arguments, "--longest=1"))
    assert "24 tokens" not in capsys.readouterr().out
    arguments.append("--longest=100")  # the run is scored once more, and not trained
    runner.benchmark(parse(*arguments))
    first = capsys.readouterr().out
    name, score = re.escape("| token_choice, key_shift 1 |"), r"\d\.\d{3} \(1\)"
    budget = "accuracy; sees 8 of 16 tokens, width 8, 2 steps of 2, learning rate 0.003"
    assert re.search(rf"\| tiny {name} {score} \| {budget} \|", first)
    cache = rf"\| tiny, 24 tokens {name} {score} \| a cache of [0-9,]+ KiB \|"
    assert re.search(cache, first)
    assert "| tiny | a peer (published) | .123 | a paper, by its settings |" in first
    monkeypatch.setattr(network, "Network", None)  # nothing is trained again
    runner.benchmark(parse(*arguments))
    assert capsys.readouterr().out in first
    runner.benchmark(parse(*arguments, "--patterns=full", "--print_only"))
    assert "| tiny | full, key_shift 1 | not run | " in capsys.readouterr().out


def test_an_interrupted_run_ends_as_if_it_had_not_been(
    folders, capsys, monkeypatch, eager
):
    made, Network = [], network.Network
    monkeypatch.setattr(
        network, "Network", lambda settings: made.append(Network(settings)) or made[-1]
    )
    # On JAX, dropout of an epoch differs in a `fit` that begins with it.
    dropout = {"residual_dropout": 0.1} if keras.backend.backend() != "jax" else {}
    changes = {"num_layers": 1, **dropout}
    hparams = ",".join(f"{name}={value}" for name, value in changes.items())
    arguments = [*folders, "--only=tiny", "--patterns=local", "--longest=1"]
    arguments += ["--key_shifts=0", f"--hparams={hparams}"]
    path = pathlib.Path(parse(*folders).output)
    runner.benchmark(parse(*arguments, "--minutes=0"))
    assert "2 of 4 steps are done" in capsys.readouterr().out
    assert not path.exists()
    runner.benchmark(parse(*arguments))
    settings = Settings("tiny", "local", changes=changes)
    (run,) = json.loads(path.read_text())["runs"]
    assert run["settings"] == settings.key and run["steps"] == 4
    whole = network.Network(settings)
    whole.train(path.parent / "whole")
    for one, other in zip(made[1].model.weights, whole.model.weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stream_answers_as_the_whole_sequence(monkeypatch, eager):
    changes = {"routed_key_shift": 1, "num_local_heads": 1}
    model = network.Network(Settings("tiny", "token_choice", changes=changes))
    monkeypatch.setitem(SCORES, "accuracy", lambda predicted, examples: predicted)
    np.testing.assert_array_equal(model.score(), model.score_stream(10, 16))


def test_each_pass_over_the_rows_has_another_order():
    batches = network.Batches(Settings("tiny", "full"), steps=2)
    rows = {}
    for epoch in (0, 1, 0):
        batches.epoch = epoch
        found = np.concatenate([batches[index][0][0] for index in range(2)])
        assert len(np.unique(found, axis=0)) == 4  # of the five
        np.testing.assert_array_equal(rows.setdefault(epoch, found), found)
    assert (rows[0] != rows[1]).any()


def test_the_convolution_reads_two_tokens_before():
    x = np.random.default_rng(0).normal(size=(1, 8, 4)).astype("float32")
    changed = x.copy()
    changed[:, 4, 0] += 1  # a norm takes off what all features share
    layer = recall_model.GatedConvolution()
    outputs = [keras.ops.convert_to_numpy(layer(each)) for each in (x, changed)]
    moved = np.abs(outputs[0] - outputs[1]).max(axis=(0, 2)) > 0
    assert moved.tolist() == [4 <= place <= 6 for place in range(8)]


@pytest.mark.thorough
def test_compression_answers_from_the_last_state(eager):
    changes = {"hidden_dim": 8, "key_dim": 4, "feed_forward": "none"}
    settings = Settings("mad_compression", "local", changes=changes)
    model = network.Network(settings).model
    tokens = np.repeat(TASKS["mad_compression"].examples(1, 0).tokens, 2, axis=0)
    tokens[1, -1] = 0
    logits = keras.ops.convert_to_numpy(model([tokens, np.array([[0, 5, 5]] * 2)]))
    assert np.abs(logits[0] - logits[1]).max(axis=1).min() > 1e-4
    np.testing.assert_array_equal(logits[:, 1], logits[:, 2])
    assert np.abs(logits[:, 0] - logits[:, 1]).max() > 1e-4


@pytest.mark.thorough
def test_encoders_answer_once(eager):
    changes = {"hidden_dim": 8, "key_dim": 4}
    settings = Settings("listops_256", "full", changes=changes)
    tokens, positions, _, _ = TASKS["listops_256"].examples(2, 0)
    tokens[1] = tokens[0]
    tokens[1, 0] = 11 + tokens[0, 0] % 4  # another operator
    model = network.Network(settings).model
    logits = keras.ops.convert_to_numpy(model([tokens, positions]))
    assert logits.shape == (2, 1, 10)
    assert np.abs(logits[0] - logits[1]).max() > 1e-6


@pytest.mark.parametrize("name", ["multipole_half_near", "multipole_four_clusters"])
def test_rows_that_read_four_clusters_refuse_another_number(name):
    with pytest.raises(ValueError, match=f"`clusters_per_query`.*{name}"):
        Hyperparameters(routing=name, num_clusters=16, clusters_per_query=2)


def test_patterns_have_rows_where_they_have_a_form(folders):
    names = "--patterns=token_choice,linformer,expert_choice,multipole_half_near,linear"
    options = parse(*folders, "--only=tiny,listops_256", names, "--key_shifts=0,1")
    found = {
        task: [runner.title(row[0]) for row in rows]
        for task, rows in runner.Benchmark(options).rows.items()
    }
    assert found["tiny"] == [
        "token_choice, key_shift 0",
        "token_choice, key_shift 1",
        "expert_choice, key_shift 0",
        "expert_choice, key_shift 1",
        "multipole_half_near, key_shift 0",
        "multipole_half_near, key_shift 1",
        "linear, key_shift 0",
        "linear, key_shift 1",
    ]
    own = ("linformer", "expert_choice", "multipole_half_near", "linear")
    assert found["listops_256"] == [f"{name}, key_shift 0" for name in own]


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--only=mad_recal", "--only .*Received: 'mad_recal'.*'mad_recall'"),
        ("--patterns=token_choise", "--patterns .*'token_choise'.*'token_choice'"),
        ("--hparams=train_step=3", "'train_step=3'.*'train_steps'"),
        ("--hparams=num_clusters=0", "`num_clusters`.*num_clusters=0"),
        ("--first_layers=conv", "--first_layers .*--first_layers=conv"),
    ],
)
def test_bad_flags_are_refused(folders, argument, message):
    with pytest.raises(ValueError, match=message):
        runner.Benchmark(parse(*folders, argument))


def tables():
    """Yields the commands on the page, and the tables below them."""
    page = (ROOT / "docs/field_tests.md").read_text()
    found = re.findall(
        r"```\n(python -m benchmarks\.tasks [^`]+?)\n```\n\n(\|[^`]+?)\n\n", page
    )
    yield from ((command.replace("\\\n", ""), table) for command, table in found)


def test_the_page_has_what_the_commands_print(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    number = 0
    for command, table in tables():
        arguments = shlex.split(command)[3:]
        assert "--print_only" in arguments
        runner.benchmark(parse(*arguments))
        assert capsys.readouterr().out.strip() == table
        number += 1
    assert number >= 3


def test_the_first_table_of_the_page_is_of_those_below():
    page = (ROOT / "docs/field_tests.md").read_text()
    table = page.partition("| task | full attention |")[2].partition("\n\n")[0]
    lines = [line[1:-1].split("|") for line in table.splitlines()[2:]]
    for name, *cells in lines:
        (task,) = re.findall(r"`([a-z]\w+(?:, [0-9,]+ tokens)?)[`,]", name)
        patterns = ("full", "local", "token_choice", r"multipole\w*")
        for pattern, cell in zip(patterns, cells, strict=True):
            score = re.escape(cell.strip())
            row = rf"\| {task} \| {pattern}, key_shift [01][^|]*\| {score} \|"
            assert not score or re.search(row, page), (task, pattern)
    assert len(lines) > 9


def test_figures_of_others_name_their_source():
    for task in TASKS.values():
        for system, score, source in task.published:
            assert system and re.search(r"\d", score) and "," in source
