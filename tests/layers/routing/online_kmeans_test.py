"""Tests of the centroids: the release's numbers, the formulas, the edge cases."""

import threading

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf.layers import OnlineKMeans
from routing_tf.layers import RoutedHeads
from routing_tf.layers import hold_updates
from routing_tf.layers.routing.online_kmeans import normalize
from routing_tf.models.release.heads import ReleaseKMeans
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, LENGTH, DIM, CLUSTERS = 2, 2, 10, 6, 4
TOLERANCE = 3e-6
RELEASE_NAMES = {"centroids": "means", "counts": "ema_count", "sums": "ema_means"}
NEVER = 2.0**25


def built_kmeans(**options):
    keras.utils.set_random_seed(0)  # of the first centroids
    kmeans = OnlineKMeans(CLUSTERS, **{"decay": 0.9, **options})
    kmeans.build((BATCH, HEADS, LENGTH, DIM))
    return kmeans


def tokens(seed=0):
    x = helpers.normal(BATCH, HEADS, LENGTH, DIM, seed=seed)
    return helpers.normalize(x).astype("float32")


def state_of(kmeans):
    names = [name for name in RELEASE_NAMES if hasattr(kmeans, name)]
    return {name: golden_cases.to_numpy(getattr(kmeans, name)) for name in names}


def assigned(stream, real, centroids):
    """Sums of the tokens that are nearest to each centroid."""
    sums = np.zeros(centroids.shape)
    for b, h, i in np.ndindex(stream.shape[:3]):
        if real[b, i]:
            token = stream[b, h, i].astype("float64")
            sums[h, np.argmax(centroids[h] @ token)] += token
    return sums


def assert_state_close(kmeans, expected, tolerance=1e-5):
    actual = state_of(kmeans)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        golden_cases.assert_close(actual[name], value, tolerance, label=name)


@pytest.mark.parametrize("path", golden_cases.paths("pieces/online_kmeans_*.npz"))
def test_equals_release(path):
    case = golden_cases.load(path)
    config = case.config
    kmeans = ReleaseKMeans(
        config["clusters"],
        decay=config["decay"],
        commitment_weight=config["beta"],
        ema=config["ema"],
        smoothing_epsilon=config["epsilon"],
    )
    kmeans.build((config["batch"], config["heads"], config["length"], config["depth"]))
    names = {name: RELEASE_NAMES[name] for name in state_of(kmeans)}
    for name, release_name in names.items():
        getattr(kmeans, name).assign(case[f"var/{release_name}"])
    for batch in range(3):
        x = case[f"in/batch_{batch}"]
        scores, (loss,) = golden_cases.run(kmeans, x, training=False)
        # The release speaks of distances: what is near has a small one.
        golden_cases.assert_close(-scores, case[f"out/eval_dist_{batch}"], TOLERANCE)
        # Whoever calls it there adds its loss for queries, and for keys that are them.
        golden_cases.assert_close(loss / 2, case[f"out/eval_loss_{batch}"], TOLERANCE)

        result = golden_cases.gradients(
            kmeans,
            lambda scores, losses: sum(losses) / 2,
            # A token that is exactly zero is padding there.
            {"tokens": x, "token_mask": np.any(x != 0, axis=-1), "training": True},
            wrt=("tokens",),
        )

        golden_cases.assert_close(
            -result.outputs, case[f"out/dist_{batch}"], TOLERANCE, label="scores"
        )
        golden_cases.assert_close(
            sum(result.losses) / 2, case[f"out/loss_{batch}"], TOLERANCE, label="loss"
        )
        expected = case.group("grad")
        golden_cases.assert_close(
            result.inputs["tokens"], expected[f"in/batch_{batch}"], TOLERANCE
        )
        assert len(result.variables) == (0 if config["ema"] else 1)
        for gradient in result.variables.values():
            golden_cases.assert_close(
                gradient, expected[f"var/means_{batch}"], TOLERANCE
            )
        for name, value in state_of(kmeans).items():
            golden_cases.assert_close(
                value, case[f"after/{names[name]}_{batch}"], TOLERANCE, label=name
            )


def test_normalize_equals_release():
    case = golden_cases.load("pieces/layer_norm_scaling_false.npz")

    result = golden_cases.gradients(
        keras.layers.Lambda(normalize),
        lambda output, losses: ops.sum(ops.multiply(output, case["in/cotangent"])),
        {"inputs": case["in/x"]},
        wrt=("inputs",),
    )
    golden_cases.assert_close(result.outputs, case["out/unit_ball"], TOLERANCE)
    golden_cases.assert_close(result.inputs["inputs"], case["grad/in/x"], TOLERANCE)


