"""Tests of choosing, gathering and scattering the members of clusters."""

import numpy as np
import pytest
from keras import ops

from routing_tf.layers.routing import membership
from routing_tf.layers.support import gathering
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, LENGTH, CLUSTERS, WINDOW, DIM = 2, 3, 7, 4, 3, 5


def some_members(seed=0):
    """Positions in ascending order; some tokens are in no cluster, some in many."""
    random = np.random.default_rng(seed)
    members = [
        np.sort(random.permutation(LENGTH - 1)[:WINDOW])
        for _ in range(BATCH * HEADS * CLUSTERS)
    ]
    return np.reshape(members, (BATCH, HEADS, CLUSTERS, WINDOW)).astype("int32")


def test_lowest_positions_win_ties():
    scores = np.zeros((1, 1, LENGTH, 1), "float32")
    scores[0, 0, 4] = 1.0
    members = membership.expert_choice(scores, WINDOW)
    np.testing.assert_array_equal(golden_cases.to_numpy(members), [[[[0, 1, 4]]]])


def test_lowest_positions_win_near_ties_for_the_last_place():
    scores = np.array([0.3, 0.5, 0.3 + 1e-7, 0.3 - 1e-7, 0.3 + 2e-7, 0.2, 0.9])
    scores = scores.astype("float32")[None, None, :, None]
    for near_tie, expected in ((1e-6, [0, 1, 6]), (0.0, [1, 4, 6])):
        members = membership.expert_choice(scores, WINDOW, near_tie=near_tie)
        np.testing.assert_array_equal(golden_cases.to_numpy(members), [[[expected]]])


def test_padding_between_tokens_stands_behind_them():
    scores = np.zeros((1, 1, 6, 1), "float32")
    mask = np.array([[[True, False, True, False, True, True]]])
    members = membership.expert_choice(scores, 5, mask)
    np.testing.assert_array_equal(members, [[[[0, 2, 4, 5, 1]]]])


def test_slots_without_a_member_add_nothing():
    clustered = helpers.normal(BATCH, HEADS, CLUSTERS, WINDOW, DIM)
    members = some_members()
    filled = helpers.normal(*members.shape, seed=1) > 0
    scattered = golden_cases.to_numpy(
        membership.scatter_mean(
            ops.convert_to_tensor(clustered), members, LENGTH, filled
        )
    )
    sums = np.zeros((BATCH, HEADS, LENGTH, DIM))
    counts = np.zeros((BATCH, HEADS, LENGTH, 1))
    for b, h, k, w in np.argwhere(filled):
        sums[b, h, members[b, h, k, w]] += clustered[b, h, k, w]
        counts[b, h, members[b, h, k, w]] += 1
    golden_cases.assert_close(scattered, sums / np.maximum(counts, 1), 1e-6)


@pytest.mark.parametrize(
    "choose, prefix",
    [(membership.expert_choice, ""), (membership.strided_choice, "strided_")],
)
def test_members_equal_release(choose, prefix):
    """With ties: the distances of the release are rounded."""
    case = golden_cases.load("pieces/gather_scatter_cluster_items.npz")
    scores, window = -case["in/dists"], case.config["attention_window"]
    assert len(np.unique(scores)) < scores.size
    members = choose(scores, window)
    expected = case[f"out/{prefix}idx"]
    np.testing.assert_array_equal(golden_cases.to_numpy(members), expected[..., -1])
    for name in "qkv":
        gathered = golden_cases.to_numpy(gathering.gather(case[f"in/{name}"], members))
        np.testing.assert_array_equal(gathered, case[f"out/{prefix}{name}"])
    scattered = membership.scatter_mean(
        ops.convert_to_tensor(case["in/clustered"]), members, 12, count_offset=0.01
    )
    golden_cases.assert_close(
        golden_cases.to_numpy(scattered), case[f"out/{prefix}scattered"], 3e-6
    )
