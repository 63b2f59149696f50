"""Tests of heads whose tokens an indexer chooses, against NumPy."""

import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from routing_tf.zoo import indexed
from tests import golden_cases
from tests.layers import helpers
from tests.zoo import dense_blocks

BATCH, HEADS, LENGTH, KEY_DIM, DIM = 2, 2, 17, 4, 7
INDEXER = {"num_indexer_heads": 3, "indexer_dim": 5, "indexer_rotary_dim": 2}
X = helpers.normal(BATCH, LENGTH, DIM)
REAL = helpers.mask_with_a_hole(LENGTH, LENGTH, LENGTH - 3)
BIAS = helpers.normal(BATCH, LENGTH, seed=5)
KERNELS = ("indexer_query_kernel", "indexer_key_kernel", "indexer_head_kernel")


def built(num_selected, steps=0, **own):
    """An attention with random weights whose indexer has learned for some steps."""
    quick = {"kernel_initializer": "zeros", "embeddings_initializer": "zeros"}
    group = zoo.IndexedHeads(HEADS, num_selected, **{**INDEXER, **quick, **own})
    attention = helpers.attention(group, key_dim=KEY_DIM, dim=DIM)
    group.training_steps.assign(float(steps))
    return attention


def oracle(attention, causal, is_dense=False):
    """Outputs, and the loss over what queries attend to, of `X` with `REAL`, `BIAS`."""
    (group,) = attention.head_groups
    weights = dense_blocks.weights_of(attention)
    query, key, value = (
        (X @ weights[f"{name}_kernel"]).reshape(BATCH, LENGTH, HEADS, -1).swapaxes(1, 2)
        for name in ("query", "key", "value")
    )
    own_query, own_key, head = (X @ weights[name] for name in KERNELS)
    own_query = own_query.reshape(BATCH, LENGTH, 3, 5).swapaxes(1, 2)
    for x in (own_query, own_key):
        x[..., :2] = helpers.turned(x[..., :2], group.rotary_wavelength)
    real = REAL
    if group.key_shift:
        key, own_key = helpers.one_later(key, 2), helpers.one_later(own_key, 1)
        real = real & helpers.one_later(real, 1)
    seen, losses = np.zeros((BATCH, LENGTH, LENGTH), "bool"), []
    scores = np.einsum("bjte,bse->btjs", own_query, own_key)
    scores = np.einsum("btj,btjs->bts", head, np.maximum(scores, 0)) / 15**0.5
    for b, t in np.ndindex(BATCH, LENGTH):
        visible = [s for s in range(t + 1 if causal else LENGTH) if real[b, s]]
        best = sorted(visible, key=lambda s, b=b, t=t: (-scores[b, t, s], s))
        seen[b, t, visible if is_dense else best[: group.num_selected]] = True
    tables = helpers.relative_tables(group)
    places = np.arange(LENGTH)
    output, attended = helpers.dense_attention(
        query / KEY_DIM**0.5,
        key,
        value,
        seen[:, None],
        BIAS[:, None, None],
        tables,
        places - places[:, None],
        group.logit_soft_cap,
    )
    for b, t in np.ndindex(BATCH, LENGTH):
        if REAL[b, t] and seen[b, t].any():
            target = attended[b, :, t, seen[b, t]].sum(axis=1)
            target = target / target.sum()
            chosen = dense_blocks.softmax(scores[b, t, seen[b, t]])
            losses.append(np.sum(target * np.log(target / chosen)))
    output = output.swapaxes(1, 2).reshape(BATCH, LENGTH, -1)
    return output @ weights["output_kernel"], np.mean(losses)


def called(attention, **options):
    return golden_cases.run(attention, X, query_mask=REAL, token_bias=BIAS, **options)


COPIES = {"warm_up_steps": 0, "gather_length": 1}
SHIFTED = {"key_shift": 1, "max_relative_position": 3, "logit_soft_cap": 2.0}


