"""Tests of what is asked of a trained model, without one."""

import numpy as np

from benchmarks.retrofit import needles


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