def test_starts_at_normalized_centroids_that_count_once():
    state = state_of(built_kmeans())
    np.testing.assert_array_equal(state["sums"], state["centroids"])
    np.testing.assert_array_equal(state["counts"], 1.0)
    centroids = state["centroids"]
    golden_cases.assert_close(centroids, helpers.normalize(centroids), 1e-5)
    assert len(np.unique(centroids)) == centroids.size
    release = ReleaseKMeans(CLUSTERS)
    release.build((BATCH, HEADS, LENGTH, DIM))
    np.testing.assert_array_equal(state_of(release)["counts"], 0.0)


@pytest.mark.parametrize("num_streams", [1, 2])
def test_follows_algorithm_1(num_streams):
    kmeans = built_kmeans(update_rule="paper")
    streams = [tokens(seed=i) for i in range(num_streams)]
    real = helpers.tail_mask(LENGTH, 10, 4)
    before = state_of(kmeans)["centroids"]
    golden_cases.run(
        kmeans, tuple(streams), (real[:, None],) * num_streams, training=True
    )
    sums = [assigned(stream, real, before) for stream in (streams[0], streams[-1])]
    expected = 0.9 * before + (1 - 0.9) / 2 * sum(sums)
    assert_state_close(kmeans, {"centroids": expected})


@pytest.mark.parametrize("update_rule", ["ema", "paper"])
def test_held_updates_of_parts_add_up(update_rule):
    options = {"update_rule": update_rule, "revive_after": 2, "balance_rate": 0.1}
    kmeans = built_kmeans(**options)
    other = built_kmeans(**options)
    other.set_weights(kmeans.get_weights())
    before = kmeans.get_weights()
    x = tokens()
    parts, _ = golden_cases.run(helpers.Held(kmeans), x[:1], x[1:], training=True)
    assert len(parts) == BATCH
    # And nothing where nothing moves.
    assert golden_cases.run(helpers.Held(other), x, training=False)[0] == []
    for old, new in zip(before, kmeans.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)

    statistics = [np.add(*pair) for pair in zip(*parts, strict=True)]
    kmeans.move([ops.convert_to_tensor(x) for x in statistics])
    golden_cases.run(other, x, training=True)
    names = [weight.name for weight in other.weights]
    for name, actual, expected in zip(names, kmeans.get_weights(), other.get_weights()):
        golden_cases.assert_close(actual, expected, 1e-6, label=name)


def test_held_updates_belong_to_the_innermost_and_to_their_thread():
    kmeans = built_kmeans()
    held = helpers.Held(kmeans)
    with hold_updates() as outer:
        golden_cases.run(held, tokens(), training=True)
        with pytest.raises(ZeroDivisionError), hold_updates():
            raise ZeroDivisionError
        assert outer == []
        before = state_of(kmeans)
        thread = threading.Thread(
            target=lambda: golden_cases.run(kmeans, tokens(), training=True)
        )
        thread.start()
        thread.join()
        assert outer == []
        assert np.any(state_of(kmeans)["counts"] != before["counts"])


def one_cluster(kmeans, cluster, seed=0):
    """Tokens that are all nearest to one centroid, and differ a little."""
    centroids = golden_cases.to_numpy(kmeans.centroids)[None, :, cluster, None]
    noise = 0.01 * helpers.normal(BATCH, HEADS, LENGTH, DIM, seed=seed)
    return helpers.normalize(centroids + noise).astype("float32")


def candidates(x, real):
    """The real tokens at the places (j + 0.5) / clusters, for each head."""
    rows = [(b, i) for b, i in np.ndindex(real.shape) if real[b, i]]
    chosen = [rows[int((j + 0.5) * len(rows) / CLUSTERS)] for j in range(CLUSTERS)]
    return np.stack([x[b, :, i] for b, i in chosen], axis=1)


