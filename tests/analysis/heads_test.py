"""Tests of how heads differ and how clusters are occupied."""

import numpy as np
import pytest

from routing_tf import training
from routing_tf.analysis import compare_heads
from routing_tf.analysis import heads
from routing_tf.analysis.probe import BlockAttention
from routing_tf.analysis.windows import rows_of
from tests.analysis import small_cases
from tests.models import small_models

LOCAL, ROUTED = "local_heads", "routed_heads"


@pytest.fixture(autouse=True)
def shared_probe(monkeypatch):
    monkeypatch.setattr(heads, "Probe", small_cases.probe)


def compare(lm, windows, **options):
    divergences, occupancies = compare_heads(lm, windows, verbose=False, **options)
    return {(each.block, each.kinds): each for each in divergences}, occupancies


def divergence(a, b):
    """Mean divergence of the rows in which both maps have weights, and their share."""
    seen = (a.sum(axis=-1) > 0) & (b.sum(axis=-1) > 0)
    a, b = (x[seen] / x[seen].sum(axis=-1, keepdims=True) for x in (a, b))
    middle = (a + b) / 2
    kl = [-(x * np.log(middle / (x + 1e-5) + 1e-5)).sum(axis=-1) for x in (a, b)]
    return (kl[0] + kl[1]).mean() / 2, 1 - seen.mean()


def test_against_maps():
    lm = small_cases.language_model()
    windows = small_cases.windows(3)
    found, _ = compare(lm, windows, num_runs=3)
    assert list(found) == [
        (f"block_{index}", kinds)
        for index in range(2)
        for kinds in ((LOCAL, LOCAL), (LOCAL, ROUTED), (ROUTED, ROUTED))
    ]
    probe = small_cases.probe(lm)
    runs = [probe.attention(rows_of(windows, [row])) for row in range(3)]
    for index in range(2):
        for kind in (LOCAL, ROUTED):  # with two heads there is one pair
            expected = [divergence(*run[index].maps[kind][0]) for run in runs]
            means, left_out = np.transpose(expected)
            each = found[f"block_{index}", (kind, kind)]
            np.testing.assert_allclose(each.mean, means.mean(), rtol=1e-4)
            np.testing.assert_allclose(each.deviation, means.std(ddof=1), rtol=1e-3)
            np.testing.assert_allclose(each.left_out, left_out.mean(), atol=1e-9)
            assert (each.left_out > 0.3) == (kind == ROUTED)


@pytest.mark.thorough
def test_a_random_pair():
    lm = small_cases.language_model(routing="token_choice", num_layers=1)
    windows = small_cases.windows(1)
    (attention,) = small_cases.probe(lm).attention(windows)
    (local,), (routed,) = attention.maps[LOCAL], attention.maps[ROUTED]
    possible = {round(divergence(a, b)[0], 5) for a in local for b in routed}
    assert len(possible) == 4
    drawn = set()
    for seed in range(8):
        found, _ = compare(lm, windows, num_runs=1, seed=seed)
        each = found["block_0", (LOCAL, ROUTED)]
        assert each.deviation is None
        (nearest,) = [x for x in possible if abs(x - each.mean) < 2e-5]
        drawn.add(nearest)
    assert len(drawn) > 1


class OneBlock:
    """A `Probe` that sees the same maps in all windows."""

    blocks = []

    def __init__(self, maps):
        self.lm = small_cases.language_model()
        self.maps = maps

    def attention(self, inputs):
        return [BlockAttention("block_0", self.maps, {})]


def compare_maps(monkeypatch, **maps):
    probe = OneBlock(maps)
    monkeypatch.setattr(heads, "Probe", lambda lm, routing_scope: probe)
    return compare(probe.lm, small_cases.windows(), num_runs=2)[0]


def test_kinds_with_one_head(monkeypatch):
    one = np.eye(3)[None, None]
    found = compare_maps(monkeypatch, routed_heads=one, local_heads=one)
    assert list(found) == [("block_0", (LOCAL, ROUTED))]


def test_queries_with_nothing_in_common(monkeypatch):
    # Each of the two heads sees something for one query of three.
    maps = np.zeros((1, 2, 3, 3))
    maps[0, 0, 0, 0] = maps[0, 1, 1, 1] = 1
    (each,) = compare_maps(monkeypatch, routed_heads=maps).values()
    assert each.mean is None and each.deviation is None
    assert each.left_out == 1


@pytest.mark.thorough
def test_occupancy():
    lm = small_cases.language_model()
    windows = small_cases.windows(3)
    generator = np.random.default_rng(0)
    for kmeans in small_models.kmeans_layers(lm):
        kmeans.counts.assign(generator.random(kmeans.counts.shape))
    _, occupancies = compare(lm, windows, num_runs=5)
    parts = [f"block_{index} routed_heads" for index in range(2)]
    assert [each.part for each in occupancies] == parts
    trained = training.centroid_occupancy(lm)
    attention = small_cases.probe(lm).attention(windows)
    for each, found in zip(occupancies, attention, strict=True):
        clusters = found.clusters[ROUTED]
        shares = np.mean(clusters.nearest[..., None] == np.arange(3), axis=(0, 2))
        terms = np.where(shares > 0, shares * np.log(np.maximum(shares, 1e-9)), 0)
        entropy = -terms.sum(axis=-1).mean() / np.log(3)
        seen = each.seen
        np.testing.assert_allclose(
            [seen.smallest, seen.largest, seen.entropy],
            [shares.min(), shares.max(), entropy],
        )
        in_none = 1 - clusters.members.any(axis=-1).mean()
        assert each.in_none == pytest.approx(in_none) and in_none > 0.3
        block = each.part.split()[0]
        (tag,) = {name.rpartition("/")[0] for name in trained if f"/{block}/" in name}
        assert each.trained.smallest == trained[f"{tag}/min"]
        assert each.trained.largest == trained[f"{tag}/max"]
        assert each.trained.entropy == trained[f"{tag}/entropy"]


def test_heads_that_count_nothing():
    lm = small_cases.language_model(routing="random", num_layers=1)
    _, (occupancy,) = compare(lm, small_cases.windows(), num_runs=1)
    assert occupancy.part == "block_0 random_heads"
    assert occupancy.trained is None
    assert occupancy.in_none == 0


def test_no_runs():
    lm = small_cases.language_model(routing="token_choice", num_layers=1)
    with pytest.raises(ValueError, match="`num_runs`"):
        compare_heads(lm, small_cases.windows(), num_runs=0)