@pytest.mark.parametrize(
    "num_selected, causal, steps, own",
    [
        pytest.param(3, True, 0, SHIFTED, id="warm-up, causal"),
        pytest.param(3, False, 4, {}, id="masked, not causal"),
        pytest.param(3, True, 4, {**COPIES, **SHIFTED}, id="copies, causal"),
        pytest.param(3, False, 0, COPIES, id="copies, not causal"),
    ],
)
def test_equals_numpy(num_selected, causal, steps, own):
    """The choice, outputs and the loss, in training and out of it."""
    own = {"warm_up_steps": 3, "indexer_loss_weight": 0.5, **own}
    attention = built(num_selected, steps, **own)
    (group,) = attention.head_groups
    expected, _ = oracle(attention, causal)
    output, losses = called(attention, use_causal_mask=causal)
    golden_cases.assert_close(output[REAL], expected[REAL], 1e-5)
    assert losses == []
    expected, loss = oracle(attention, causal, is_dense=steps < group.warm_up_steps)
    output, losses = called(attention, use_causal_mask=causal, training=True)
    golden_cases.assert_close(output[REAL], expected[REAL], 1e-5)
    golden_cases.assert_close(losses, [0.5 * loss], 1e-5)
    golden_cases.assert_close(golden_cases.to_numpy(group.indexer_loss), loss, 1e-5)
    assert golden_cases.to_numpy(group.training_steps) == steps + 1


@pytest.mark.parametrize("gather_length", [None, 1])
def test_only_its_loss_moves_the_indexer_and_nothing_else(gather_length):
    attention = built(3, warm_up_steps=0, gather_length=gather_length)

    def gradients(objective):
        result = golden_cases.gradients(
            attention,
            objective,
            {"query": X, "use_causal_mask": True, "training": True},
            wrt=("query",),
        )
        moved = {
            path.rpartition("/")[2]
            for path, gradient in result.variables.items()
            if gradient is not None and np.any(gradient)
        }
        return moved, result.inputs["query"]

    moved, by_query = gradients(lambda output, losses: sum(losses))
    assert moved == set(KERNELS)
    assert by_query is None or not np.any(by_query)
    moved, by_query = gradients(lambda output, losses: ops.sum(output**2))
    assert moved == {f"{x}_kernel" for x in ("query", "key", "value", "output")}
    assert np.all(np.isfinite(by_query)) and np.any(by_query)


def test_the_warm_up_ends():
    """Parts of a batch are one step; frozen heads and evaluation make none."""
    attention = built(3, warm_up_steps=2)
    (group,) = attention.head_groups
    chosen, _ = called(attention)
    full = helpers.attention(layers.FullHeads(HEADS), key_dim=KEY_DIM, dim=DIM)
    kernels = [f"{name}_kernel" for name in ("query", "key", "value", "output")]
    helpers.assign(full, **{name: getattr(attention, name) for name in kernels})
    dense, _ = called(full)

    def train(expected, num_steps):
        output, _ = called(attention, training=True)
        golden_cases.assert_close(output[REAL], expected[REAL], 1e-5)
        assert golden_cases.to_numpy(group.training_steps) == num_steps

    train(dense, 1)
    with layers.hold_updates() as updates:
        for _ in range(2):
            attention(X, training=True)
    (layer, first), (_, second) = updates
    layer.move([a + b for a, b in zip(first, second, strict=True)])
    train(chosen, 3)
    group.training_steps.assign(0.0)
    attention.trainable = False
    train(chosen, 0)
    assert attention.losses == []


@pytest.mark.parametrize("training", [False, True])
def test_blocks_of_queries(training, monkeypatch):
    ids = np.repeat([[1, 2]], (9, 8), axis=1).astype("int32").repeat(BATCH, 0)
    results = []
    for number in (indexed.MOST_NUMBERS, 5 * 3 * LENGTH):
        monkeypatch.setattr(indexed, "MOST_NUMBERS", number)
        attention = built(2, key_shift=1, **COPIES)
        options = {"use_causal_mask": True, "training": training}
        output, _ = golden_cases.run(attention, X, segment_ids=ids, **options)
        results.append(output)
    golden_cases.assert_close(*results, 1e-6)


def test_refuses_calls_without_features():
    x = helpers.normal(1, 2, 6, 4)
    with pytest.raises(ValueError, match="`features`.*features=None"):
        zoo.IndexedHeads(2)(x, x, x)


@pytest.mark.thorough
def test_steps_beside_a_gate():
    group = zoo.IndexedHeads(HEADS, 5, **INDEXER)
    options = {"qk_norm": True, "use_gate": True}
    attention = helpers.attention(group, key_dim=KEY_DIM, dim=DIM, **options)
    helpers.assert_pieces_equal_the_whole(attention, helpers.normal(BATCH, 44, DIM), 4)
