"""Tests of what is asked of a trained model, without one."""

import types

import numpy as np
import pytest

from benchmarks.retrofit import continuation
from benchmarks.retrofit import needles
from benchmarks.retrofit import training
from routing_tf import layers
from routing_tf import retrofit
from routing_tf.retrofit import scoring
from tests import command_line
from tests.retrofit import families


def ids_of(text):
    return list(text.encode())


def test_a_sample_has_its_needle_and_ends_with_the_answer():
    hay = np.asarray(ids_of(needles.SENTENCES * 20))
    rows = [needles.sample_of(ids_of, hay, 600, seed) for seed in range(3)]
    texts = [bytes(row.tolist()).decode() for row, _ in rows]
    assert len(set(texts)) == 3
    for text, (_, number) in zip(texts, rows, strict=True):
        question, answer = text[:-number], text[-number:]
        assert len(text) == 600 and question.endswith("provided text is")
        assert f" is:{answer}. " in question
        assert question.count(answer) == 1


@pytest.mark.slow
def test_a_text_that_is_read_in_chunks_has_the_scores_of_one_call():
    rows = np.random.default_rng(0).integers(families.VOCABULARY, size=(1, 24))
    rows = rows.astype("int32")
    lm = families.causal_lm("Llama")
    sizes = {"num_recent": 4, "attention_window": 4, "num_clusters": 2}
    retrofit.sparsify(lm, rows, keep_full=(), **sizes)
    whole = scoring.log_likelihoods(lm, rows[:, :-1], rows[:, 1:])[0]
    in_chunks = continuation.in_chunks(lm, 8)(rows[0])
    np.testing.assert_allclose(in_chunks, whole, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_a_fit_that_is_done_is_read_from_its_file(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).integers(families.VOCABULARY, size=(2, 24))
    options = types.SimpleNamespace(weights=str(tmp_path), fit_learning_rate=None)
    teacher = families.causal_lm("Llama")

    def fitted():
        lm = families.causal_lm("Llama")
        lm.set_weights(teacher.get_weights())
        sizes = {"num_recent": 4, "attention_window": 4, "num_clusters": 2}
        retrofit.sparsify(lm, rows, keep_full=(), **sizes)
        before = lm.get_weights()
        training.fit_layers(lm, rows, options)
        return before, lm.get_weights()

    before, first = fitted()
    assert any((old != new).any() for old, new in zip(before, first, strict=True))
    monkeypatch.setattr(retrofit, "distill", None)  # not called
    for old, new in zip(first, fitted()[1], strict=True):
        np.testing.assert_array_equal(new, old)


def test_weights_of_other_settings_are_refused(tmp_path):
    folder = f"--weights={tmp_path / 'new'}"
    own = command_line.parse(training, folder)
    training.check_weights(own)
    training.keep_settings(own)
    training.check_weights(command_line.parse(training, folder, "--num_windows=1"))
    other = command_line.parse(training, folder, "--rank=4")
    with pytest.raises(ValueError, match=r"`--weights` must .* has {'rank': 8}"):
        training.train(None, other)
    (tmp_path / "new" / training.SETTINGS).rename(tmp_path / "new" / "checkpoint")
    with pytest.raises(ValueError, match="'rank': 'unknown'"):
        training.check_weights(own)


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_adapters_come_closer_to_the_full_model_and_go_on_from_a_file(tmp_path):
    rows = np.random.default_rng(0).integers(families.VOCABULARY, size=(1, 24))
    teacher = families.causal_lm("Llama")

    def trained(num_rows):
        lm = families.causal_lm("Llama")
        lm.set_weights(teacher.get_weights())
        retrofit.sparsify(lm, rows, keep_full=(), heads=layers.SlidingHeads(4, 1))
        options = {"rank": 2, "learning_rate": 0.01, "weights": str(tmp_path)}
        options = types.SimpleNamespace(**options)
        before = float(training.Student(lm, teacher)(rows))
        training.train_adapters(lm, teacher, np.repeat(rows, num_rows, 0), options)
        return lm, before, float(training.Student(lm, teacher)(rows))

    lm, before, after = trained(20)
    assert after < 0.9 * before
    again, _, same = trained(20)
    assert same == pytest.approx(after, rel=1e-5)
    for weight, old in zip(again.trainable_weights, lm.trainable_weights, strict=True):
        np.testing.assert_array_equal(weight, old)
