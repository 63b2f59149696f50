"""Tests of choosing, gathering and scattering the members of clusters."""

import numpy as np
import pytest
from keras import ops

from routing_tf.layers.routing import membership
from routing_tf.layers.support import tensors
from tests import golden_cases

WINDOW = 3


def test_lowest_positions_win_near_ties_for_the_last_place():
    scores = np.array([0.3, 0.5, 0.3 + 1e-7, 0.3 - 1e-7, 0.3 + 2e-7, 0.2, 0.9])
    scores = scores.astype("float32")[None, None, :, None]
    for near_tie, expected in ((1e-6, [0, 1, 6]), (0.0, [1, 4, 6])):
        members = membership.expert_choice(scores, WINDOW, near_tie=near_tie)
        np.testing.assert_array_equal(golden_cases.to_numpy(members), [[[expected]]])


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
        gathered = golden_cases.to_numpy(tensors.gather(case[f"in/{name}"], members))
        np.testing.assert_array_equal(gathered, case[f"out/{prefix}{name}"])
    scattered = membership.scatter_mean(
        ops.convert_to_tensor(case["in/clustered"]), members, 12, count_offset=0.01
    )
    golden_cases.assert_close(
        golden_cases.to_numpy(scattered), case[f"out/{prefix}scattered"], 3e-6
    )
