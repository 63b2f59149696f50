import functools
import json
import pathlib

import numpy as np
import pytest
from keras import ops

from benchmarks import recall
from benchmarks import recall_data
from benchmarks import recall_model
from benchmarks.tasks.task import Examples
from tests import command_line
from tools import recall_errors

pytestmark = pytest.mark.slow
SIZES = {"length": 32, "pairs": 4, "vocabulary": 64}
parse = functools.partial(command_line.parse, recall)


@pytest.fixture
def results(tmp_path):
    return f"--results={tmp_path / 'recall.json'}"


@pytest.fixture
def trained(monkeypatch):
    """The runs that would have been trained; larger learning rates are better."""
    runs = []

    def train(settings, eval_every, diagnose=False):
        runs.append(settings)
        accuracy = 10 * settings.learning_rate + settings.seed / 100
        scopes = {scope: accuracy for scope in recall_model.scopes(settings.pattern)}
        curve = [[eval_every, accuracy / 2], [2 * eval_every, accuracy]]
        found = {"accuracy": scopes, "seconds_per_step": 0.1, "curve": curve}
        return {**found, "diagnosis": []} if diagnose else found

    monkeypatch.setattr(recall_model, "train", train)
    return runs


def test_labels_are_the_values_behind_the_keys():
    tokens, positions, labels, _ = recall_data.make_examples(200, **SIZES, seed=0)
    assert tokens.shape == (200, 32) and positions.shape == labels.shape == (200, 4)
    for row, places, values in zip(tokens, positions, labels):
        pairs = dict(zip(row[:8:2].tolist(), row[1:8:2].tolist()))
        assert len(pairs) == 4 and len(set(pairs.values())) == 4
        assert all(1 <= key < 32 <= value < 64 for key, value in pairs.items())
        assert [pairs[key] for key in row[places].tolist()] == values.tolist()
        assert sorted(row[places].tolist()) == sorted(pairs)
        assert (np.diff(places) > 0).all() and places[0] >= 8
        assert not (places % 2).any()


