import numpy as np
import pytest

from routing_tf import problems
from routing_tf.problems.problem import checksum


def test_values_count_and_types_do_not():
    ids = np.arange(1000)
    same = {checksum([ids.astype(x)]) for x in ("uint16", "int32", "int64")}
    assert len(same) == 1
    ids[17] += 1
    assert checksum([ids]) not in same
    assert checksum([ids.reshape(-1, 2)]) == checksum([ids])
    assert checksum([ids, ids]) != checksum([ids])
    assert checksum([np.zeros(0)]) == checksum([]) == 0


@pytest.mark.parametrize("length", [1, 39, 40, 41, 1000])
def test_long_arrays(length, monkeypatch):
    monkeypatch.setattr("routing_tf.problems.problem.BLOCK_LENGTH", 10)
    monkeypatch.setattr("routing_tf.problems.problem.MOST_BLOCKS", 4)
    ids = np.arange(length)
    before = checksum([ids])
    assert checksum([ids + 1]) != before
    ids[0] = 5
    assert checksum([ids]) != before


def test_all_that_a_split_is_made_of():
    problem = problems.get("digits")
    before = problem.checksum("test")
    assert before == problems.get("digits").checksum("test")
    assert before != problem.checksum("validation")
    labels = problem.labels("test")
    problem.labels = lambda split: labels[::-1]
    assert problem.checksum("test") != before
