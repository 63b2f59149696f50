"""Tests of native sparse attention."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.zoo.dense_blocks import sigmoid
from tests.zoo.dense_blocks import softmax
from tests.zoo.dense_blocks import weights_of

BATCH, HEADS, LENGTH, KEY_DIM, VALUE_DIM, DIM = 2, 2, 23, 5, 4, 7
SIZES = {
    "compression_length": 4,
    "compression_stride": 2,
    "block_length": 4,
    "num_blocks": 3,
    "attention_window": 5,
}


def built_group(**options):
    group = zoo.NativeSparseHeads(
        HEADS,
        **{**SIZES, "embeddings_initializer": "zeros", **options},
        kernel_initializer="zeros",
    )
    start = (BATCH, HEADS, LENGTH)
    shapes = [(*start, KEY_DIM)] * 2 + [(*start, VALUE_DIM)]
    return helpers.randomized(group, *shapes, (BATCH, LENGTH, DIM))


def tokens():
    streams = helpers.streams(LENGTH, dim=KEY_DIM, value_dim=VALUE_DIM)
    arrays = dict(zip(("query", "key", "value"), streams, strict=True))
    return {**arrays, "features": helpers.normal(BATCH, LENGTH, DIM, seed=3)}


def compressed(layer, x, real):
    """Returns one vector for a block `[heads, length, dim]`."""
    own = weights_of(layer)
    x = np.where(real[:, None], x + own["places"][:, 0], 0.0)
    hidden = x.reshape(len(x), -1) @ own["hidden_kernel"] + own["hidden_bias"]
    return np.maximum(hidden, 0.0) @ own["output_kernel"] + own["output_bias"]


def expected_output(group, query, key, value, features, real):
    """The equations of the paper, for one query after the other."""
    own = weights_of(group)
    branches = [(key, value)] * 3
    if not group.share_branches:
        made = features.astype("float64") @ own["branch_kernel"]
        made = made.reshape(*features.shape[:2], 2, HEADS, -1).transpose(2, 0, 3, 1, 4)
        branches[:2] = [(x[..., :KEY_DIM], x[..., KEY_DIM:]) for x in made]
    gates = sigmoid(features @ own["gate_kernel"] + own["gate_bias"])
    gates = gates.reshape(*features.shape[:2], HEADS, 3)
    output = np.zeros(value.shape)
    for b, t in np.ndindex(features.shape[:2]):
        coarse, blocks = coarse_branch(group, query[b, :, t], branches[0], b, t, real)
        near = np.arange(t + 1) > t - group.attention_window
        for h in range(HEADS):
            chosen = np.isin(np.arange(t + 1) // group.block_length, blocks[h])
            fine, window = (
                helpers.dense_attention(
                    query[b, h, t][None],
                    keys[b, h, : t + 1],
                    values[b, h, : t + 1],
                    (seen & real[b, : t + 1])[None],
                    0.0,
                    helpers.relative_tables(group),
                    np.arange(-t, 1)[None],
                )[0][0]
                for seen, (keys, values) in zip((chosen, near), branches[1:])
            )
            results = np.stack([coarse[h], fine, window])
            output[b, h, t] = gates[b, t, h] @ results
    return output


def coarse_branch(group, query, branch, b, t, real):
    """Returns its output for each head, and the numbers of the blocks it chooses."""
    keys, values = branch
    size, stride = group.compression_length, group.compression_stride
    block = group.block_length
    output, own = np.zeros((HEADS, VALUE_DIM)), t // block
    importance = np.zeros((HEADS, own + 1))
    starts = [s for s in range(0, t + 2 - size, stride) if real[b, s : s + size].any()]
    if starts:
        summary_keys, summary_values = (
            np.stack(
                [
                    compressed(network, x[b, :, s : s + size], real[b, s : s + size])
                    for s in starts
                ],
                axis=1,
            )
            for network, x in (
                (group.key_compression, keys),
                (group.value_compression, values),
            )
        )
        weights = softmax(np.einsum("hd,hcd->hc", query, summary_keys))
        output = np.einsum("hc,hcd->hd", weights, summary_values)
        for c, start in enumerate(starts):
            for place in range(start, start + size, stride):
                importance[:, place // block] += weights[:, c]
    forced = [*range(group.num_initial_blocks)]
    forced += range(own - group.num_local_blocks + 1, own + 1)
    importance[:, [j for j in set(forced) if 0 <= j <= own]] = np.inf
    order = np.argsort(-importance, axis=-1, kind="stable")
    return output, order[:, : group.num_blocks]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"share_branches": True, "max_relative_position": 4, "num_blocks": 4},
        *(
            pytest.param(options, marks=pytest.mark.thorough)
            for options in (
                {"compression_length": 2, "block_length": 6, "num_initial_blocks": 0},
                {"compression_stride": 1, "block_length": 5, "num_local_blocks": 1},
                {"num_blocks": 1, "num_local_blocks": 1, "num_initial_blocks": 0},
                {"block_length": 32, "attention_window": 40, "num_blocks": 20},
            )
        ),
    ],
)
def test_equals_the_equations(options):
    padded = options.get("num_blocks") != 1
    group, arrays = built_group(**options), tokens()
    real = np.ones((BATCH, LENGTH), "bool")
    if padded:
        real = helpers.mask_with_a_hole(LENGTH, LENGTH, LENGTH - 5)
        real[1, :5] = False
    masks = {"query_mask": real, "value_mask": real} if padded else {}
    output, _ = golden_cases.run(group, **arrays, **masks, use_causal_mask=True)
    expected = expected_output(group, **arrays, real=real)
    shown = real[:, None, :, None] & np.ones_like(expected, "bool")
    golden_cases.assert_close(output[shown], expected[shown], 2e-5)


def test_equals_the_code_of_others():
    """See `tools/peers/native_sparse.py`."""
    golden = golden_cases.load("peers/native_sparse.npz")
    query, key, value = (
        golden[name].swapaxes(1, 2) for name in ("query", "key", "value")
    )
    block, dim = int(golden["block_length"]), query.shape[-1]
    group = zoo.NativeSparseHeads(
        query.shape[1],
        compression_length=block,
        compression_stride=block,
        block_length=block,
        num_blocks=int(golden["num_blocks"]),
        attention_window=int(golden["attention_window"]),
        compression_dim=golden["key/hidden_bias"].shape[0],
        share_branches=True,
    )
    shapes = [x.shape for x in (query, key, value)]
    group.build(*shapes, features_shape=golden["features"].shape)
    group.gate_kernel.assign(golden["gate_kernel"])
    group.gate_bias.assign(golden["gate_bias"])
    for name in ("key", "value"):
        compression = getattr(group, f"{name}_compression")
        for weight in compression.weights:
            weight.assign(golden[f"{name}/{weight.name}"])
    output, _ = golden_cases.run(
        group,
        query * dim**-0.5,
        key,
        value,
        features=golden["features"],
        use_causal_mask=True,
    )
    golden_cases.assert_close(output, golden["output"].swapaxes(1, 2), 1e-5)


def test_refused():
    group, arrays = built_group(), tokens()
    for options, message in (
        ({}, "`use_causal_mask`.*use_causal_mask=False"),
        ({"use_causal_mask": True, "features": None}, "`features`.*features=None"),
    ):
        with pytest.raises(ValueError, match=message):
            group(**{**arrays, **options})


def built_attention(**options):
    heads = zoo.NativeSparseHeads(HEADS, **SIZES)
    return helpers.attention(heads, key_dim=KEY_DIM, dim=DIM, **options)


def test_features_stand_at_the_places_of_their_queries():
    """Positions on two axes are one sequence, block after block."""
    image = helpers.normal(BATCH, 4, 6, DIM)
    in_blocks = image.reshape(BATCH, 2, 2, 3, 2, DIM).swapaxes(2, 3)
    attention = built_attention(axes=2, block_shape=(2, 2))
    output, _ = golden_cases.run(attention, image, use_causal_mask=True)
    sequence = in_blocks.reshape(BATCH, 24, DIM)
    expected, _ = golden_cases.run(built_attention(), sequence, use_causal_mask=True)
    expected = expected.reshape(BATCH, 2, 3, 2, 2, DIM).swapaxes(2, 3)
    golden_cases.assert_close(output, expected.reshape(image.shape), 1e-5)
