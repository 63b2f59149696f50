"""Tests that devices share a batch and train as one device does with all of it.

The devices are cut from the CPU of this machine, in processes of their own. Among the
batches are some in which a replica has hardly a token, or none.
"""

import keras
import numpy as np
import pytest

from tests.engines import small_runs

# What one device computes is compared with, and needs no compilation.
pytestmark = pytest.mark.usefixtures("eager")
# Without near-ties: rounding decides nothing.
TOLERANCE = 1e-5
ADAFACTOR = {"optimizer": "adafactor", "learning_rate": 0.02}
FROM_TOKENS = {"centroid_initialization": "tokens", "revive_centroids_after": 2}
EXPLORING = {"exploring_queries": 5}
RUNS = {
    "losses_by_adafactor_in_two_parts": {
        "kind": "losses",
        "changes": ADAFACTOR,
        "num_parts": 2,
    },
    "state": {
        "kind": "text",
        "changes": small_runs.WATCHED,
        "num_steps": 5,
        "scored_rows": [8, 5],
    },
    # Bad rows of one replica or of both, in one part or in both.
    "bad_gradients_in_two_parts": {
        "num_parts": 2,
        "changes": {"remat": True, **EXPLORING},
        "loss_scaling": {"initial_scale": 2.0**10, "dynamic_growth_steps": 3},
        "traps": {"4": [7], "5": [0], "9": [2, 6], "11": [5]},
    },
    "muon_in_four_steps_per_call": {
        "changes": {"optimizer": "muon", **EXPLORING, **FROM_TOKENS},
        "steps_per_call": 4,
        "traps": {"6": [1]},
    },
}
# Each worker compiles for itself, on the same processor.
OF_WORKERS = ("losses_by_adafactor_in_two_parts",)
CLUSTERS = {"mirrored": {"num_devices": 2}, "multi_worker": {"num_workers": 2}}


def assert_trains_as_one_device(strategy, runs):
    found = small_runs.train_elsewhere(strategy, runs, **CLUSTERS[strategy])
    for name, options in runs.items():
        # Devices that share a batch do without XLA, too.
        one = small_runs.on_one_device(**{**options, "jit_compile": False})
        assert len(found[name]) == 2
        for replica in found[name]:
            difference, where = small_runs.largest_difference(one, replica)
            print(f"{strategy}, {name}: {difference:.1e} in {where}")
            assert difference <= TOLERANCE, (name, where)
        if not options.get("fit"):
            # What is compared is there: norms are clipped, centroids have losses.
            assert np.nanmedian(one["gradient_norm"]) > 0.5
            assert one["clustering_loss"].min() > 0


@pytest.mark.thorough
@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow", reason="the slow tests have it in all ways"
)
@pytest.mark.parametrize("strategy", CLUSTERS)
def test_two_devices_train_as_one(strategy):
    """And score as one, also a number of rows that they cannot share evenly."""
    options = {"num_steps": 6, "scored_rows": [8, 5]}
    assert_trains_as_one_device(strategy, {"decoder": options})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CLUSTERS)
def test_two_devices_train_as_one_in_all_ways(strategy):
    names = OF_WORKERS if strategy == "multi_worker" else RUNS
    runs = {name: RUNS[name] for name in names}
    if keras.backend.backend() == "jax":
        # Replicas of TensorFlow draw apart; Keras builds there with means of a batch,
        # which are no intensities. Nor do they clip a global norm.
        runs["dropout"] = {"changes": {"residual_dropout": 0.2}}
        unclipped = {"changes": {"gradient_clip_norm": 0.0}, "num_steps": 3}
        runs["keras_fits_images"] = {"kind": "image", "fit": True, **unclipped}
    assert_trains_as_one_device(strategy, runs)