def test_synonyms_are_never_the_same_token():
    examples = recall_data.make_examples(200, 32, 4, 64, seed=0, synonyms=3)
    places = recall_data.first_places(examples)
    first, values = (
        np.take_along_axis(examples.tokens, places + i, axis=1) for i in (0, 1)
    )
    again = np.take_along_axis(examples.tokens, examples.positions, axis=1)
    np.testing.assert_array_equal(values, examples.labels)
    np.testing.assert_array_equal((first - 1) // 3, (again - 1) // 3)
    assert (first != again).all() and again.min() >= 1 and again.max() < 32
    shifts, counts = np.unique(again - first, return_counts=True)
    assert shifts.tolist() == [-2, -1, 1, 2] and counts.min() > 80
    with pytest.raises(ValueError, match="`synonyms`.*synonyms=8"):
        recall_data.make_examples(1, 32, 4, 64, seed=0, synonyms=8)


def test_examples_depend_on_seed_and_step_alone():
    first, again, later, other = (
        recall_data.make_examples(3, **SIZES, seed=seed, step=step)
        for seed, step in ((1, 2), (1, 2), (1, 3), (2, 2))
    )
    assert all(np.array_equal(x, y) for x, y in zip(first, again))
    assert not np.array_equal(first.tokens, later.tokens)
    assert not np.array_equal(first.tokens, other.tokens)


def test_gaps_follow_a_power_law():
    # With one pair the law is not changed by places that are taken.
    examples = recall_data.make_examples(20000, 32, 1, 64, seed=0)
    gaps = (examples.positions[:, 0] - 2) // 2
    wanted = np.arange(1, 16.0) ** (0.01 - 1)
    shares = np.bincount(gaps, minlength=15) / len(gaps)
    np.testing.assert_allclose(shares, wanted / wanted.sum(), atol=0.015)


def test_fillers_are_of_the_whole_vocabulary():
    tokens = recall_data.make_examples(2000, **SIZES, seed=0).tokens[:, 8:]
    counts = np.bincount(tokens.reshape(-1), minlength=64)
    assert counts.min() > 0.8 * counts[32:].mean()


@pytest.mark.parametrize(
    "message, length, pairs, vocabulary",
    [
        ("Received: 31x4", 31, 4, 64),
        ("Received: 32x9", 32, 9, 64),
        ("vocabulary=32 .* --vocabulary=64", 32, 4, 32),
    ],
)
def test_sizes_without_room_are_refused(message, length, pairs, vocabulary):
    with pytest.raises(ValueError, match=message):
        recall_data.make_examples(1, length, pairs, vocabulary, seed=0)


# Keys 1 and 2 with values 5 and 6, which come again at 4 and 7.
EXAMPLE = Examples.of(np.array([[1, 5, 2, 6, 1, 3, 3, 2]]), [[4, 7]], [[5, 6]])
# The first head has both matches; behind that of key 2 stand members 5 and 6.
HEADS = [[0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 0, 0, 0]]
# Without a shift the matches are the values at 1 and 3; the query counts as a member.
UNSHIFTED = [[1, 0, 1, 0, 0, 1, 0, 0]]
# Queries that read two clusters have half of the window in each.
READ_TWO = [[[1, 0]] * 8]
QUERIES, KEYS = [[1, 1, 1, 1, 0, 1, 1, 1]], [[0, 1, 0, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    "queries, keys, key_shift, window, expected",
    [
        (HEADS, HEADS, 1, 2, {"same_cluster": [1.0, 0.5], "pushed_out": [0.5, 1.0]}),
        (HEADS, HEADS, 1, 2, {"found_by_any": 0.5, "evenness": [0.954434, 0.543564]}),
        (HEADS, HEADS, 1, 3, {"pushed_out": [0.0, 1.0], "found_by_any": 1.0}),
        (READ_TWO, HEADS[:1], 1, 2, {"same_cluster": [1.0], "pushed_out": [1.0]}),
        (READ_TWO, HEADS[:1], 1, 6, {"pushed_out": [0.0], "found_by_any": 1.0}),
        (UNSHIFTED, UNSHIFTED, 0, 2, {"same_cluster": [1.0], "pushed_out": [1.0]}),
        (UNSHIFTED, UNSHIFTED, 0, 2, {"found_by_any": 0.0, "evenness": [0.954434]}),
        (UNSHIFTED, UNSHIFTED, 0, 3, {"pushed_out": [0.5], "found_by_any": 0.5}),
        # Pushed out by the other key.
        (QUERIES, KEYS, 1, 1, {"same_cluster": [0.5], "pushed_out": [1.0]}),
        (QUERIES, KEYS, 1, 2, {"found_by_any": 0.5}),
    ],
)
def test_figures_of_routing(queries, keys, key_shift, window, expected):
    queries, keys = np.array(queries)[None], np.array(keys)[None]
    read = queries if queries.ndim == 4 else queries[..., None]
    found = recall_data.routing_figures(EXAMPLE, read, keys, window, key_shift, 2)
    assert found.keys() == {"same_cluster", "pushed_out", "found_by_any", "evenness"}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4), name


def test_an_empty_cluster_of_a_tensor_leaves_evenness_finite():
    keys = ops.convert_to_tensor(np.array(HEADS)[None])
    queries = np.array(HEADS)[None, ..., None]
    found = recall_data.routing_figures(EXAMPLE, queries, keys, 2, 1, num_clusters=3)
    expected = np.array([0.954434, 0.543564]) * np.log(2) / np.log(3)
    assert found["evenness"] == pytest.approx(expected, rel=1e-4)


def test_a_second_call_trains_nothing(results, trained, capsys):
    arguments = (results, "--patterns=full,expert choice", "--seeds=0,1")
    recall.benchmark(parse(*arguments))
    first = capsys.readouterr().out
    assert len(trained) == 8
    recall.benchmark(parse(*arguments))
    assert len(trained) == 8
    assert capsys.readouterr().out in first
    recall.benchmark(parse(*arguments, "--seeds=0,1,2"))
    assert [settings.seed for settings in trained[8:]] == [2] * 4


def test_a_run_is_recorded_before_the_next_one(results, trained, monkeypatch):
    train = recall_model.train

    def fail(settings, *arguments):
        if settings.pattern == "local":
            raise OSError(28, "disk.json")
        return train(settings, *arguments)

    monkeypatch.setattr(recall_model, "train", fail)
    options = parse(results, "--patterns=full,local", "--key_shifts=1")
    with pytest.raises(OSError, match=r"disk\.json"):
        recall.benchmark(options)
    (run,) = json.loads(pathlib.Path(options.results).read_text())["runs"]
    assert run["settings"]["pattern"] == "full"


def test_diagnoses_are_printed_from_the_record(results, trained, monkeypatch, capsys):
    train = recall_model.train

    def diagnosed(settings, *arguments):
        share = settings.seed / 2
        figures = {"same_cluster": [share, 1], "pushed_out": [0.0, 0.0]}
        figures |= {"evenness": [0.5, 0.5], "found_by_any": share}
        return {**train(settings, *arguments), "diagnosis": [[100, figures]]}

    monkeypatch.setattr(recall_model, "train", diagnosed)
    arguments = (results, "--patterns=token choice", "--key_shifts=1", "--seeds=0,1")
    recall.benchmark(parse(*arguments, "--diagnose"))
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == (
        "| token choice | 1 | 128 tokens, 8 pairs, window 32 | 100 | 0.625 ± 0.177 (2) "
        "| 0.000 ± 0.000 (2) | 0.500 ± 0.000 (2) | 0.250 ± 0.354 (2) |"
    )
    recall.benchmark(parse(*arguments, "--diagnose", "--print_only"))
    assert capsys.readouterr().out in printed
    recall.benchmark(parse(results, "--patterns=full", "--diagnose", "--print_only"))
    assert "No run is diagnosed." in capsys.readouterr().out


def test_table(results, trained, capsys):
    common = (results, "--patterns=full,expert choice", "--key_shifts=1")
    recall.benchmark(parse(*common, "--seeds=0,1"))
    recall.benchmark(parse(*common, "--patterns=full", "--sizes=256x16"))
    capsys.readouterr()
    arguments = (*common, "--seeds=0,1", "--sizes=128x8,256x16", "--print_only")
    recall.benchmark(parse(*arguments))
    assert capsys.readouterr().out.splitlines()[-5:] == [
        "| pattern | key_shift | scope | learning rate | 128 tokens, 8 pairs, window 32"
        " | 256 tokens, 16 pairs, window 32 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| full | 1 | both | 0.003 | 0.035 ± 0.007 (2) | 0.030 (1) |",
        "| expert choice | 1 | full | 0.003 | 0.035 ± 0.007 (2) | - |",
        "| expert choice | 1 | prefix | 0.003 | 0.035 ± 0.007 (2) | - |",
    ]
    assert len(trained) == 5


def test_learning_rates_are_chosen_at_one_size(results, trained, capsys):
    arguments = ("--patterns=token choice", "--key_shifts=1", "--sizes=256x16")
    rates = "--learning_rates=0.01,0.03,0.02"
    recall.benchmark(parse(results, *arguments, rates, "--seeds=0,1"))
    assert [(s.length, s.learning_rate, s.seed) for s in trained] == [
        *((128, rate, 0) for rate in (0.01, 0.03, 0.02)),
        (256, 0.03, 0),
        (256, 0.03, 1),
    ]
    assert "| both | 0.03 | 0.305" in capsys.readouterr().out


def test_settings_are_the_key(results, trained):
    arguments = (results, "--patterns=token choice,hashed", "--key_shifts=1")
    recall.benchmark(parse(*arguments))
    changes = "--options=decay=0.99,centroid_initialization=tokens"
    recall.benchmark(parse(*arguments, changes, "--num_heads=1"))
    assert [settings.pattern for settings in trained[2:]] == ["token choice"]
    assert trained[2].options == {"decay": 0.99, "centroid_initialization": "tokens"}
    recall.benchmark(parse(*arguments, "--diagnose"))  # not known yet of these
    assert len(trained) == 5
    recall.benchmark(parse(*arguments, "--diagnose"))
    assert len(trained) == 5


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--sizes=128", "--sizes .*Received: '128'"),
        ("--sizes=16x8", "Received: 16x8"),
        ("--windows=1", "--windows .*Received: --windows=1"),
        ("--windows=33", "--windows .*Received: --windows=33"),
        ("--learning_rates=fast", "--learning_rates .*--learning_rates=fast"),
        ("--steps=1,2", "--steps .*--steps=1,2 .*--sizes=128x8"),
        ("--options=decay", "name=value.*'decay'"),
        ("--patterns=all", "--patterns .*--patterns=all"),
    ],
)
def test_bad_flags_are_refused(results, argument, message):
    with pytest.raises(ValueError, match=message):
        recall.benchmark(parse(results, argument, "--print_only"))