@pytest.mark.parametrize("update_rule", ["ema", "paper"])
def test_revives_centroids_without_tokens(update_rule):
    kmeans = built_kmeans(decay=0.99, revive_after=3, update_rule=update_rule)
    real = helpers.tail_mask(LENGTH, 9, 4)
    for step in range(1, 4):
        x = one_cluster(kmeans, 2, seed=step)
        golden_cases.run(kmeans, x, real[:, None], training=True)
        empty = golden_cases.to_numpy(kmeans.empty_steps)
        dead = np.arange(CLUSTERS) != 2
        np.testing.assert_array_equal(empty[:, ~dead], 0)
        np.testing.assert_array_equal(empty[:, dead], step % 3)
    state, expected = state_of(kmeans), candidates(x, real)[:, dead]
    golden_cases.assert_close(state["centroids"][:, dead], expected, 1e-5)
    if update_rule == "ema":
        golden_cases.assert_close(state["sums"][:, dead], expected, 1e-5)
        np.testing.assert_array_equal(state["counts"][:, dead], 1.0)
        assert np.all(state["counts"][:, ~dead] != 1.0)


def test_centroids_start_at_tokens():
    kmeans = built_kmeans(centroid_initialization="tokens")
    other = built_kmeans()
    other.set_weights(kmeans.get_weights()[:3])
    np.testing.assert_array_equal(golden_cases.to_numpy(kmeans.empty_steps), NEVER)
    nothing = np.zeros((BATCH, 1, LENGTH), "bool")
    golden_cases.run(kmeans, tokens(), nothing, training=True)
    np.testing.assert_array_equal(golden_cases.to_numpy(kmeans.empty_steps), NEVER)
    # Queries and keys: the keys, where real, give the tokens.
    real = helpers.tail_mask(LENGTH, 9, 4)
    streams, masks = (tokens(1), tokens(2)), (nothing, real[:, None])
    golden_cases.run(kmeans, streams, masks, training=True)
    expected = candidates(streams[1], real)
    golden_cases.assert_close(state_of(kmeans)["centroids"], expected, 1e-5)
    # From then on they are not different from others.
    for name, value in zip(RELEASE_NAMES, kmeans.get_weights()):
        getattr(other, name).assign(value)
    for layer in (kmeans, other):
        for _ in range(3):
            golden_cases.run(layer, one_cluster(layer, 1), training=True)
    assert_state_close(kmeans, state_of(other), 1e-6)


def test_tokens_for_more_clusters_than_tokens():
    kmeans = OnlineKMeans(7, centroid_initialization="tokens")
    kmeans.build((1, HEADS, 3, DIM))
    x = tokens()[:1, :, :3]
    golden_cases.run(kmeans, x, training=True)
    expected = x[0][:, [int((j + 0.5) * 3 / 7) for j in range(7)]]
    golden_cases.assert_close(state_of(kmeans)["centroids"], expected, 1e-5)


def test_anchors_are_in_the_scores_and_nowhere_else():
    kmeans = built_kmeans(anchor_weight=0.5, commitment_weight=1.0)
    plain = built_kmeans(commitment_weight=1.0)
    plain.centroids.assign(kmeans.centroids)
    x = tokens()
    anchors = golden_cases.to_numpy(kmeans.anchors)
    centroids = state_of(kmeans)["centroids"]
    assert np.abs(anchors - centroids).max() > 0.1
    scores, loss = golden_cases.run(kmeans, x, training=True)
    without, _ = golden_cases.run(plain, x)
    expected = without + 0.5 * np.einsum("bhld,hkd->bhlk", x, anchors)
    golden_cases.assert_close(scores, expected, TOLERANCE)
    own = np.stack([centroids[h][scores.argmax(-1)[:, h]] for h in range(HEADS)], 1)
    golden_cases.assert_close(loss[0], np.mean((x - own) ** 2), TOLERANCE)
    np.testing.assert_array_equal(golden_cases.to_numpy(kmeans.anchors), anchors)
    # They part tokens of centroids that have met.
    for layer, number in ((plain, 1), (kmeans, 2)):
        layer.centroids.assign(np.ones(layer.centroids.shape))
        clusters = golden_cases.run(layer, x)[0].argmax(axis=-1).swapaxes(0, 1)
        assert all(len(np.unique(head)) >= number for head in clusters)
        assert clusters.any() == (number > 1)


