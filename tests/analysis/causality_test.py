"""Tests of how later tokens reach earlier outputs."""

import copy

import numpy as np
import pytest

from routing_tf.analysis import causality
from routing_tf.analysis import find_leaks
from tests import golden_cases
from tests.analysis import small_cases

NOTHING = causality.Movement(0.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def seen(monkeypatch):
    """The inputs that are passed to the model, in their order."""
    inputs = []

    def probe(lm, routing_scope):
        shared = small_cases.probe(lm, routing_scope)
        spy = copy.copy(shared)

        def hidden_states(windows):
            inputs.append(windows)
            return shared.hidden_states(windows)

        spy.hidden_states = hidden_states
        return spy

    monkeypatch.setattr(causality, "Probe", probe)
    return inputs


def leaks_of(lm, windows, **options):
    leaks = find_leaks(lm, windows, verbose=False, **options)
    return {leak.part: leak for leak in leaks}


def assert_tight(leaks):
    assert leaks
    for leak in leaks.values():
        assert leak.itself == leak.stack == NOTHING, leak.part


def test_token_choice_moves_nothing():
    lm = small_cases.language_model(routing="token_choice", num_layers=1)
    leaks = leaks_of(lm, small_cases.windows(2), num_perturbations=2)
    assert len(leaks) == 3
    assert_tight(leaks)


@pytest.mark.thorough
@pytest.mark.parametrize("scope", ["full", "prefix"])
def test_images(scope):
    model = small_cases.image_model(num_layers=1)
    leaks = leaks_of(model, small_cases.images(2), routing_scope=scope)
    if scope == "prefix":
        assert_tight(leaks)
    else:
        assert leaks["block_0 routed_heads"].itself.share > 0
        assert leaks["block_0 local_heads"].stack == NOTHING


def movement(before, after, start):
    """A `Movement` at the positions before `start`, by the definition."""
    before, after = (x[:start].astype("float64") for x in (before, after))
    changes = np.sqrt(((after - before) ** 2).mean(axis=-1))
    size = np.sqrt((before**2).mean())
    return (changes > 1e-4).mean(), changes.mean() / size, changes.max() / size


def assert_movement(actual, expected):
    actual = actual.share, actual.mean, actual.largest
    np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=1e-5)


def test_against_a_direct_computation(seen):
    lm = small_cases.language_model()
    leaks = leaks_of(lm, small_cases.windows(1), num_perturbations=1, seed=1)
    original, replaced = (inputs["token_ids"] for inputs in seen)
    start = int(np.argmax(original[0] != replaced[0]))
    assert 0 < start < small_cases.LENGTH

    def states(token_ids):
        inputs = {"token_ids": token_ids, "padding_mask": np.ones_like(token_ids)}
        return small_cases.probe(lm).hidden_states(inputs)

    before, moved = states(original), states(replaced)
    is_later = np.arange(small_cases.LENGTH)[:, None] >= start
    for index, block in enumerate(lm.backbone.blocks):
        fixed = np.where(is_later, moved[index], before[index])
        inputs = np.concatenate([before[index], fixed, moved[index]])
        outputs = small_cases.group_outputs(block, inputs)
        outputs["output"], _ = golden_cases.run(block, inputs)
        for name, (base, itself, stack) in outputs.items():
            leak = leaks[f"block_{index} {name}"]
            assert_movement(leak.itself, movement(base, itself, start))
            assert_movement(leak.stack, movement(base, stack, start))
    assert leaks["block_1 output"].itself != leaks["block_1 output"].stack


def test_which_tokens_are_replaced(seen):
    lm = small_cases.language_model(routing="token_choice", num_layers=1)
    windows = small_cases.windows(2)
    leaks_of(lm, windows, num_perturbations=4, batch_size=2)
    assert len(seen) == 5
    np.testing.assert_array_equal(seen[0]["token_ids"], windows["token_ids"])
    starts = []
    for inputs in seen[1:]:
        differs = inputs["token_ids"] != windows["token_ids"]
        starts.append(differs.argmax(axis=-1))
        # All from there on, by ids that occur, but for the one texts start behind.
        expected = np.arange(small_cases.LENGTH) >= starts[-1][:, None]
        np.testing.assert_array_equal(differs, expected)
        assert set(inputs["token_ids"][differs]) <= set(windows["token_ids"].flat) - {0}
    # Spread over the window, and different in the two of them.
    for column in np.transpose(starts):
        assert (column > 0).all() and (np.diff(column) > 0).all()
        assert column[-1] >= small_cases.LENGTH * 3 // 4
    assert not np.array_equal(*np.transpose(starts))


def test_which_subpixels_are_replaced():
    model = small_cases.image_model(num_layers=1)
    probe = small_cases.probe(model)
    images = small_cases.images()
    before = probe.hidden_states(images)[0][0]
    replacer = causality._Replacer(probe, images, num_perturbations=2, seed=0)
    for index in range(2):
        replaced = replacer.replace(np.array([0]), index)
        start = replacer.starts[index, 0]
        # Each sub-pixel is the input of the place behind it.
        differs = replaced["images"] != images["images"]
        np.testing.assert_array_equal(differs[0], model.places() + 1 >= start)
        moved = (probe.hidden_states(replaced)[0][0] != before).any(axis=-1)
        np.testing.assert_array_equal(moved, np.arange(32) >= start)
    # At most each of them once.
    starts = causality._Replacer(probe, images, num_perturbations=99, seed=0).starts
    np.testing.assert_array_equal(starts[:, 0], np.arange(1, 32))


@pytest.mark.thorough
def test_the_seed_decides():
    lm = small_cases.language_model()
    windows = small_cases.windows(3)
    first = leaks_of(lm, windows, num_perturbations=1)
    assert first == leaks_of(lm, windows, num_perturbations=1)
    assert first != leaks_of(lm, windows, num_perturbations=1, seed=1)


@pytest.mark.thorough
def test_batches_do_not_matter():
    lm = small_cases.language_model()
    windows = small_cases.windows(3)
    one, two = (
        leaks_of(lm, windows, num_perturbations=2, batch_size=size) for size in (1, 2)
    )
    for part, leak in one.items():
        for a, b in ((leak.itself, two[part].itself), (leak.stack, two[part].stack)):
            np.testing.assert_allclose(a.mean, b.mean, rtol=1e-3, err_msg=part)
            np.testing.assert_allclose(a.largest, b.largest, rtol=1e-3, err_msg=part)


@pytest.mark.parametrize("name", ["num_perturbations", "batch_size"])
def test_wrong_numbers(name):
    lm = small_cases.language_model(routing="token_choice", num_layers=1)
    with pytest.raises(ValueError, match=f"`{name}`"):
        find_leaks(lm, small_cases.windows(), **{name: 0})


def test_windows_of_one_token():
    lm = small_cases.language_model(routing="token_choice", num_layers=1)
    windows = small_cases.windows()
    windows["token_ids"][:, 1:] = 5
    with pytest.raises(ValueError, match="`windows`.* 24 .* 1 "):
        find_leaks(lm, windows)
