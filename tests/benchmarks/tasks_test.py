"""The sequences of the field's tasks, from their definitions."""

import collections
import itertools
import re
import statistics
import uuid

import numpy as np
import pytest

from benchmarks.tasks import copying
from benchmarks.tasks import listops
from benchmarks.tasks import mad
from benchmarks.tasks import mqar
from benchmarks.tasks import texts
from benchmarks.tasks.settings import TASKS
from benchmarks.tasks.task import SCORES
from benchmarks.tasks.task import Examples
from benchmarks.tasks.task import draw_distinct

pytestmark = pytest.mark.slow


def make(function, *arguments, **settings):
    return function(np.random.default_rng(0), *arguments, **settings)


def asked(examples):
    """Yields tokens, and the answers that count as pairs of a position and a label."""
    for tokens, *asked in zip(*(array.tolist() for array in examples)):
        yield tokens, [(at, label) for at, label, counts in zip(*asked) if counts]


@pytest.mark.parametrize("name", TASKS)
def test_every_task_keeps_its_sizes(name):
    task = TASKS[name]
    for is_training in (True, False):
        tokens, positions, labels, weights = task.examples(2, 1, 0, is_training)
        assert tokens.shape == (2, task.length)
        assert positions.shape == labels.shape == weights.shape
        assert tokens.min() >= 0 and tokens.max() < task.vocabulary
        assert labels.min() >= 0 and labels.max() < (task.num_labels or task.vocabulary)
        assert positions.min() >= 0 and positions.max() < task.length
        assert set(np.unique(weights)) <= {0, 1} and weights.sum(axis=1).min() > 0


@pytest.mark.parametrize(
    "name",
    ["mqar_64x4", "mad_fuzzy", "induction_256", "needles_tracking_1024", "listops_256"],
)
def test_sequences_depend_on_seed_and_step_alone(name):
    first, again, later, other = (
        TASKS[name].examples(2, seed, step).tokens
        for seed, step in ((1, 2), (1, 2), (1, 3), (2, 2))
    )
    np.testing.assert_array_equal(first, again)
    assert (first != later).any() and (first != other).any()


def test_draws_without_replacement_are_equally_likely():
    drawn = draw_distinct(np.random.default_rng(0), 60_000, 3, 5)
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    assert found.tolist() == [list(x) for x in itertools.permutations(range(5), 3)]
    assert counts.min() > 880 and counts.max() < 1120


def test_fillers_of_zero_are_all_but_pairs_and_queries():
    examples = make(mqar.mqar, 50, 64, pairs=4, vocabulary=512, random_fillers=False)
    for tokens, answers in asked(examples):
        pairs = dict(zip(tokens[:8:2], tokens[1:8:2]))
        assert [pairs[tokens[at]] for at, _ in answers] == [x for _, x in answers]
        fillers = set(range(8, 64)) - {at for at, _ in answers}
        assert len(fillers) == 52 and all(tokens[at] == 0 for at in fillers)
        assert 0 not in pairs


def test_a_key_that_is_updated_has_its_latest_value():
    examples = make(mqar.mqar, 50, 64, pairs=4, updates=2, vocabulary=512)
    for tokens, answers in asked(examples):
        old = dict(zip(tokens[:8:2], tokens[1:8:2]))
        latest = old | dict(zip(tokens[8:12:2], tokens[9:12:2]))
        assert len(old) == len(latest) == 4
        assert sum(old[key] != latest[key] for key in old) == 2
        assert {tokens[at]: label for at, label in answers} == latest
        assert all(at >= 12 and at % 2 == 0 for at, _ in answers)


def test_only_both_parts_of_a_key_tell_its_value():
    examples = make(mqar.compositional, 50, 128, pairs=9, vocabulary=300)
    for tokens, answers in asked(examples):
        triples = list(zip(tokens[:27:3], tokens[1:27:3], tokens[2:27:3]))
        values = {(first, second): value for first, second, value in triples}
        firsts, seconds = (set(part) for part in zip(*values))
        assert set(values) == set(itertools.product(firsts, seconds))
        assert len(firsts) == len(seconds) == 3 and len(set(values.values())) == 9
        assert max(firsts) < 100 <= min(seconds) and max(seconds) < 200
        assert min(values.values()) >= 200 and min(firsts) > 0
        found = {(tokens[at - 1], tokens[at]): label for at, label in answers}
        assert found == values
        assert all(at >= 27 and at % 3 == 1 for at, _ in answers)