def test_exploring_queries_are_part_of_a_run(results, trained, capsys):
    """Runs without them are found in records that know of none."""
    arguments = [results, "--patterns=hashed,local", "--key_shifts=1"]
    for number in (0, 3):
        recall.benchmark(parse(*arguments, f"--exploring_queries={number}"))
    assert [(s.pattern, s.exploring_queries) for s in trained] == [
        *(("hashed", 0), ("local", 0)),
        ("hashed", 3),
    ]
    assert "exploring_queries" not in trained[0].key
    assert trained[2].key["exploring_queries"] == 3
    assert "3 queries of a head explore." in capsys.readouterr().out
    (group,) = recall_model.head_groups(trained[2])
    assert group.exploring_queries == 3


SMALL = ("--vocabulary=64", "--batch_size=4", "--width=16", "--key_dim=8")


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("expert choice", marks=pytest.mark.thorough),
        "token choice",
        "multipole",
    ],
)
def test_a_short_run(pattern, monkeypatch, eager):
    monkeypatch.setattr(recall_model, "EVALUATED", 20)
    settings = recall.settings_of(parse(*SMALL), pattern, 1, (32, 4, 8, 2))
    diagnose = pattern == "token choice"
    found = recall_model.train(settings, eval_every=1, diagnose=diagnose)
    assert list(found["accuracy"]) == list(recall_model.scopes(pattern))
    assert [step for step, _ in found["curve"]] == [1, 2]
    assert json.loads(json.dumps(found)) == found
    if diagnose:
        (_, first), _ = found["diagnosis"]
        assert len(first["same_cluster"]) == 1
        assert first["found_by_any"] <= first["same_cluster"][0] <= 1


