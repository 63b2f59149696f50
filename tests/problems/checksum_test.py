import numpy as np
import pytest

from routing_tf import problems
from routing_tf.problems import checksum


def test_values_count_and_types_do_not():
    ids = np.arange(1000)
    same = {checksum.checksum([ids.astype(x)]) for x in ("uint16", "int32", "int64")}
    assert len(same) == 1
    ids[17] += 1
    assert checksum.checksum([ids]) not in same
    assert checksum.checksum([ids.reshape(-1, 2)]) == checksum.checksum([ids])
    assert checksum.checksum([ids, ids]) != checksum.checksum([ids])
    assert checksum.checksum([np.zeros(0)]) == checksum.checksum([]) == 0


@pytest.mark.parametrize("length", [1, 39, 40, 41, 1000])
def test_long_arrays(length, monkeypatch):
    monkeypatch.setattr(checksum, "BLOCK_LENGTH", 10)
    monkeypatch.setattr(checksum, "MOST_BLOCKS", 4)
    ids = np.arange(length)
    before = checksum.checksum([ids])
    assert checksum.checksum([ids + 1]) != before
    ids[0] = 5
    assert checksum.checksum([ids]) != before


def test_all_that_a_split_is_made_of():
    problem = problems.get("digits")
    before = problem.checksum("test")
    assert before == problems.get("digits").checksum("test")
    assert before != problem.checksum("validation")
    labels = problem.labels("test")
    problem.labels = lambda split: labels[::-1]
    assert problem.checksum("test") != before