def known_values(tokens, last, noise=256):
    """Returns the places after which a known value stands, and that value."""
    values, found = {}, []
    tokens = [*tokens, last]
    for at in range(0, len(tokens), 2):
        key, value = tokens[at : at + 2]
        if key >= noise:
            assert value >= noise
            continue
        if key in values:
            found.append((at, values[key]))
        assert values.setdefault(key, value) == value
    return found


@pytest.mark.parametrize("name, noise", [("mad_recall", 256), ("mad_noisy_n0.6", 16)])
def test_known_keys_are_asked_for(name, noise):
    held_out = TASKS[name].examples(50, 0, is_training=False)
    for row, (tokens, answers) in enumerate(asked(held_out)):
        assert answers == known_values(tokens, held_out.labels[row, -1], noise)
        assert answers[-1][0] == len(tokens) - 1


def test_training_tells_every_next_token():
    tokens, positions, labels, weights = TASKS["mad_recall"].examples(3, 0)
    np.testing.assert_array_equal(tokens[:, 1:], labels[:, :-1])
    assert (weights == 1).all() and (positions == np.arange(127)).all()


def test_the_share_of_noise():
    tokens = TASKS["mad_noisy"].examples(500, 0).tokens
    assert np.mean(tokens[:, :-1] >= 16) == pytest.approx(0.2 * 62 / 63, abs=0.01)
    noisy = {"vocabulary": 32, "num_noise": 16, "noise": 0.99}
    tokens = make(mad.recall, 500, 7, True, **noisy).tokens
    assert (tokens[:, :6] < 16).any(axis=1).all()


@pytest.mark.parametrize("is_training", [True, False])
def test_fuzzy_keys_have_one_to_three_tokens(is_training):
    examples = TASKS["mad_fuzzy"].examples(50, 0, is_training=is_training)
    sizes = collections.Counter()
    for row, (tokens, answers) in enumerate(asked(examples)):
        tokens = [*tokens, examples.labels[row, -1]]
        body = list(itertools.dropwhile(lambda token: token == 15, tokens))
        runs = [tuple(x) for _, x in itertools.groupby(body, lambda token: token < 7)]
        assert all(len(set(run)) == len(run) <= 3 for run in runs)
        pairs = list(zip(runs[::2], runs[1::2]))
        sizes.update(len(key) for key, _ in pairs)
        assert pairs[-1] in pairs[:-1]
        place, seen, known = len(tokens) - len(body), {}, []
        for key, value in pairs:
            assert seen.get(key, value) == value
            place += len(key)
            if key in seen:
                known += [(place + i - 1, token) for i, token in enumerate(value)]
            seen[key] = value
            place += len(value)
        if not is_training:
            assert answers == known
    assert set(sizes) == ({1, 2, 3} if is_training else {3})


def test_no_blank_is_behind_the_last_content():
    examples = make(mad.copying, 200, 40, True, vocabulary=16, content=5)
    for tokens, answers in asked(examples):
        content = [token for token in tokens if token < 14]
        assert [label for _, label in answers] == content and len(content) == 5
        assert tokens[33] < 14 and tokens[34] == 15
        assert tokens[35:] == [14] * 5 and [at for at, _ in answers] == [*range(35, 40)]
    # The 29 blanks are before any of the contents.
    assert (examples.tokens[:, 0] == 14).mean() == pytest.approx(1 - 0.8**29, abs=0.02)


def test_one_map_is_memorized():
    values = {}
    for seed in range(3):
        for tokens, answers in asked(TASKS["mad_memorization"].examples(50, seed)):
            for at, label in answers:
                assert tokens[at] == 255
                assert values.setdefault(tokens[at - 1], label) == label
    assert len(set(values.values())) == len(values) == 127
    assert max(values) < 127 <= min(values.values()) and max(values.values()) < 255


def test_all_tokens_are_told_from_the_last_one():
    tokens, positions, labels, _ = TASKS["mad_compression"].examples(20, 0)
    np.testing.assert_array_equal(tokens, labels)
    assert (tokens[:, -1] == 15).all() and tokens[:, :-1].max() == 14


def test_content_is_copied_in_order():
    examples = make(copying.selective_copying, 300, 132)
    for tokens, answers in asked(examples):
        content = [token for token in tokens[:116] if token]
        assert [label for _, label in answers] == content and len(content) == 16
        assert set(content) <= set(range(1, 15)) and tokens[116:] == [15] * 16
        assert [at for at, _ in answers] == [*range(116, 132)]
    shares = (examples.tokens[:, :116] > 0).mean(axis=0)
    assert shares[:58].mean() == pytest.approx(16 / 116, abs=0.01)


