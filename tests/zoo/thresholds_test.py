"""Tests of the thresholds of clusters: the formula, parts of a batch, the shares."""

import numpy as np

from routing_tf import layers
from routing_tf.zoo import MovingThresholds
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, LENGTH, CLUSTERS = 3, 2, 11, 4


def built_thresholds(**options):
    thresholds = MovingThresholds(**options)
    thresholds.build((BATCH, HEADS, LENGTH, CLUSTERS))
    return thresholds


def scores(seed=0, length=LENGTH):
    return helpers.normal(BATCH, HEADS, length, CLUSTERS, seed=seed)


def masks():
    """No real token in the last row."""
    return helpers.mask_with_a_hole(LENGTH, LENGTH, 5, 0)[:, None]


def state_of(thresholds):
    return golden_cases.to_numpy([thresholds.thresholds, thresholds.counts])


def reached(scores, real):
    """What the best share of the real tokens of each sequence reaches."""
    sums, count = np.zeros((HEADS, CLUSTERS)), 0
    for row, is_real in zip(scores.astype("float64"), real[:, 0]):
        number = is_real.sum()
        if number:
            ordered = -np.sort(-row[:, is_real], axis=1)
            sums += number * ordered[:, int(np.ceil(number / CLUSTERS)) - 1]
        count += number
    return sums, np.full(HEADS, count)


def test_thresholds_are_moving_averages_of_what_a_share_reaches():
    """With the weights of a moving average that starts with the first step."""
    thresholds = built_thresholds(num_streams=2, decay=0.75)
    sums, counts = 0.0, 0.0
    for step in range(3):
        streams = [scores(10 * step + i) for i in range(2)]
        real = [np.ones((BATCH, 1, LENGTH), "bool"), masks()]
        old = state_of(thresholds)[0]
        margins = thresholds(streams, token_masks=[None, real[1]], training=True)
        for i in range(2):
            golden_cases.assert_close(
                golden_cases.to_numpy(margins[i]), streams[i] - old[i][:, None], 1e-6
            )
        found = zip(*map(reached, streams, real))
        new_sums, new_counts = (np.stack(each) for each in found)
        sums, counts = 0.75 * sums + new_sums, 0.75 * counts + new_counts
        golden_cases.assert_close(
            state_of(thresholds)[0], sums / counts[..., None], 1e-5
        )


def test_they_move_in_training_alone_and_padding_moves_nothing():
    thresholds = built_thresholds()
    helpers.randomize(thresholds)
    (old, _), nobody = state_of(thresholds), np.zeros((BATCH, 1, LENGTH), "bool")
    for options in ({}, {"training": True, "token_masks": [nobody]}):
        thresholds([scores()], **options)
        np.testing.assert_array_equal(state_of(thresholds)[0], old)
    assert not thresholds.trainable_weights
    thresholds.trainable = False
    thresholds([scores()], training=True)
    np.testing.assert_array_equal(state_of(thresholds)[0], old)


def test_parts_of_a_batch_move_them_as_the_whole():
    whole, parted = built_thresholds(), built_thresholds()
    whole([scores()], token_masks=[masks()], training=True)
    totals = None
    for row in range(BATCH):
        part = slice(row, row + 1)
        with layers.hold_updates() as updates:
            parted([scores()[part]], token_masks=[masks()[part]], training=True)
        ((layer, statistics),) = updates
        assert layer is parted
        totals = statistics if row == 0 else list(map(sum, zip(totals, statistics)))
    parted.move(totals)
    for actual, expected in zip(state_of(parted), state_of(whole), strict=True):
        golden_cases.assert_close(actual, expected, 1e-6)
