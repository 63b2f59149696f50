"""Tests of which places tokens read."""

import numpy as np
import pytest

from routing_tf.analysis import reads
from routing_tf.analysis.probe import BlockAttention

# The next one is 6, 7, 5, 6, 7.
IDS = np.array([5, 6, 7, 5, 6, 7])


def head_reads(weights, layer=0, head=0):
    return reads.HeadReads(layer, head, "", np.array(weights, "float32"))


def one_read_each(places):
    """Reads of one place by each token; None for nothing."""
    weights = np.zeros((len(places), len(places)))
    for token, place in enumerate(places):
        if place is not None:
            weights[token, place] = 0.5
    return head_reads(weights)


def test_places_and_strengths():
    head = head_reads([[0, 0, 0], [0.4, 0.6, 0], [0.7, 0.1, 0.2]])
    assert head.places.tolist() == [reads.NOWHERE, 1, 0]
    np.testing.assert_allclose(head.strengths, [0, 0.6, 0.7])
    assert np.argwhere(head.beyond(1)).tolist() == [[1, 0], [2, 0], [2, 1]]
    assert np.argwhere(head.beyond(2)).tolist() == [[2, 0]]


@pytest.mark.parametrize(
    "places, recall",
    [
        # What followed the same token the last time: an induction head.
        ([None, None, None, 1, 2, 3], 2 / 5),
        # The last token has no next one.
        ([None, None, None, None, None, 3], 0),
        # What was like the token itself.
        ([0, 1, 2, 0, 1, 2], 0),
        ([0, 0, 0, 1, 1, 1], 2 / 5),
        ([None] * 6, 0),
    ],
)
def test_recall(places, recall):
    scores = reads.score_reads(one_read_each(places), IDS, reach=4)
    assert scores.recall == pytest.approx(recall)


def test_nothing_is_no_hit():
    # The last place, which -1 would mean, has the next token.
    ids = np.array([1, 2, 3, 2])
    scores = reads.score_reads(one_read_each([None] * 4), ids, reach=1)
    assert scores == reads.ReadScores(distance=None, far=0, recall=0, nothing=1)


def test_distances():
    head = one_read_each([None, 1, 0, None, 1, 1])
    scores = reads.score_reads(head, IDS, reach=3)
    assert scores.distance == pytest.approx((0 + 2 + 3 + 4) / 4)
    assert scores.nothing == pytest.approx(2 / 6)
    assert scores.far == pytest.approx((0.5 + 0.5) / 6)
    assert reads.score_reads(head, IDS, reach=4).far == pytest.approx(0.5 / 6)
    assert reads.score_reads(head, IDS, reach=9).far == 0


def test_chance():
    largest, random = reads.chance_of_recall(IDS)
    # Before 5, 6 and 7 come again.
    assert largest == pytest.approx(3 / 5)
    assert random == pytest.approx((1 / 3 + 1 / 4 + 1 / 5) / 5)
    assert reads.chance_of_recall(np.array([1, 2])) == (0, 0)
    assert reads.chance_of_recall(np.array([1, 1])) == (1, 1)


def test_the_strongest():
    row = [0.3, 0.05, 0.4, 0, 0.25, 0.003]
    head = head_reads([row] * 6)
    found = head.strongest(5)
    # Less than a hundredth of the largest is left out.
    assert [place for place, _ in found] == [2, 0, 4, 1]
    np.testing.assert_allclose([w for _, w in found], [0.4, 0.3, 0.25, 0.05])
    assert [place for place, _ in head.strongest(5, count=2)] == [2, 0]
    assert one_read_each([None, 0]).strongest(0) == []


def test_heads_in_their_order():
    maps = np.arange(2 * 3 * 4).reshape(2, 3, 2, 2)
    attention = [
        BlockAttention("block_0", {"local_heads": maps}, {}),
        BlockAttention("block_1", {"a_heads": maps[:, :1], "local_heads": maps}, {}),
    ]
    heads = reads.list_reads(attention)
    assert [(each.layer, each.head, each.name) for each in heads] == [
        (0, 0, "block_0 local_heads 0"),
        (0, 1, "block_0 local_heads 1"),
        (0, 2, "block_0 local_heads 2"),
        (1, 0, "block_1 a_heads 0"),
        (1, 1, "block_1 local_heads 0"),
        (1, 2, "block_1 local_heads 1"),
        (1, 3, "block_1 local_heads 2"),
    ]
    np.testing.assert_array_equal(heads[5].weights, maps[0, 1])


def some_heads():
    """Three layers; the first two read far, the second with its head 1 most."""
    near = np.eye(4)
    heads = []
    for layer, strengths in enumerate([(0.9, 0), (0.2, 0.3), (0, 0)]):
        for head, strength in enumerate(strengths):
            weights = near.copy()
            weights[3, 1] = strength
            heads.append(head_reads(weights, layer, head))
    return heads


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, (1, 1)),
        ({"head": 0}, (1, 0)),
        ({"layer": 0}, (0, 0)),
        ({"layer": 2}, (2, 0)),
        ({"layer": 2, "head": 1}, (2, 1)),
        # Nobody reads so far: the last layer.
        ({"reach": 3}, (2, 0)),
    ],
)
def test_the_head_to_look_at(options, expected):
    found = reads.choose_head(some_heads(), **{"reach": 2, **options})
    assert (found.layer, found.head) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layer": 3}, r"`layer`.* \[0, 1, 2\]\. .*layer=3"),
        ({"head": 2}, r"`head`.* \[0, 1\]\. .*head=2"),
    ],
)
def test_no_such_head(options, message):
    with pytest.raises(ValueError, match=message):
        reads.choose_head(some_heads(), 2, **options)


def test_the_token_to_look_at():
    head = one_read_each([0, 0, 0, 1, 2, 4])
    assert reads.choose_token(head, reach=2) == 2  # the first of three
    assert reads.choose_token(head, reach=3) == 2  # nothing is read so far away
    head.weights[4, 2] = 0.6
    assert reads.choose_token(head, reach=2) == 4
    head.weights[5, 0] = 0.3
    assert reads.choose_token(head, reach=2) == 5
    assert reads.choose_token(head, reach=2, token=0) == 0
    for token in (-1, 6):
        message = f"`token`.* 5.*token={token}"
        with pytest.raises(ValueError, match=message):
            reads.choose_token(head, 2, token)