def test_what_followed_the_sign_is_told():
    places = set()
    for tokens, answers in asked(make(copying.induction, 2000, 16)):
        first, last = (at for at, token in enumerate(tokens) if token == 16)
        assert answers == [(15, tokens[first + 1])] and last == 15
        places.add(first)
    assert places == set(range(14))


def read(examples):
    """Yields texts and their answers."""
    for tokens, answers in asked(examples):
        labels = bytes(label for _, label in answers).decode()
        text = bytes(tokens).decode()
        assert text.endswith(labels[:-1]) and answers[-1][0] == len(tokens) - 1
        yield text.removesuffix(labels[:-1]), labels


@pytest.mark.parametrize("kind", ["single_1", "multikey_2", "multikey_3"])
def test_needles(kind):
    places = []
    for text, answer in read(make(texts.needles, 20, 1024, kind=kind)):
        hay, _, question = text.partition("What are all ")
        key = re.search(r"for (\S+) mentioned", question)[1]
        needles = re.findall(r"magic (\w+) for (\S+) is: (\S+)\. ", hay)
        assert [value for _, name, value in needles if name == key] == [answer]
        if kind == "single_1":
            assert len(needles) == 1 and hay.count("The grass is green. ") >= 5
            places.append(hay.index(key) / len(hay))
        else:
            assert len(needles) > 4 and re.fullmatch(r" *(One of [^.]+\. )+", hay)
        if kind == "multikey_3":
            assert {str(uuid.UUID(x)) for x in (key, answer)} == {key, answer}
        else:
            assert re.fullmatch(r"[1-9]\d{6}", answer)
    if places:
        assert min(places) < 0.3 and max(places) > 0.7


def test_variables_are_tracked():
    for text, answer in read(make(texts.tracking, 20, 1024)):
        hay, _, question = text.partition("Find all variables")
        names, values = zip(*re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\. ", hay))
        assert names == tuple(answer.split()) and values[1:] == names[:-1]
        assert len(set(names)) == 5 and all(map(re.compile("[A-Z]{5}$").match, names))
        assert f"assigned the value {values[0]} in" in question


def test_numbers_are_looked_up_in_a_phone_book():
    for text, answer in read(make(texts.phonebook, 20, 512)):
        book, _, end = text.strip(" ").partition("\n\n")
        entries = dict(line.split(": ") for line in book.split("\n"))
        *shots, name = end.split("\n")
        assert len(shots) == 2 and all(shot in book.split("\n") for shot in shots)
        assert entries[f"{name.removesuffix(':')}"] == answer and len(entries) > 12
        assert all(re.fullmatch(r"[6-9]\d{9}", number) for number in entries.values())


def value_of(tokens):
    """Computes an expression of ListOps with a stack."""
    stack, functions = [], (min, max, statistics.median, lambda x: sum(x) % 10)
    for token in tokens:
        if token == 15:
            start = max(at for at, x in enumerate(stack) if callable(x))
            function, *values = stack[start:]
            assert 2 <= len(values) <= 10
            stack[start:] = [int(function(values))]
        else:
            stack.append(token - 1 if token < 11 else functions[token - 11])
    (value,) = stack
    return value


@pytest.mark.parametrize("shortest, length", [(32, 256), (18, 24)])
def test_expressions_have_their_value(shortest, length):
    # [MAX 2 9 [MIN 4 7 ] 0 ] and [MED 1 4 6 [SM 7 8 9 ] ]
    assert value_of([12, 3, 10, 11, 5, 8, 15, 1, 15]) == 9
    assert value_of([13, 2, 5, 7, 14, 8, 9, 10, 15, 15]) == 4
    examples = make(listops.listops, 100, length, shortest=shortest)
    for tokens, ((_, label),) in asked(examples):
        size = tokens.index(0)
        assert shortest < size < length and not any(tokens[size:])
        assert value_of(tokens[:size]) == label
    assert len(np.unique(examples.labels)) > 5


def test_scores():
    labels = [[0, 1, 2], [0, 0, 2]]
    examples = Examples.of(np.zeros((2, 3)), 0, labels, [[1, 1, 0], [1, 1, 1]])
    predicted = np.array([[0, 1, 9], [0, 3, 1]])
    found = {name: score(predicted, examples) for name, score in SCORES.items()}
    assert found["accuracy"] == pytest.approx((1 + 1 / 3) / 2)
    assert found["whole answers"] == 0.5
    # Of the labels 0, 1 and 2 there are 2/3, 1/1 and 0/1; 3 is no label, but answered.
    assert found["class accuracy"] == pytest.approx((2 / 3 + 1 + 0 + 0) / 4)