@pytest.mark.parametrize("num_streams", [1, 2])
def test_biases_favour_clusters_with_few_tokens(num_streams):
    kmeans = built_kmeans(balance_rate=0.02)
    biases = helpers.normal(HEADS, CLUSTERS)
    kmeans.biases.assign(biases)
    streams = [tokens(seed) for seed in range(num_streams)]
    real = helpers.tail_mask(LENGTH, LENGTH, 3)
    centroids = state_of(kmeans)["centroids"]
    counts = np.zeros((HEADS, CLUSTERS))
    for stream in streams:
        scores = np.einsum("bhld,hkd->bhlk", stream, centroids) + biases[:, None]
        chosen = np.eye(CLUSTERS)[scores.argmax(axis=-1)] * real[:, None, :, None]
        counts += chosen.sum(axis=(0, 2))
    masks = (real[:, None],) * num_streams
    found, _ = golden_cases.run(kmeans, tuple(streams), masks, training=True)
    golden_cases.assert_close(found[-1], scores, TOLERANCE)
    loads = np.minimum(counts / counts.mean(axis=-1, keepdims=True), 2.0)
    expected = biases + 0.02 * DIM * (1.0 - loads)
    golden_cases.assert_close(golden_cases.to_numpy(kmeans.biases), expected, 1e-5)
    golden_cases.run(kmeans, tuple(streams), masks, training=False)
    golden_cases.assert_close(golden_cases.to_numpy(kmeans.biases), expected, 1e-5)


@pytest.mark.parametrize(
    "update_rule, decay", [("ema", 0.0), ("ema", 1.0), ("paper", 0)]
)
def test_extreme_batches_keep_the_state_finite(update_rule, decay):
    kmeans = built_kmeans(decay=decay, update_rule=update_rule)
    before = state_of(kmeans)["centroids"]
    nothing = np.zeros((BATCH, 1, LENGTH), "bool")
    scores, (loss,) = golden_cases.run(kmeans, tokens(), nothing, training=True)
    assert np.all(np.isfinite(scores)) and loss == 0.0
    if update_rule == "ema":
        golden_cases.assert_close(state_of(kmeans)["centroids"], before, 1e-4)
    # All tokens in one cluster, so the others die.
    same = np.broadcast_to(tokens()[:1, :, :1], (BATCH, HEADS, LENGTH, DIM)).copy()
    for _ in range(20):
        scores, losses = golden_cases.run(kmeans, same, nothing | True, training=True)
    assert all(np.all(np.isfinite(x)) for x in (scores, *state_of(kmeans).values()))
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_moves_as_in_float32_under_mixed_precision(dtype):
    """Squares of large activations are not numbers that float16 has."""
    states = []
    x = 1e4 * np.clip(helpers.normal(BATCH, HEADS, LENGTH, DIM), -4, 4)
    x = golden_cases.to_numpy(ops.cast(x, dtype.removeprefix("mixed_")))
    value = helpers.normal(BATCH, HEADS, LENGTH, DIM, seed=1)
    start = built_kmeans(revive_after=2).get_weights()
    for policy in ("float32", dtype):
        heads = RoutedHeads(HEADS, CLUSTERS, 4, revive_after=2, dtype=policy)
        heads.build(*[x.shape] * 3)
        heads.kmeans.set_weights(start)
        for _ in range(2):
            output, losses = golden_cases.run(heads, x, None, value, training=True)
        assert np.all(np.isfinite(losses))
        assert np.all(np.isfinite(np.asarray(output).astype("float64")))
        kept = [*losses, *heads.kmeans.weights]
        assert {str(x.dtype) for x in kept} == {"float32"}
        states.append(heads.kmeans.get_weights())
    for expected, actual, before in zip(*states, start, strict=True):
        # A step moves a thousandth of the way, less than bfloat16 could tell.
        moved = actual - before, expected - before
        golden_cases.assert_close(*moved, 2e-2, absolute_floor=1e-6)


def test_only_centroids_that_learn_are_trainable():
    shape, scores = (None, HEADS, LENGTH, DIM), (None, HEADS, LENGTH, CLUSTERS)
    kmeans = built_kmeans()
    assert kmeans.compute_output_shape((shape, shape)) == (scores, scores)
    assert [w.trainable for w in kmeans.weights] == [False] * 3
    assert [w.trainable for w in built_kmeans(ema=False).weights] == [True]


def test_gradients_have_no_rule_for_averages():
    for options, message in (
        ({"update_rule": "paper"}, "update_rule='paper', ema=False"),
        ({"revive_after": 3}, "`revive_after`.*ema=False"),
        ({"centroid_initialization": "tokens"}, "`revive_after`.*ema=False"),
        ({"balance_rate": 0.1}, r"`balance_rate`.*balance_rate=0\.1, ema=False"),
    ):
        with pytest.raises(ValueError, match=message):
            OnlineKMeans(4, ema=False, **options)