def test_keys_that_stand_among_the_fillers():
    tokens = np.array([[1, 9, 3, 8, 3, 7, 1, 3], [1, 9, 3, 8, 2, 7, 1, 3]])
    examples = Examples.of(tokens, np.array([[6, 7], [6, 7]]), tokens[:, 1:4:2])
    found = recall_errors.stands_once(examples)
    assert found.tolist() == [[True, False], [True, True]]
    found = recall_errors.stands_once(examples, synonyms=2)  # 1 and 2 are one key
    assert found.tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("pattern", recall.PATTERNS)
def test_heads_of_a_pattern(pattern):
    changes = "--options=share_query_key=False,num_rounds=2"
    options = parse("--num_heads=3", "--windows=10", changes)
    settings = recall.settings_of(options, pattern, 1, (64, 4, 10, 1))
    (group,) = recall_model.head_groups(settings)
    config = group.get_config()
    assert config["num_heads"] == 3 and config["key_shift"] == 1
    if pattern == "local":
        assert config["block_shape"] == (5,) and config["flange_blocks"] == 1
    if pattern in recall.CLUSTERED:
        # Some of the window of multipole heads is near.
        window = config["attention_window"] + config.get("block_length", 0)
        assert window == 10 and not config["share_query_key"]
        assert 12 in (config.get("num_clusters"), config.get("num_buckets"))
    assert config.get("num_rounds") == (2 if pattern == "hashed" else None)
